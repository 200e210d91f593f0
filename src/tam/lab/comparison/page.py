"""The comparison as text, as a page, and as figures in the style of the paper's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tam.lab import charts
from tam.lab.charts import WIDTH, Axis, label_at, title_at
from tam.lab.comparison.said import claims
from tam.lab.comparison.scores import (
    BASELINE,
    KINDS,
    OTHER,
    THRESHOLDS,
    Improvement,
    Row,
    Share,
    counts,
    improvements,
    kind_told,
    percent_told,
    percents,
    shares,
    size_of,
)
from tam.lab.store import write_whole


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """The counts of the families, the shares of the models, and the improvements."""
    found = improvements(rows)
    return [_families(found), _models(shares(rows)), _categories(found)]


def _families(found: Sequence[Improvement]) -> Table:
    known = {family: len(of) for family, of in percents(found, lambda one: one.family).items()}
    total = Counter(one.family for one in found)
    body = [
        [family, _of(known[family], total[family]), *map(str, by.values())]
        for family, by in counts(found).items()
    ]
    header = ["family", "configurations", *(f"within {t}%" for t in THRESHOLDS)]
    return Table(f"Configurations whose average is within so much of {BASELINE}'s, or better", header, body)


def _models(of: Iterable[Share]) -> Table:
    body = [
        [
            share.model,
            str(share.epochs),
            _of(share.n, share.n + share.missing),
            *(percent_told(share.percent(kind), "{:.2f}") for kind in KINDS),
        ]
        for share in of
    ]
    header = ["model", "epochs", "datasets", *map(kind_told, KINDS)]
    similar = f"below {BASELINE} by at most so much of the highest of the dataset's scores"
    return Table(f"Datasets on which {OTHER} is better, or similar ({similar}), in percent", header, body)


def _categories(found: Sequence[Improvement]) -> Table:
    categories = list(dict.fromkeys(one.category for one in found))
    settings: dict[tuple[str, int], dict[str, str]] = {}
    for one in found:
        settings.setdefault((one.model, one.epochs), {})[one.category] = percent_told(one.percent, "{:+.2f}")
    body = [
        [model, str(epochs), *(cells.get(category, "") for category in categories)]
        for (model, epochs), cells in settings.items()
    ]
    title = f"Improvement of the average of {OTHER} over that of {BASELINE}, in percent"
    return Table(title, ["model", "epochs", *categories], body)


def _of(n: int, total: int) -> str:
    return str(n) if n == total else f"{n} of {total}"


def text(rows: Sequence[Row]) -> str:
    """The tables and the claims."""
    parts = [f"{table.title}\n{_aligned([table.header, *table.rows])}" for table in tables(rows)]
    return "\n\n".join([*parts, *map(str, claims(rows))])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = f"{{:<{widths[0]}}}"
    form = "  ".join([first, *(f"{{:>{width}}}" for width in widths[1:])])
    return "\n".join(form.format(*row) for row in rows)


def html(rows: Sequence[Row], title: str) -> str:
    """The same as a page, with the figures."""
    body = ["<h2>What the paper says</h2>", *(f"<p>{escape(str(claim))}</p>" for claim in claims(rows))]
    for table in tables(rows):
        body += [f"<h2>{escape(table.title)}</h2>", charts.table(table.header, table.rows)]
    body += ["<h2>Figures</h2>", '<div class="charts">', *figures(rows), "</div>"]
    return charts.page(title, "\n".join(body))


def write(rows: Sequence[Row], title: str, target: Path) -> None:
    write_whole(target, html(rows, title).encode())


# ---------------------------------------------------------------------- figures


class Bar(NamedTuple):
    """Parts from the first bound to the second, to the third and so on, and what is written at the end."""

    label: str
    bounds: Sequence[float]
    styles: Sequence[int]  # of the parts
    told: str


# Of the page's colours; the values are written beside the bars for those who cannot tell them apart.
_GOOD, _NEAR, _FAR, _BAD = 2, 6, 4, 1
_LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 205, 100, 34, 70, 15


def figures(rows: Sequence[Row], other: str = OTHER, baseline: str = BASELINE) -> list[str]:
    """Each family's improvements by configuration, and the shares of all models; of what, say the names."""
    found = improvements(rows)
    improved = [
        _bar_chart(
            [_improved(one) for one in found if one.family == family],
            f"{family}: {other} over {baseline}",
            "improvement of the average in %, by size / category, epochs",
            {"better": _GOOD, "worse": _BAD},
        )
        for family in dict.fromkeys(one.family for one in found)
    ]
    legend = dict(zip(map(kind_told, KINDS), (_GOOD, _NEAR, _FAR), strict=True))
    title, label = f"{other} better than {baseline}, or similar", "% of the datasets, by model, epochs"
    return [*improved, _bar_chart([*map(_shared, shares(rows))], title, label, legend)]


