"""Pages: whatever a results folder says, a reader sees it as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from tam.lab.core.config import TrialConfig
from tam.lab.core.registry import ReportExtras
from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Curve, Variant
from tam.lab.report import build_report, render_html, render_markdown
from tam.lab.report.charts import Series, line_chart
from tam.lab.report.model import Report, Section, TableData
from tam.lab.report.render import escape_markdown, render_page
from tests.lab.report.results import WORKLOAD, finish, plan_for

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</svg><script>alert(1)</script>",
    "</title></style><iframe src=javascript:alert(1)>",
    "' onmouseover='alert(1)",
    "[click](javascript:alert(1))",
    "![x](javascript:alert(1))",
    "<javascript:alert(1)>",
    "a | b |\n\n<script>alert(1)</script>\n# Heading",
    "`</code><script>`",
    "&lt;script&gt; \\<script>",
    "[x]: javascript:alert(1)",
)
VOID_TAGS = {"meta", "br"}
OWN_TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "ul", "li", "a", "div", "table", "thead",
    "tbody", "tr", "th", "td", "p", "dl", "dt", "dd", "svg", "path", "text", "circle", "polyline", "polygon",
}  # fmt: skip
OWN_ATTRIBUTES = {
    "lang", "charset", "name", "content", "href", "id", "class", "viewbox", "role", "aria-label", "d", "x",
    "y", "text-anchor", "transform", "points", "cx", "cy", "r", "textlength", "lengthadjust",
}  # fmt: skip


class PageParser(HTMLParser):
    """Collects the text of a page, and checks that it holds no tags or attributes but the template's."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in OWN_TAGS and {name for name, _ in attrs} <= OWN_ATTRIBUTES, (tag, attrs)
        assert all((value or "").startswith("#") for name, value in attrs if name == "href")
        self.text += [value for _, value in attrs if value]
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@dataclass(frozen=True, kw_only=True)
class AnyConfig(TrialConfig):
    """A trial that takes any text."""

    data: str
    model: str
    note: str = ""


def hostile_report(text: str) -> Report:
    """Return a report of results that say this wherever they can say something."""
    variants = (
        Variant(text, "sgdm", (0.1,)),
        Variant(f"TAM {text}", "tam", (0.2,), settings={"note": text}),
        Variant(f"SGDM {text}", "sgdm", control_of=f"TAM {text}"),
    )
    extras = ReportExtras(
        figures=lambda plan: [line_chart([Series(text, [1, 2], [1, 2])], text, text, text), text],
        lines=lambda plan: [text],
        tables=lambda plan: [([text], [[text]])],
    )
    curves = (Curve("loss", text, text, by=text),)
    plan = plan_for(
        2, experiment={"extras": extras, "choices": {text: text}, "config": AnyConfig, "curves": curves},
        name=text, title=text, variants=variants, baseline=text, label=text, test_label=text,
        workload={**WORKLOAD, "data": text, "model": text},
        choices={f"note {text}": text, "the paper says": text},
        paper={text: (1.0, None), f"TAM {text}": (2.0, None)},
    )  # fmt: skip
    for variant in variants:
        for i, trial in enumerate(plan.comparison_trials(variant) or []):
            timing = {"seconds": 1.0, "together": 1, "date": text}
            finish(plan, trial, trial.lr + i**2 * trial.lr, test=80.0, timing=timing, machine={text: text})
    return build_report([PresetGroup([plan], (plan.study,))])


@pytest.mark.parametrize("text", HOSTILE)
def test_html_shows_hostile_text_as_text(text: str) -> None:
    parser = PageParser(render_html(hostile_report(text)))  # which refuses what the template does not have
    assert not parser.open
    assert {text, f"TAM {text}", f"images: {text} (preset paper)"} <= set(parser.text)


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_hostile_text_as_text(text: str) -> None:
    page = render_markdown(hostile_report(text))
    assert "<" not in page and ">" not in page  # no HTML, no autolinks
    assert not re.search(r"(?<!\\)(?:\\\\)*[\[\]`]", page)  # no links, references or code
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert len(headings) == 3  # the title, the overview and the study
    tables = [line for line in page.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) - 1 for line in tables]
    assert cells == [2] * 3 + [10] * 5 + [1] * 3  # the overview, the study, and the table of the experiment


@pytest.mark.parametrize(
    "text",
    [
        "lr 0.1",
        "4.2",
        "SGDM, half its lr",
        "-0.0121",
        "+0.1",
        "(a) 5% ± 3: x = y / 2; it's",
        "weight_decay 0.1",
        "lr: 0.1, http, torch 2.13.0+cu126",
    ],
)
def test_ordinary_text_stays_as_it_is_in_markdown(text: str) -> None:
    assert escape_markdown(text) == text


@pytest.mark.parametrize(
    "text, escaped",
    [
        ("a|b", "a\\|b"),
        ("a<b> & c", "a&lt;b&gt; &amp; c"),
        ("*a* _b_ `c` [d] #e \\f", "\\*a\\* \\_b\\_ \\`c\\` \\[d\\] \\#e \\\\f"),
        ("a\nb\r\nc\u2028d", "a b c d"),
        ("__init__", "\\_\\_init\\_\\_"),
        ("https://a.b WWW.c.d e@f.g", "https\\://a.b WWW\\.c.d e\\@f.g"),
        ("~~a~~ $b$", "\\~\\~a\\~\\~ \\$b\\$"),
        (None, "None"),
    ],
)
def test_markdown_escapes(text: object, escaped: str) -> None:
    assert escape_markdown(text) == escaped


@given(st.text(max_size=30))
def test_any_text_is_one_line_without_html(text: str) -> None:
    escaped = escape_markdown(text)
    assert len(escaped.splitlines()) <= 1
    assert not re.search(r"[<>]|&(?!(?:amp|lt|gt);)", escaped)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*\[\]]", escaped)


def test_a_chart_that_is_plain_text_is_escaped() -> None:
    charts = [Markup("<svg></svg>"), "<svg onload=alert(1)></svg>"]
    page = render_page("t", [Section(charts=charts)])
    assert "<svg></svg>" in page and "<svg onload" not in page and "&lt;svg onload" in page


def test_a_page_needs_nothing_else_and_fits_light_and_dark_screens() -> None:
    chart = line_chart([Series("a", [1, 2], [1, 2])], "t", "x", "y")
    page = render_page(
        "A page", [Section(title="First", anchor="a", tables=[TableData(["h"], [["c"]])], charts=[chart])]
    )
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert "prefers-color-scheme: dark" in page and '<h2 id="a">First</h2>' in page
    assert "http" not in page and "<link" not in page and "<script" not in page


def test_contents_link_to_every_section() -> None:
    page = render_page("t", [Section(title=name, anchor=name) for name in ("first", "second")])
    assert re.findall(r'href="#(\w+)"', page) == re.findall(r'id="(\w+)"', page) == ["first", "second"]
