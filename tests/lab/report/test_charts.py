"""The charts: well-formed for any values, and showing what they were given."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tam.lab.report.charts import MAX_HOVERS, STYLE_COUNT, Bar, Series, bar_chart, line_chart
from tam.lab.report.render import render_page

NAN = math.nan


def chart(*series: Series, log_y: bool = False) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(series, "title", "x", "y", log_y=log_y))


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [e for e in svg.iter() if name in e.get("class", "").split()]


def texts(svg: ElementTree.Element) -> list[str]:
    return [e.text or "" for e in svg.iter("text")]


def hovers(svg: ElementTree.Element) -> list[str]:
    """Return what is shown when a point is pointed at."""
    return [e.text or "" for circle in svg.iter("circle") for e in circle.iter("title")]


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
    svg = chart(Series("a", [1, 2, 4], [1, 10, 100]), log_y=True)
    (line,) = svg.iter("polyline")
    y = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert y[0] > y[1]


def test_band_and_hover_show_low_and_high() -> None:
    svg = chart(Series("a", [1, 2], [1, 2], [0.5, 1.5], [1.5, 2.5]))
    assert len(of_class(svg, "band")) == 1
    assert hovers(svg) == ["a, x 1: 1 (0.5 to 1.5)", "a, x 2: 2 (1.5 to 2.5)"]


@pytest.mark.parametrize(
    "styles, looks",
    [([None, None, 5], ["s0", "s1", "s5"]), ([None, 0, 2, None], ["s1", "s0", "s2", "s3"]), ([50], ["s2"])],
)
def test_a_line_has_its_style_or_the_first_free_one(styles: list[int | None], looks: list[str]) -> None:
    svg = chart(*(Series(f"{i}", [1, 2], [1, 2], style=style) for i, style in enumerate(styles)))
    assert [e.attrib["class"] for e in svg.iter("polyline")] == [f"line {look}" for look in looks]


def test_more_series_than_styles() -> None:
    svg = chart(*(Series(f"series {i}", [0, 1], [i, i + 1]) for i in range(40)))
    assert {f"series {i}" for i in range(40)} <= set(texts(svg))


def test_more_series_than_colours_look_different() -> None:
    svg = chart(*(Series(f"series {i}", [0, 1], [i, i + 1]) for i in range(STYLE_COUNT)))
    classes = [e.attrib["class"].split()[1] for e in svg.iter("polyline")]
    looks = dict(re.findall(r"\.(s\d+) (\{.*?\})", render_page("", [])))  # a colour and dashes, by class
    assert len({looks[name] for name in classes}) == STYLE_COUNT >= 24


def test_text_is_escaped() -> None:
    bad = '<script>&"'
    svg = ElementTree.fromstring(line_chart([Series(bad, [1, 2], [1, 2])], bad, bad, bad))
    assert texts(svg).count(bad) == 4
    assert svg.get("aria-label") == bad
    assert (svg[0].text, svg[1].text) == (bad, f"{bad} against {bad}: {bad}")


def test_a_screen_reader_has_a_title_and_a_description() -> None:
    lines = ElementTree.fromstring(line_chart([Series("a", [1], [1]), Series("b", [1], [1])], "t", "x", "y"))
    bars = ElementTree.fromstring(
        bar_chart([Bar("row", [0, 1], [0], "1")], "t", "x", {"first": 0, "second": 1})
    )
    for svg, description in ((lines, "y against x: a; b"), (bars, "x: first; second")):
        assert [(e.tag, e.text) for e in svg[:2]] == [("title", "t"), ("desc", description)]
        assert svg.get("role") == "img"


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


def test_a_line_has_few_hover_targets_and_one_for_its_last_value() -> None:
    n = 10 * MAX_HOVERS + 3
    svg = chart(Series("a", range(n), [i**0.5 for i in range(n)]), Series("b", [1, 2], [3, 4]))
    names = hovers(svg)
    assert sum(name.startswith("a") for name in names) == MAX_HOVERS
    assert names[0].startswith("a, x 0:") and names[MAX_HOVERS - 1].startswith(f"a, x {n - 1}:")
    assert sum(name.startswith("b") for name in names) == 2


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=60))
def test_points_are_left_out_only_where_the_line_does_not_move(values: list[float]) -> None:
    y = [-1.0, 1.0, *values]  # the whole height
    (line,) = chart(Series("a", range(len(y)), y)).iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    bottom, top = points[0][1], points[1][1]
    left, right = points[0][0], points[-1][0]
    for i, value in enumerate(y):
        x = left + (right - left) * i / (len(y) - 1)
        after = next(k for k, point in enumerate(points) if point[0] >= x - 0.06)
        (x0, y0), (x1, y1) = points[max(0, after - 1)], points[after]
        drawn = y1 if x1 == x0 else y0 + (y1 - y0) * (min(x, x1) - x0) / (x1 - x0)
        expected = bottom + (top - bottom) * (value + 1) / 2
        slope = abs(y1 - y0) / max(x1 - x0, 1)
        assert drawn == pytest.approx(expected, abs=0.25 + 0.12 * slope)


def test_a_straight_line_needs_two_points() -> None:
    (line,) = chart(Series("a", range(300), range(300))).iter("polyline")
    assert len(line.attrib["points"].split()) == 2


def test_a_line_that_turns_back_keeps_all_points() -> None:
    (line,) = chart(Series("a", [0, 1, 2, 1, 0], [0, 1, 2, 3, 4])).iter("polyline")
    assert len(line.attrib["points"].split()) == 5
