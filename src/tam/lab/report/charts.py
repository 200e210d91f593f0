"""Line charts as inline SVG.

    svg = line_chart([Series("TAM", x, y, low, high)], "Loss", "epoch", "loss", log_y=True)

A chart is `Markup`: every value in it is escaped. The colours are in the style sheet of the page, so one page
serves light and dark screens. An SVG inside HTML needs no namespace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from markupsafe import Markup, escape

# Okabe and Ito's colours for colour-blind readers, darkened or lightened until they can be read on
# the background; dashes tell the lines apart where colours do not.
LIGHT_COLOURS = ("#0072b2", "#c44e00", "#00795a", "#a63d7d", "#8a6500", "#3f3f3f", "#2b8fc4", "#6a4fb3")
DARK_COLOURS = ("#4ea8e8", "#ff8b4a", "#2fc7a0", "#e58cc1", "#e3bd3b", "#d0d0d0", "#8fd0ff", "#b19cf2")
DASHES = ("", "9 3", "2 3", "9 3 2 3", "5 3", "14 4", "9 3 2 3 2 3", "4 2 1 2")
STYLE_COUNT = 3 * len(DASHES)  # from the second round on a colour has the next dashes

WIDTH, _HEIGHT = 560, 330  # the plot with its title and axes; the legend comes below
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 22, 34, 46
_LEGEND_ROW, _INSET = 20, 12.0
MAX_HOVERS = 20  # hover targets per line
_TOLERANCE = 0.1  # in pixels: points are left out while the line moves by less than that

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line, with a band if it has `low` and `high`. Values that are not finite leave gaps.

    `style` numbers the colour and dash pattern; by default it is the line's place in the chart. Set it to
    keep a line's look from chart to chart.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: int | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"series {self.name!r}: low and high must be given together")
        for key in ("y", "low", "high"):
            column = getattr(self, key)
            if column is not None and len(column) != len(self.x):
                raise ValueError(f"series {self.name!r}: {len(self.x)} x but {len(column)} {key}")


def line_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, log_y: bool = False
) -> Markup:
    """Return the chart as an `<svg>` element. With `log_y`, values of 0 and less leave gaps."""
    columns = [column for s in series for column in (s.y, s.low, s.high) if column is not None]
    x_axis = Axis([v for s in series for v in s.x], _LEFT, WIDTH - _RIGHT)
    y_axis = Axis([v for column in columns for v in column], _HEIGHT - _BOTTOM, _TOP, margin=0.04, log=log_y)
    styled = [((i if s.style is None else s.style) % STYLE_COUNT, s) for i, s in enumerate(series)]
    frame = _frame(x_axis, y_axis, title, x_label, y_label)
    bands = [part for style, s in styled for part in _band(s, style, x_axis, y_axis)]
    lines = [part for style, s in styled for part in _line(s, style, x_axis, y_axis)]
    hovers = [part for s in series for part in _hovers(s, x_axis, y_axis, x_label)]
    no_data = [] if lines else [label_at(WIDTH / 2, _HEIGHT / 2, "no data", "middle")]
    legend, height = _legend([(s.name, style) for style, s in styled])
    # All bands lie below all lines, and what is pointed at above them.
    return chart_element(title, height, [*frame, *bands, *lines, *hovers, *no_data, *legend])


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """Return an SVG element. Everything but Markup is escaped; `_` in the name of an attribute means `-`."""
    attributes = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    inside = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value is not None)
    return Markup(f"<{tag}{inside}>{''.join(map(escape, children))}</{tag}>")


def chart_element(title: str, height: float, parts: Iterable[Markup]) -> Markup:
    box, inside = f"0 0 {WIDTH} {height}", Markup("\n").join(parts)
    return element("svg", inside, class_="chart", viewBox=box, role="img", aria_label=title)


def label_at(x: float, y: float, text: str, anchor: str, css: str | None = None, **more: object) -> Markup:
    return element("text", text, x=f"{x:g}", y=f"{y:.1f}", text_anchor=anchor, class_=css, **more)


def title_at(left: float, title: str) -> Markup:
    """Return the title above a chart. A long one is squeezed."""
    room = WIDTH - left - 8
    squeeze = {"textLength": f"{room:g}", "lengthAdjust": "spacingAndGlyphs"}
    return label_at(left, 18, title, "start", "title", **(squeeze if 8 * len(title) > room else {}))


class Axis:
    """Maps values to pixels, from `start` to `end`, and knows its ticks.

    `margin` is the room on either side of the values, as a part of their range.
    """

    def __init__(
        self, values: Iterable[float], start: float, end: float, margin: float = 0.0, log: bool = False
    ) -> None:
        self.start, self.end, self.log = start, end, log
        drawable = [v for v in values if self.draws(v)]
        low, high = (min(drawable), max(drawable)) if drawable else (1.0, 1.0) if log else (0.0, 1.0)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            room = max(0.5, 1e-6 * abs(low))
            self.low, self.high = (low / 2, high * 2) if log else (low - room, high + room)
            self.ticks = [(low, f"{low:.6g}")]
            return
        room = (high / low) ** margin if log else (high - low) * margin
        self.low, self.high = (low / room, high * room) if log else (low - room, high + room)
        marks = _log_ticks(self.low, self.high) if log else _ticks(self.low, self.high)
        self.ticks = list(zip(marks, _labels(marks, log), strict=True))

    def draws(self, v: float) -> bool:
        # Beyond 1e100 differences and products would soon overflow; no curve lives there.
        return math.isfinite(v) and abs(v) < 1e100 and not (self.log and v < 1e-100)

    def __call__(self, v: float) -> float:
        part = (v - self.low) / (self.high - self.low)
        if self.log:
            part = math.log(v / self.low) / math.log(self.high / self.low)
        return self.start + part * (self.end - self.start)


def _ticks(low: float, high: float) -> list[float]:
    """Return 4 to 9 round values within [low, high]."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.85)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten within [low, high]; 1, 2, 5 times them, or round values, if they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / 7))
    for steps in ((1.0,), (1.0, 2.0, 5.0)):
        marks = [m * 10.0**k for k in range(first, last + 1, stride) for m in steps]
        marks = [v for v in marks if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if len(marks) >= 3:
            return marks
    return _ticks(low, high)


def _labels(marks: Sequence[float], log: bool) -> list[str]:
    if not log and len(marks) > 1 and max(map(abs, marks)) < 1e6:
        decimals = max(0, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9))
        if decimals <= 6:
            return [f"{v + 0.0:.{decimals}f}" for v in marks]  # + 0.0: no "-0"
    tries = ([f"{v:.{digits}g}" for v in marks] for digits in range(3, 17))
    return next((labels for labels in tries if len(set(labels)) == len(labels)), [str(v) for v in marks])


