"""Line charts as inline SVG, and the HTML page that holds them. No dependencies.

    svg = line_chart([Series("TAM", x, y, low, high)], "Loss", "epoch", "loss", log_y=True)
    Path("report.html").write_text(page("Report", svg), encoding="utf-8")

The colours are in the style sheet of `page`, so that one page serves light and dark screens. An SVG
carries no namespace: inside HTML it needs none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours for colour-blind readers, darkened or lightened until they can be read on
# the background; dashes tell the lines apart where colours do not.
_LIGHT = ("#0072b2", "#c44e00", "#00795a", "#a63d7d", "#8a6500", "#3f3f3f", "#2b8fc4", "#6a4fb3")
_DARK = ("#4ea8e8", "#ff8b4a", "#2fc7a0", "#e58cc1", "#e3bd3b", "#d0d0d0", "#8fd0ff", "#b19cf2")
_DASHES = ("", "9 3", "2 3", "9 3 2 3", "5 3", "14 4", "9 3 2 3 2 3", "4 2 1 2")
_STYLES = 3 * len(_DASHES)  # from the second round on a colour has the next dashes

WIDTH, _HEIGHT = 560, 330  # the plot with its title and axes; the legend comes below
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 22, 34, 46
_LEGEND_ROW, _INSET = 20, 12.0
_MOST_HOVERS = 100  # hover targets a line


@dataclass(frozen=True)
class Series:
    """A line, and where `low` and `high` are given a band. Values that are not finite leave gaps.

    `style` numbers the colour and dash pattern; by default it is the line's place in the chart. Give
    it to keep a line's look from chart to chart.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: int | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(f"series {self.name!r}: low and high go together")
        for key in ("y", "low", "high"):
            column = getattr(self, key)
            if column is not None and len(column) != len(self.x):
                raise ValueError(f"series {self.name!r}: {len(self.x)} x but {len(column)} {key}")


def line_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, *, log_y: bool = False
) -> str:
    """The chart as an `<svg>` element. With `log_y` values of 0 and less leave gaps."""
    columns = [c for s in series for c in (s.y, s.low, s.high) if c is not None]
    x_axis = Axis([v for s in series for v in s.x], _LEFT, WIDTH - _RIGHT)
    y_axis = Axis([v for c in columns for v in c], _HEIGHT - _BOTTOM, _TOP, margin=0.04, log=log_y)
    styles = [i if s.style is None else s.style for i, s in enumerate(series)]
    styles = [style % _STYLES for style in styles]
    parts = [*_frame(x_axis, y_axis, title, x_label, y_label)]
    for s, style in zip(series, styles, strict=True):
        parts += _band(s, style, x_axis, y_axis)
    for s, style in zip(series, styles, strict=True):
        parts += _line(s, style, x_axis, y_axis)
    for s in series:  # above all lines, so that each can be pointed at
        parts += _hovers(s, x_axis, y_axis, x_label)
    if not any(x_axis.draws(x) and y_axis.draws(y) for s in series for x, y in zip(s.x, s.y, strict=True)):
        parts.append(label_at(WIDTH / 2, _HEIGHT / 2, "no data", "middle"))
    legend, rows = _legend([(s.name, style) for s, style in zip(series, styles, strict=True)])
    height = _HEIGHT + rows * _LEGEND_ROW
    body = "\n".join([*parts, *legend])
    box = f'viewBox="0 0 {WIDTH} {height}"'
    return f'<svg class="chart" {box} role="img" aria-label="{escape(title)}">\n{body}\n</svg>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], prose: bool = False) -> str:
    """An HTML table; the first column is text, the others are numbers, or prose.

    A header may have line breaks.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>\n" for row in rows)
    kind = "table prose" if prose else "table"
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
    return f'<div class="{kind}"><table>\n{inside}\n</table></div>'


def page(title: str, body: str) -> str:
    """A whole HTML document that needs no other file. `body` is HTML; the title is shown above it."""
    name = escape(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name}</title>
<style>
{_style_sheet()}
</style>
</head>
<body>
<h1>{name}</h1>
{body}
</body>
</html>
"""


