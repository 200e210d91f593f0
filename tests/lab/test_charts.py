"""The charts: well-formed whatever they are given, and showing what they were given."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tam.lab.charts import Series, line_chart, page, table

NAN = math.nan


def chart(*series: Series, log_y: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(series, "title", "x", "y", log_y=log_y))


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in svg.iter() if name in e.get("class", "").split()]


def texts(svg: ElementTree.Element) -> list[str]:
    return [e.text or "" for e in svg.iter("text")]


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize(
    "series",
    [
        [],
        [Series("empty", [], [])],
        [Series("no finite value", [1, 2], [NAN, math.inf], [NAN, NAN], [NAN, NAN])],
    ],
)
def test_says_so_where_there_is_no_data(series: list[Series], log_y: bool) -> None:
    svg = chart(*series, log_y=log_y)
    assert "no data" in texts(svg)
    assert not of_class(svg, "hover")


@pytest.mark.parametrize("log_y", [False, True])
def test_single_point_is_a_dot(log_y: bool) -> None:
    svg = chart(Series("a", [3], [0.5], [0.4], [0.6]), log_y=log_y)
    assert len(of_class(svg, "dot")) == 1
    assert "no data" not in texts(svg)


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("value", [1.0, 1e-30, 123456.0])
def test_constant_series_has_one_tick(value: float, log_y: bool) -> None:
    svg = chart(Series("a", [1, 2, 3], [value] * 3), log_y=log_y)
    assert f"{value:.6g}" in texts(svg)
    (line,) = svg.iter("polyline")
    assert len({point.split(",")[1] for point in line.attrib["points"].split()}) == 1


def test_values_that_are_not_finite_leave_gaps() -> None:
    svg = chart(Series("a", [1, 2, 3, 4, 5, 6], [1, 2, NAN, 3, 4, math.inf]))
    assert len(list(svg.iter("polyline"))) == 2
    assert len(of_class(svg, "hover")) == 4


def test_log_axis_leaves_gaps_at_zero_and_below() -> None:
    svg = chart(Series("a", [1, 2, 3, 4, 5], [1, 10, 0, 100, -1]), log_y=True)
    assert len(list(svg.iter("polyline"))) == 1
    assert len(of_class(svg, "dot")) == 1


def test_log_axis_has_equal_steps_for_equal_factors() -> None:
    svg = chart(Series("a", [1, 2, 3], [1, 10, 100]), log_y=True)
    (line,) = svg.iter("polyline")
    y = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert y[0] > y[1]


def test_band_and_hover_show_low_and_high() -> None:
    svg = chart(Series("a", [1, 2], [1, 2], [0.5, 1.5], [1.5, 2.5]))
    assert len(of_class(svg, "band")) == 1
    assert [e.text for e in svg.iter("title")] == ["a, x 1: 1 (0.5 to 1.5)", "a, x 2: 2 (1.5 to 2.5)"]


def test_style_follows_the_place_unless_given() -> None:
    svg = chart(
        Series("a", [1, 2], [1, 2]), Series("b", [1, 2], [1, 2]), Series("c", [1, 2], [1, 2], style=5)
    )
    found = [e.attrib["class"] for e in svg.iter("polyline")]
    assert found == ["line s0", "line s1", "line s5"]


def test_more_series_than_styles() -> None:
    svg = chart(*(Series(f"series {i}", [0, 1], [i, i + 1]) for i in range(40)))
    assert {f"series {i}" for i in range(40)} <= set(texts(svg))


def test_more_series_than_colours_are_told_apart() -> None:
    svg = chart(*(Series(f"series {i}", [0, 1], [i, i + 1]) for i in range(24)))
    classes = [e.attrib["class"].split()[1] for e in svg.iter("polyline")]
    looks = dict(re.findall(r"\.(s\d+) (\{.*?\})", page("", "")))  # a colour and dashes, by class
    assert len({looks[name] for name in classes}) == 24


def test_text_is_escaped() -> None:
    bad = '<script>&"'
    svg = ElementTree.fromstring(line_chart([Series(bad, [1, 2], [1, 2])], bad, bad, bad))
    assert texts(svg).count(bad) == 4
    assert svg.get("aria-label") == bad
    assert "<script>" not in page(bad, table([bad], [[bad]]))


@pytest.mark.parametrize(
    "values",
    [([1], [1, 2]), ([1, 2], [1, 2], [1], [1, 2]), ([1], [1], [1], None)],
    ids=["y", "low", "no high"],
)
def test_columns_must_fit(values: tuple[list[float], ...]) -> None:
    with pytest.raises(ValueError, match="series 'a'"):
        Series("a", *values)


numbers = st.floats() | st.sampled_from([0.0, 1.0, 1e-300, 1e300, -5.0])
rows = st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=8)


@given(rows, st.booleans())
def test_any_numbers_give_a_chart_within_its_box(rows: list[tuple[float, ...]], log_y: bool) -> None:
    x, y, low, high = ([row[i] for row in rows] for i in range(4))
    svg = chart(Series("a", x, y, low, high), log_y=log_y)
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    for e in svg.iter():
        for point in e.get("points", "").split():
            px, py = map(float, point.split(","))
            assert 0 <= px <= width and 0 <= py <= height
    for text in svg.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9), st.booleans())
def test_ticks_are_few_and_distinct(low: float, span: float, log_y: bool) -> None:
    low = abs(low) + 1e-9 if log_y else low
    svg = chart(Series("a", [0, 1], [low, low + span]), log_y=log_y)
    labels = [e.text for e in of_class(svg, "dim") if e.get("text-anchor") == "end"]
    assert 1 <= len(labels) <= 12
    assert len(set(labels)) == len(labels)


def test_page_is_whole_and_needs_nothing_else() -> None:
    html = page("A page", line_chart([Series("a", [1, 2], [1, 2])], "t", "x", "y"))
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    assert "prefers-color-scheme: dark" in html
    assert "http" not in html and "<link" not in html and "<script" not in html
