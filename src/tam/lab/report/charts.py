"""Charts as inline SVG: what is drawn where. The templates draw it.

    svg = line_chart([Series("TAM", x, y, low, high)], "Loss", "epoch", "loss", log_y=True)

A chart is `Markup`: every value in it is escaped. The colours are in the style sheet of the page, so one page
serves light and dark screens. An SVG inside HTML needs no namespace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, pairwise
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup

from tam.lab.report.render import render

STYLE_COUNT = 48  # in the style sheet
WIDTH, _HEIGHT = 560, 330  # the plot with its title and axes; the legend comes below
MAX_HOVERS = 20  # hover targets per line
_TOLERANCE = 0.1  # in pixels: points are left out while the line moves by less than that

Row = tuple[float, ...]  # x first


@dataclass(frozen=True)
class Series:
    """A line, with a band if it has `low` and `high`. Values that are not finite leave gaps.

    `style` numbers the colour and dash pattern; by default it is the first one that no other line of the
    chart has. Set it to keep a line's look from chart to chart. `points` are drawn as dots next to the line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: int | None = None
    points: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"series {self.name!r}: low and high must be given together")
        for key in ("y", "low", "high"):
            column = getattr(self, key)
            if column is not None and len(column) != len(self.x):
                raise ValueError(f"series {self.name!r}: {len(self.x)} x but {len(column)} {key}")


def mean_series(name: str, values_by_x: Mapping[float, Sequence[float]], style: int | None = None) -> Series:
    """Return the mean of several values at each x, with a band from the smallest to the largest.

    There is a gap where one of them is not finite.
    """
    columns = [v if all(map(math.isfinite, v)) else [math.nan] for v in values_by_x.values()]
    low, high = [*map(min, columns)], [*map(max, columns)]
    return Series(name, [*values_by_x], [*map(fmean, columns)], low, high, style)


class Bar(NamedTuple):
    """Parts from the first bound to the second, to the third and so on, and the text at the end."""

    label: str
    bounds: Sequence[float]
    styles: Sequence[int]  # of the parts
    text: str


def line_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, log_x: bool = False,
    log_y: bool = False, limit: float = math.inf,
) -> Markup:  # fmt: skip
    """Return the chart as an `<svg>` element. On a logarithmic axis, values of 0 and less leave gaps.

    Lines end at `limit`. A triangle at the top marks each x at which a line or a dot lies above it.
    """
    above = [_above(s, limit, x_label) for s in series]
    series = [_clip(s, limit, log_x) for s in series]
    columns = [column for s in series for column in (s.y, s.low, s.high) if column is not None]
    columns += [[y for _, y in s.points] for s in series]
    x_axis = Axis([v for s in series for v in s.x], 62, WIDTH - 22, margin=0.04 * log_x, log=log_x)
    y_axis = Axis([v for column in columns for v in column], _HEIGHT - 46, 34, margin=0.04, log=log_y)
    taken = {s.style for s in series if s.style is not None}
    free = (style for style in count() if style not in taken)
    styled = [((next(free) if s.style is None else s.style) % STYLE_COUNT, s) for s in series]
    bands = [(style, outline) for style, s in styled for outline in _bands(s, x_axis, y_axis)]
    lines = [(style, _thin(rows)) for style, s in styled for rows in _stretches(x_axis, y_axis, s.x, s.y)]
    dots = [
        (style, x_axis(x), y_axis(y))
        for style, s in styled
        for x, y in s.points
        if x_axis.draws(x) and y_axis.draws(y)
    ]
    marks: list[tuple[int, float, float, str]] = []
    for (style, _), of_series in zip(styled, above, strict=True):
        for x, text in of_series:  # several at one x stand side by side
            place = next(at for at in count(x_axis(x), 7) if all(abs(at - one[1]) >= 7 for one in marks))
            marks.append((style, place, y_axis.end, text))
    hovers = [hover for s in series for hover in _hovers(s, x_axis, y_axis, x_label)]
    legend, height = _legend(styled)
    frame = {"width": WIDTH, "height": height, "x_axis": x_axis, "y_axis": y_axis}
    texts = {"title": title, "x_label": x_label, "y_label": y_label, "legend": legend}
    drawn = {"bands": bands, "lines": lines, "dots": dots, "marks": marks, "hovers": hovers}
    return render("line_chart.svg.j2", **drawn, **frame, **texts)


