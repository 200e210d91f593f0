"""Pages: any text in a results folder is shown to the reader as text."""

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
from tam.lab.core.study import Curve, Table, Variant
from tam.lab.report import build_report, render_html, render_markdown
from tam.lab.report.charts import Series, line_chart
from tam.lab.report.model import Report, Section, TableData
from tam.lab.report.render import escape_markdown, quote_address, render_page
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
    "details", "summary", "caption", "desc", "defs", "pattern", "rect", "g",
}  # fmt: skip
OWN_ATTRIBUTES = {
    "lang", "charset", "name", "content", "href", "id", "class", "viewbox", "role", "aria-label", "d", "x",
    "y", "text-anchor", "transform", "points", "cx", "cy", "r", "textlength", "lengthadjust", "scope",
    "tabindex", "width", "height", "aria-labelledby", "patternunits", "patterntransform",
}  # fmt: skip


class PageParser(HTMLParser):
    """Collects the text of a page, and checks that it holds no tags or attributes but the template's."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.anchors: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in OWN_TAGS and {name for name, _ in attrs} <= OWN_ATTRIBUTES, (tag, attrs)
        assert all((value or "").startswith("#") for name, value in attrs if name == "href")
        self.text += [value for _, value in attrs if value]
        self.anchors += [value or "" for name, value in attrs if name == "id" and tag == "h2"]
        self.links += [value or "" for name, value in attrs if name == "href"]
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
        Variant(text, "sgdm", (0.1, 0.3)),
        Variant(f"TAM {text}", "tam", (0.2, 0.6), settings={"note": text}),
        Variant(f"SGDM {text}", "sgdm", control_of=f"TAM {text}"),
    )
    extras = ReportExtras(
        figures=lambda plan, styles: [line_chart([Series(text, [1, 2], [1, 2])], text, text, text), text],
        lines=lambda plan: [text],
        tables=lambda plan: [Table([text], [[text]], text)],
    )
    curves = (Curve("loss", text, text, by=text),)
    plan = plan_for(
        2, experiment={"extras": extras, "choices": {text: text}, "config": AnyConfig, "curves": curves},
        name=text, title=text, variants=variants, baseline=text, label=text, test_label=text,
        tuning_seeds=(100, 101),
        workload={**WORKLOAD, "data": text, "model": text},
        choices={f"note {text}": text, "the paper says": text},
        paper={text: (1.0, None), f"TAM {text}": (2.0, None)},
    )  # fmt: skip
    for _ in range(2):  # tuning first
        for i, (_, trial) in enumerate(plan.to_run()):
            timing = {"seconds": 1.0, "together": 1, "date": text}
            finish(plan, trial, trial.lr + i**2 * trial.lr, test=80.0, timing=timing, machine={text: text})
    twin = plan_for(2, name=text, title=text, variants=(Variant(text, "sgdm", (0.1,)),), baseline=text)
    return build_report([PresetGroup([plan, twin], (plan.study,))])


@pytest.mark.parametrize("text", HOSTILE)
def test_html_shows_hostile_text_as_text(text: str) -> None:
    parser = PageParser(render_html(hostile_report(text)))  # which refuses what the template does not have
    assert not parser.open
    assert {text, f"TAM {text}", f"images: {text} (preset paper)"} <= set(parser.text)
    # The table of the grids, the row of the forest plot, the anchors and the summaries of settings.
    assert {f"{text}: TAM {text}", f"against {text}"} <= set(parser.text)
    assert any(f'In brackets: "TAM {text}" minus "{text}".' in one for one in parser.text)
    first, second = parser.anchors
    assert re.fullmatch(r"images-paper-[A-Za-z0-9.-]*", first) and second == f"{first}-2"
    assert parser.links == [f"#{anchor}" for anchor in parser.anchors]
    assert f"images: {text} (preset paper): settings and machines" in parser.text


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_hostile_text_as_text(text: str) -> None:
    page = render_markdown(hostile_report(text))
    anchors = re.findall(r'^<a id="([^"<>\n]*)"></a>$', page, re.MULTILINE)
    assert len(anchors) == len(set(anchors)) == 2 and anchors[0].startswith("images-paper-")
    page = re.sub(r'^<a id="[^"<>\n]*"></a>$', "", page, flags=re.MULTILINE)
    assert "<" not in page and ">" not in page  # no other HTML, no autolinks
    assert not re.search(r"(?<!\\)(?:\\\\)*[\[\]`]", page)  # no links, references or code
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert len(headings) == 7  # the title, two studies, the settings: of all, the choices and both studies
    tables = [line for line in page.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) - 1 for line in tables]
    # The study, its grids, the table of the experiment, and the study that was not run.
    assert cells == [9] * 5 + [3] * 4 + [1] * 3 + [7] * 3


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


@pytest.mark.parametrize(
    "text, quoted",
    [
        ("../results/a_b/report.md#c-0.1", "../results/a_b/report.md#c-0.1"),
        ("https://arxiv.org/html/2412.18790v1#S4.SS1", "https://arxiv.org/html/2412.18790v1#S4.SS1"),
        ('a b)<c>[d]|"e\n`', "a%20b%29%3Cc%3E%5Bd%5D%7C%22e%0A%60"),
    ],
)
def test_an_address_cannot_end_its_link(text: str, quoted: str) -> None:
    assert quote_address(text) == quoted


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
