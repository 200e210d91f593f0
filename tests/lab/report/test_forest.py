"""The forest plot: marks on the right side of the line, and readable without seeing it."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from tam.lab.report import build_report, render_html
from tam.lab.report.forest import ForestRow, Mark, Shape, forest_plot
from tam.lab.report.render import render_svg
from tests.lab.report.results import SGDM, TAM, VARIANTS, WORKLOAD, group_with

LEFT, ZERO, RIGHT, MARGIN = 312.0, 402.0, 492.0, 18.0  # pixels: -5 margins, none, +5 margins, and one
BAD = "\"><script>alert(1)</script>&'"


def plot(mark: Mark, text: str = "a", title: str = "The title") -> ElementTree.Element:
    row = ForestRow(text, text, [mark], text, text, text)
    return ElementTree.fromstring(forest_plot([row], title, text))


def group_of(svg: ElementTree.Element, shape: str = "square") -> ElementTree.Element:
    """Return the group of the first mark of this shape. Those of the legend come last."""
    return next(one for one in svg.iter("g") if one.get("class") == shape)


def x_of(svg: ElementTree.Element, shape: str = "square") -> float:
    rect = next(group_of(svg, shape).iter("rect"))
    return float(rect.attrib["x"]) + float(rect.attrib["width"]) / 2


def interval_of(svg: ElementTree.Element) -> tuple[float, ...]:
    path = next(one for one in svg.iter("path") if "interval" in one.get("class", ""))
    return tuple(map(float, re.findall(r"[MH]([\d.]+)", path.attrib["d"])))


def arrows_of(svg: ElementTree.Element) -> list[float]:
    """Return the tips of the arrows."""
    paths = [one.attrib["d"] for one in group_of(svg).iter("path") if one.get("class") == "arrow"]
    return [float(re.findall(r"M([\d.]+)", d)[0]) for d in paths]


def test_a_mark_is_placed_in_units_of_the_margin() -> None:
    svg = plot(Mark("square", 0.5, -1.0, 2.0))
    assert x_of(svg) == pytest.approx(ZERO + 0.5 * MARGIN)
    assert interval_of(svg) == pytest.approx((ZERO - MARGIN, ZERO + 2 * MARGIN))
    assert not arrows_of(svg)


@pytest.mark.parametrize("higher", [True, False])
def test_right_favours_tam_also_where_lower_is_better(higher: bool) -> None:
    # TAM minus SGDM is 1.98. At a margin of 1 that is 1.98 margins, to the left if lower is better.
    group = group_with({"SGDM": SGDM, "TAM": TAM}, variants=VARIANTS[:2], margin=1.0, higher=higher)
    svg = ElementTree.fromstring(build_report([group]).forest)
    side = 1 if higher else -1
    assert x_of(svg) == pytest.approx(ZERO + side * 1.98 * MARGIN, abs=0.06)
    low, high = interval_of(svg)
    assert low < x_of(svg) < high and (low > ZERO if higher else high < ZERO)
    texts = [one.text for one in svg.iter("text")]
    assert {"digits: TAM", "against SGDM", "n = 5"} <= set(texts)
    sign = "+" if higher else "-"  # the figures agree with the side
    assert any(
        (text or "").startswith(f"{sign}1.98 [{sign}") for text in texts
    )  # in the units of the outcome


@pytest.mark.parametrize(
    "mark, tips",
    [
        (Mark("square", 0.0, -6.0, 6.0), [LEFT - 5, RIGHT + 5]),
        (Mark("square", 7.0, 6.0, 8.0), [RIGHT + 5]),
        (Mark("square", -7.0), [LEFT - 5]),  # without an interval
        (Mark("square", 4.9), []),
    ],
)
def test_what_is_clipped_has_an_arrow(mark: Mark, tips: list[float]) -> None:
    svg = plot(mark)
    assert arrows_of(svg) == tips and LEFT < x_of(svg) < RIGHT


def test_an_interval_with_one_end_goes_to_the_edge() -> None:
    svg = plot(Mark("square", 1.0, 0.0, math.inf))
    assert interval_of(svg) == (ZERO, RIGHT) and arrows_of(svg) == [RIGHT + 5]


@pytest.mark.parametrize("end", [math.nan, math.inf])
def test_an_interval_without_ends_is_not_drawn(end: float) -> None:
    svg = plot(Mark("square", 0.0, -end, end))
    assert not [one for one in svg.iter("path") if one.get("class") == "interval"] and not arrows_of(svg)


def test_a_screen_reader_has_a_title_and_a_description() -> None:
    group = group_with({"SGDM": SGDM, "TAM": TAM}, variants=VARIANTS[:2])
    report = build_report([group])
    svg = ElementTree.fromstring(report.forest)
    title, description = svg[0], svg[1]
    assert (title.tag, title.text) == ("title", "Differences in units of the margin")
    assert (description.tag, description.text) == ("desc", report.answer[0])
    assert svg.get("role") == "img"
    assert svg.attrib["aria-labelledby"].split() == [title.get("id"), description.get("id")]
    assert render_html(report).count(f'id="{title.get("id")}"') == 1


@pytest.mark.parametrize("shape", ["square", "hollow", "triangle", "diamond"])
def test_the_legend_has_the_shapes_that_are_drawn(shape: Shape) -> None:
    legends = {
        "square": "equal effective lr", "hollow": "something else",
        "triangle": "against another seed's damping", "diamond": "the paper's figure",
    }  # fmt: skip
    row = ForestRow("a", "b", [Mark(shape, 0.0)], "c")
    svg = ElementTree.fromstring(forest_plot([row], "t", "d", hollow="something else"))
    assert {one.text for one in svg.iter("text")} & set(legends.values()) == {legends[shape]}


def test_text_is_escaped() -> None:
    svg = plot(Mark("square", 0.0), BAD, title=BAD)
    texts = [one.text for one in svg.iter("text")]
    assert texts.count(BAD) == 6  # the title, two lines of the label, the figures, n and the verdict
    assert [svg[0].text, svg[1].text] == [BAD, BAD]
    assert not list(svg.iter("script"))
    written = ElementTree.fromstring(render_svg(forest_plot([], BAD, BAD)))  # as a file
    assert written.tag == "{http://www.w3.org/2000/svg}svg"


def test_a_study_without_a_margin_has_no_plot() -> None:
    group = group_with({"SGDM": SGDM, "TAM": TAM}, variants=VARIANTS[:2], margin=0.0)
    report = build_report([group])
    assert report.forest == "" and report.tally.ahead == 1
    assert "<svg" not in render_html(report).partition("<h2")[0]


def test_rows_name_their_preset_if_there_are_several() -> None:
    outcomes = {"SGDM": SGDM, "TAM": TAM}
    first, second = (group_with(outcomes, workload={**WORKLOAD, "epochs": n}) for n in (1, 2))
    second.plans[0].preset = "fair"
    assert "preset" not in build_report([first]).forest
    forest = build_report([first, second]).forest
    assert "n = 5, preset paper" in forest and "n = 5, preset fair" in forest