def _above(s: Series, limit: float, x_label: str) -> list[tuple[float, str]]:
    """Return the x at which a line or some of its dots lie above a limit, and what to say there."""
    lines = dict(zip(s.x, s.y, strict=True))
    counts = Counter(x for x, y in s.points if y > limit)
    places = sorted({x for x, y in lines.items() if y > limit} | {*counts})
    values = {x: f": {lines[x]:.4g}" if x in lines else "" for x in places}
    return [(x, f"{s.name}, {x_label} {x:g}{values[x]}; dots above the axis: {counts[x]}") for x in places]


def _clip(s: Series, limit: float, log_x: bool) -> Series:
    """Return a series without what lies above a limit. Its line goes up to where it crosses the limit."""
    if math.isinf(limit):
        return s
    x, y = [*s.x[:1]], [value if value <= limit else math.nan for value in s.y[:1]]
    for (x0, y0), (x1, y1) in pairwise(zip(s.x, s.y, strict=True)):
        if (y0 > limit) != (y1 > limit) and math.isfinite(y0 + y1):
            part = (limit - y0) / (y1 - y0)
            x.append(x0 * (x1 / x0) ** part if log_x else x0 + (x1 - x0) * part)
            y.append(limit)
        x.append(x1)
        y.append(y1 if y1 <= limit else math.nan)
    return replace(s, x=x, y=y, low=None, high=None, points=[one for one in s.points if one[1] <= limit])


def bar_chart(bars: Sequence[Bar], title: str, x_label: str, legend: Mapping[str, int]) -> Markup:
    """Return horizontal bars as an `<svg>` element. The legend has the style of each part's name."""
    axis = Axis([0, *(x for bar in bars for x in bar.bounds)], 205, WIDTH - 100, margin=0.02)
    texts = {"title": title, "x_label": x_label, "legend": legend}
    return render("bar_chart.svg.j2", bars=bars, width=WIDTH, axis=axis, **texts)


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


def _bands(s: Series, x_axis: Axis, y_axis: Axis) -> Iterator[list[Row]]:
    if s.low is not None and s.high is not None:
        for rows in _stretches(x_axis, y_axis, s.x, s.low, s.high):
            lower, upper = (_thin([(row[0], row[i]) for row in rows]) for i in (1, 2))
            yield [*upper, *reversed(lower)]


def _hovers(s: Series, x_axis: Axis, y_axis: Axis, x_label: str) -> Iterator[tuple[float, float, str]]:
    """Return targets that show a value when they are pointed at, evenly spaced, the last one included."""
    last, targets = len(s.x) - 1, min(len(s.x), MAX_HOVERS)
    for i in (last * place // max(1, targets - 1) for place in range(targets)):
        x, y = s.x[i], s.y[i]
        if x_axis.draws(x) and y_axis.draws(y):
            spread = "" if s.low is None or s.high is None else f" ({s.low[i]:.4g} to {s.high[i]:.4g})"
            yield x_axis(x), y_axis(y), f"{s.name}, {x_label} {x:g}: {y:.4g}{spread}"


def _legend(styled: Sequence[tuple[int, Series]]) -> tuple[list[tuple[str, int, float, int]], int]:
    """Return the names with their styles and places, and the height of the chart with them."""
    inset, entries, x, bottom = 12.0, [], math.inf, _HEIGHT
    for style, s in styled:
        width = 50 + 7.4 * len(s.name)  # the text's width is not known here; this is ample for most
        if x > inset and x + width > WIDTH:
            x, bottom = inset, bottom + 20
        entries.append((s.name, style, x, bottom))
        x += width
    return entries, bottom


def _stretches(x_axis: Axis, y_axis: Axis, *columns: Sequence[float]) -> list[list[Row]]:
    """Return the stretches of rows that can be drawn, in pixels; the gaps lie between them."""

    def draws(row: Row) -> bool:
        return x_axis.draws(row[0]) and all(map(y_axis.draws, row[1:]))

    stretches = [[*rows] for is_drawable, rows in groupby(zip(*columns, strict=True), draws) if is_drawable]
    return [[(x_axis(x), *map(y_axis, ys)) for x, *ys in rows] for rows in stretches]


def _thin(points: list[Row]) -> list[Row]:
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