def _style_sheet() -> str:
    def colours(palette: Sequence[str]) -> str:
        return " ".join(f"--s{i}: {colour};" for i, colour in enumerate(palette))

    n = len(_DASHES)
    lines = [
        f".s{i} {{ --s: var(--s{i % n}); stroke-dasharray: {_DASHES[(i + i // n) % n] or 'none'}; }}"
        for i in range(_STYLES)
    ]
    return f"""\
:root {{ --bg: #ffffff; --fg: #1c1c1c; --dim: #5a5a5a; --grid: #e2e2e2; {colours(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --bg: #16181b; --fg: #e6e6e6; --dim: #a5a5a5; --grid: #33373c; {colours(_DARK)} }}
}}
* {{ box-sizing: border-box; }}
body {{ background: var(--bg); color: var(--fg); font: 16px/1.5 system-ui, sans-serif;
  max-width: 1240px; margin: 0 auto; padding: 16px 24px 48px; }}
h1 {{ font-size: 1.6rem; margin: 0.5em 0; }} h2 {{ font-size: 1.2rem; margin: 1.6em 0 0.5em; }}
p, dl {{ max-width: 75ch; }}
.charts {{ display: grid; gap: 24px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }}
.table {{ overflow-x: auto; margin-bottom: 16px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.875rem; }}
th, td {{ padding: 4px 8px; text-align: right; border-bottom: 1px solid var(--grid); }}
th:first-child, td:first-child {{ text-align: left; }}
td:first-child {{ min-width: 9em; }}
td:nth-child(n+3) {{ white-space: nowrap; }}
.prose th, .prose td:not(:first-child) {{ text-align: left; white-space: normal; }}
.prose td {{ vertical-align: top; }}
th {{ color: var(--dim); font-weight: 600; vertical-align: bottom; white-space: pre-line; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 20px; }}
dt {{ color: var(--dim); }} dd {{ margin: 0; }}
.chart {{ display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }}
.chart text {{ fill: var(--fg); }} .chart .dim {{ fill: var(--dim); }}
.chart .title {{ font-size: 15px; font-weight: 600; }}
.chart .grid {{ stroke: var(--grid); }} .chart .axis {{ stroke: var(--dim); fill: none; }}
.chart .line {{ stroke: var(--s); stroke-width: 2; fill: none; stroke-linejoin: round; }}
.chart .band {{ fill: var(--s); fill-opacity: 0.13; stroke: none; }}
.chart .dot {{ fill: var(--s); stroke: none; }}
.chart .hover {{ fill: transparent; stroke: none; }} .chart .hover:hover {{ fill: var(--fg); }}
{chr(10).join(lines)}"""