def _frame(x_axis: Axis, y_axis: Axis, title: str, x_label: str, y_label: str) -> Iterator[Markup]:
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
    yield title_at(left, title)
    for value, label in y_axis.ticks:
        y = y_axis(value)
        yield element("path", class_="grid", d=f"M{left} {y:.1f}H{right}")
        yield label_at(left - 7, y + 4, label, "end", "dim")
    for value, label in x_axis.ticks:
        x = x_axis(value)
        yield element("path", class_="axis", d=f"M{x:.1f} {bottom}v5")
        yield label_at(x, bottom + 18, label, "middle", "dim")
    middle = (top + bottom) / 2
    yield element("path", class_="axis", d=f"M{left} {top}V{bottom}H{right}")
    yield label_at((left + right) / 2, bottom + 38, x_label, "middle")
    yield label_at(14, middle, y_label, "middle", transform=f"rotate(-90 14 {middle:g})")


def _band(s: Series, style: int, x_axis: Axis, y_axis: Axis) -> Iterator[Markup]:
    if s.low is None or s.high is None:
        return
    for rows in _drawable_rows(x_axis, y_axis, s.x, s.low, s.high):
        upper = _thin([(x_axis(x), y_axis(high)) for x, _, high in rows])
        lower = _thin([(x_axis(x), y_axis(low)) for x, low, _ in rows])
        yield element("polygon", class_=f"band s{style}", points=_points([*upper, *reversed(lower)]))


def _line(s: Series, style: int, x_axis: Axis, y_axis: Axis) -> Iterator[Markup]:
    for rows in _drawable_rows(x_axis, y_axis, s.x, s.y):
        points = [(x_axis(x), y_axis(y)) for x, y in rows]
        if len(points) == 1:
            ((x, y),) = points
            yield element("circle", class_=f"dot s{style}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3)
        else:
            yield element("polyline", class_=f"line s{style}", points=_points(_thin(points)))


def _hovers(s: Series, x_axis: Axis, y_axis: Axis, x_label: str) -> Iterator[Markup]:
    """Return targets that show a value when they are pointed at, evenly spaced, the last one included."""
    last, count = len(s.x) - 1, min(len(s.x), MAX_HOVERS)
    for i in (last * place // max(1, count - 1) for place in range(count)):
        x, y = s.x[i], s.y[i]
        if not (x_axis.draws(x) and y_axis.draws(y)):
            continue
        spread = "" if s.low is None or s.high is None else f" ({s.low[i]:.4g} to {s.high[i]:.4g})"
        title = element("title", f"{s.name}, {x_label} {x:g}: {y:.4g}{spread}")
        yield element("circle", title, class_="hover", cx=f"{x_axis(x):.1f}", cy=f"{y_axis(y):.1f}", r=4)


def _legend(entries: Sequence[tuple[str, int]]) -> tuple[list[Markup], int]:
    """Return the legend's elements and the height of the chart with it."""
    parts, x, bottom = [], math.inf, _HEIGHT
    for name, style in entries:
        width = 50 + 7.4 * len(name)  # the text's width is not known here; this is ample for most
        if x > _INSET and x + width > WIDTH:
            x, bottom = _INSET, bottom + _LEGEND_ROW
        parts.append(element("path", class_=f"line s{style}", d=f"M{x:g} {bottom - 12}h30"))
        parts.append(label_at(x + 36, bottom - 8, name, "start"))
        x += width
    return parts, bottom


def _drawable_rows(x_axis: Axis, y_axis: Axis, *columns: Sequence[float]) -> list[list[tuple[float, ...]]]:
    """Return stretches of rows (x first) that can be drawn; the gaps lie between them."""

    def draws(row: tuple[float, ...]) -> bool:
        return x_axis.draws(row[0]) and all(map(y_axis.draws, row[1:]))

    return [[*rows] for is_drawable, rows in groupby(zip(*columns, strict=True), draws) if is_drawable]


def _thin(points: list[Point]) -> list[Point]:
    """Leave out points of a line from left to right that lie on it anyway."""
    thinned, low, high = points[:1], -math.inf, math.inf  # slopes that pass all points left out
    for before, (x, y) in pairwise(points):
        if x <= before[0]:
            return points
        if not low <= (y - thinned[-1][1]) / (x - thinned[-1][0]) <= high:
            thinned.append(before)
            low, high = -math.inf, math.inf
        start_x, start_y = thinned[-1]
        low = max(low, (y - _TOLERANCE - start_y) / (x - start_x))
        high = min(high, (y + _TOLERANCE - start_y) / (x - start_x))
    return [*thinned, *points[1:][-1:]]


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
