"""Pages from templates: HTML, Markdown and JSON from one model.

The template engine escapes every value, so a results folder from somebody else cannot run a script in a
reader's browser. Charts are `Markup`; a chart that is plain text is escaped as well.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tam.lab.core.results import without_nan
from tam.lab.report.model import Report, Section

# An underscore inside a word means nothing in Markdown, and settings are full of them. Many programs make
# links of "www.", "://" and addresses of mail, and formulas of what is between dollars.
_MARKDOWN_SPECIAL = re.compile(r"[\\`*\[\]|#~$@]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.|:(?=//)", re.IGNORECASE)


def escape_markdown(value: object) -> str:
    """Return a value as one line of Markdown that shows it as it is: no HTML, links, tables or emphasis."""
    text = html.escape(" ".join(str(value).split()), quote=False)  # not all programs know \<
    return _MARKDOWN_SPECIAL.sub(lambda match: "\\" + match[0], text)


class Address(str):
    """An address that a link can have as it is."""


def quote_address(text: str) -> Address:
    """Return an address without what could end a link in Markdown."""
    return Address(quote(text, safe="/:#?&=%~+,"))


def _finalize(value: object) -> str:
    return value if isinstance(value, Address) else escape_markdown(value)


_LOADER = PackageLoader("tam.lab.report")
_HTML = Environment(loader=_LOADER, undefined=StrictUndefined, trim_blocks=True, autoescape=True)
_MARKDOWN = Environment(loader=_LOADER, undefined=StrictUndefined, trim_blocks=True, finalize=_finalize)
_MARKDOWN.filters["address"] = quote_address


def render(template: str, **values: object) -> Markup:
    """Return a page or a part of one. A page needs no other file."""
    return Markup(_HTML.get_template(template).render(values))


def render_page(title: str, sections: Sequence[Section]) -> str:
    return render("page.html.j2", title=title, sections=sections)


def render_svg(chart: str) -> str:
    """Return a chart as a file, with the style sheet of the pages."""
    style = _HTML.get_template("style.css.j2").render()
    head, _, rest = str(chart).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}\n'


def render_html(report: Report) -> str:
    return render("report.html.j2", title=report.title, report=report)


def render_text(template: str, **values: object) -> str:
    """Return a page as Markdown."""
    return _MARKDOWN.get_template(template).render(values)


def render_markdown(report: Report) -> str:
    """Return a report as Markdown, without charts."""
    return render_text("report.md.j2", report=report)


def render_json(report: Report) -> str:
    """Return the model as JSON, without charts. What is not finite is null."""
    drawn = ("charts", "forest")
    model = asdict(report, dict_factory=lambda items: {k: v for k, v in items if k not in drawn})
    return json.dumps(without_nan(model), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS: Mapping[str, Callable[[Report], str]] = {".html": render_html, ".md": render_markdown}