def _improved(one: Improvement) -> Bar:
    size = size_of(one.model)
    label = f"{size + ' / ' if size else ''}{one.category}, {one.epochs}"
    if one.percent is None:
        return Bar(label, [], [], "no figure")
    style = _GOOD if one.percent >= 0 else _BAD
    return Bar(label, [0, float(one.percent)], [style], f"{float(one.percent):+.2f}")


def _shared(share: Share) -> Bar:
    label = f"{share.model}, {share.epochs}"
    percents = [float(p) for kind in KINDS if (p := share.percent(kind)) is not None]
    if not percents:
        return Bar(label, [], [], "no figure")
    return Bar(label, [0, *percents], [_GOOD, _NEAR, _FAR], " / ".join(f"{p:.0f}" for p in percents))


def _bar_chart(bars: Sequence[Bar], title: str, x_label: str, legend: Mapping[str, int]) -> str:
    """Horizontal bars as an `<svg>` element, in the style of the lab's line charts."""
    bottom = _TOP + _LINE * len(bars)
    axis = Axis([0, *(x for bar in bars for x in bar.bounds)], _LEFT, WIDTH - _RIGHT, margin=0.02)
    parts = [title_at(12, title)]
    for value, label in axis.ticks:
        parts.append(f'<path class="grid" d="M{axis(value):.1f} {_TOP}V{bottom}"/>')
        parts.append(label_at(round(axis(value), 1), bottom + 16, label, "middle", "dim"))
    for i, bar in enumerate(bars):
        parts += _drawn(bar, axis, _TOP + i * _LINE)
    parts.append(f'<path class="axis" d="M{axis(0):.1f} {_TOP}V{bottom}"/>')
    parts.append(label_at((_LEFT + WIDTH - _RIGHT) / 2, bottom + 34, x_label, "middle"))
    x = 12.0
    for name, style in legend.items():
        parts.append(f'<rect class="dot s{style}" x="{x:g}" y="{bottom + 48}" width="12" height="12"/>')
        parts.append(label_at(x + 18, bottom + 58, name, "start"))
        x += 40 + 6.4 * len(name)
    body, box = "\n".join(parts), f'viewBox="0 0 {WIDTH} {bottom + _BOTTOM}"'
    return f'<svg class="chart" {box} role="img" aria-label="{escape(title)}">\n{body}\n</svg>'


def _drawn(bar: Bar, axis: Axis, y: float) -> Iterator[str]:
    yield label_at(_LEFT - 7, y + 12, bar.label, "end", "dim")
    for (start, end), style in zip(pairwise(bar.bounds), bar.styles, strict=True):
        left, right = sorted((axis(start), axis(end)))
        place = f'x="{left:.1f}" y="{y + 2:g}" width="{right - left:.1f}" height="{_LINE - 4}"'
        told = escape(f"{bar.label}: {bar.told}")
        yield f'<rect class="dot s{style}" {place}><title>{told}</title></rect>'
    yield label_at(WIDTH - 12, y + 12, bar.told, "end")