class Axis:
    """Maps values to pixels, from `start` to `end`, and knows its ticks.

    `margin` is the room on either side of the values, as a part of their range.
    """

    def __init__(
        self, values: Iterable[float], start: float, end: float, margin: float = 0.0, log: bool = False
    ) -> None:
        self.start, self.end, self.log = start, end, log
        drawn = [v for v in values if self.draws(v)]
        low, high = (min(drawn), max(drawn)) if drawn else (1.0, 1.0) if log else (0.0, 1.0)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            room = max(0.5, 1e-6 * abs(low))
            self.low, self.high = (low / 2, high * 2) if log else (low - room, high + room)
            self.ticks = [(low, f"{low:.6g}")]
            return
        if log:
            room = (high / low) ** margin
            self.low, self.high = low / room, high * room
            marks = _log_ticks(self.low, self.high)
        else:
            room = (high - low) * margin
            self.low, self.high = low - room, high + room
            marks = _ticks(self.low, self.high)
        self.ticks = list(zip(marks, _labels(marks, log), strict=True))

    def draws(self, v: float) -> bool:
        # Beyond 1e100 differences and products would soon overflow; no curve lives there.
        return math.isfinite(v) and abs(v) < 1e100 and not (self.log and v < 1e-100)

    def __call__(self, v: float) -> float:
        if self.log:
            part = math.log(v / self.low) / math.log(self.high / self.low)
        else:
            part = (v - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def _ticks(low: float, high: float) -> list[float]:
    """Round values within [low, high], 4 to 9 of them."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.85)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; 1, 2, 5 times them, or round values, where they are few."""
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


def _frame(x_axis: Axis, y_axis: Axis, title: str, x_label: str, y_label: str) -> Iterator[str]:
    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
    yield title_at(left, title)
    for value, label in y_axis.ticks:
        y = y_axis(value)
        yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'
        yield label_at(left - 7, y + 4, label, "end", "dim")
    for value, label in x_axis.ticks:
        x = x_axis(value)
        yield f'<path class="axis" d="M{x:.1f} {bottom}v5"/>'
        yield label_at(x, bottom + 18, label, "middle", "dim")
    yield f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>'
    yield label_at((left + right) / 2, bottom + 38, x_label, "middle")
    middle = (top + bottom) / 2
    turn = f' transform="rotate(-90 14 {middle:g})"'
    yield label_at(14, middle, y_label, "middle", extra=turn)


def _band(s: Series, style: int, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    if s.low is None or s.high is None:
        return
    for run in _runs(x_axis, y_axis, s.x, s.low, s.high):
        upper = [(x_axis(x), y_axis(high)) for x, _, high in run]
        lower = [(x_axis(x), y_axis(low)) for x, low, _ in reversed(run)]
        yield f'<polygon class="band s{style}" points="{_points(upper + lower)}"/>'


def _line(s: Series, style: int, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for run in _runs(x_axis, y_axis, s.x, s.y):
        points = [(x_axis(x), y_axis(y)) for x, y in run]
        if len(points) == 1:
            yield f'<circle class="dot s{style}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
        else:
            yield f'<polyline class="line s{style}" points="{_points(points)}"/>'


def _hovers(s: Series, x_axis: Axis, y_axis: Axis, x_label: str) -> Iterator[str]:
    stride = math.ceil(len(s.x) / _MOST_HOVERS) or 1
    for i in range(0, len(s.x), stride):
        x, y = s.x[i], s.y[i]
        if not (x_axis.draws(x) and y_axis.draws(y)):
            continue
        spread = "" if s.low is None or s.high is None else f" ({s.low[i]:.4g} to {s.high[i]:.4g})"
        label = escape(f"{s.name}, {x_label} {x:g}: {y:.4g}{spread}")
        place = f'cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}"'
        yield f'<circle class="hover" {place} r="4"><title>{label}</title></circle>'


def _legend(entries: Sequence[tuple[str, int]]) -> tuple[list[str], int]:
    """The legend's elements and the number of its rows."""
    parts, x, row = [], _INSET, 0
    for name, style in entries:
        width = 50 + 7.4 * len(name)  # the text's width is not known here; this is ample for most
        if x > _INSET and x + width > WIDTH:
            x, row = _INSET, row + 1
        y = _HEIGHT + 8 + row * _LEGEND_ROW
        parts.append(f'<path class="line s{style}" d="M{x:g} {y}h30"/>')
        parts.append(label_at(x + 36, y + 4, name, "start"))
        x += width
    return parts, row + 1 if entries else 0


def _runs(x_axis: Axis, y_axis: Axis, *columns: Sequence[float]) -> Iterator[list[tuple[float, ...]]]:
    """Stretches of rows (x first) that can be drawn; the gaps lie between them."""
    run: list[tuple[float, ...]] = []
    for row in zip(*columns, strict=True):
        if x_axis.draws(row[0]) and all(y_axis.draws(v) for v in row[1:]):
            run.append(row)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def label_at(x: float, y: float, text: str, anchor: str, css: str = "", extra: str = "") -> str:
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:g}" y="{y:.1f}" text-anchor="{anchor}"{css}{extra}>{escape(text)}</text>'


def title_at(left: float, title: str) -> str:
    """Above a chart; a long one is squeezed."""
    room = WIDTH - left - 8
    squeezed = f' textLength="{room:g}" lengthAdjust="spacingAndGlyphs"' if 8 * len(title) > room else ""
    return label_at(left, 18, title, "start", "title", squeezed)
