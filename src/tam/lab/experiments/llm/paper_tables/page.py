"""The comparison as text, as a page, and as figures in the style of the paper's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from tam.lab.core.store import write_whole
from tam.lab.experiments.llm.paper_tables import comparison
from tam.lab.experiments.llm.paper_tables.claims import check_claims
from tam.lab.experiments.llm.paper_tables.comparison import BASELINE, KINDS, OTHER, Improvement, Row, Share
from tam.lab.report.charts import WIDTH, Axis, chart_element, element, label_at, title_at
from tam.lab.report.model import Section, TableData
from tam.lab.report.render import render_page


def tables(rows: Sequence[Row]) -> dict[str, TableData]:
    """Return the counts of the families, the shares of the models, and the improvements, by title."""
    improvements = comparison.improvements(rows)
    within = f"below {BASELINE} by at most so much of the highest of the dataset's scores"
    families, categories = _family_table(improvements), _category_table(improvements)
    models = _model_table(comparison.shares(rows))
    return {
        f"Configurations whose average is within so much of {BASELINE}'s, or better": families,
        f"Datasets on which {OTHER} is better, or similar ({within}), in percent": models,
        f"Improvement of the average of {OTHER} over that of {BASELINE}, in percent": categories,
    }


def _family_table(improvements: Sequence[Improvement]) -> TableData:
    counted = {
        family: len(of) for family, of in comparison.percents(improvements, lambda one: one.family).items()
    }
    total = Counter(one.family for one in improvements)
    rows = [
        [family, _count_of(counted[family], total[family]), *map(str, by_threshold.values())]
        for family, by_threshold in comparison.counts(improvements).items()
    ]
    return TableData(["family", "configurations", *(f"within {t}%" for t in comparison.THRESHOLDS)], rows)


def _model_table(shares: Iterable[Share]) -> TableData:
    rows = [
        [share.model, str(share.epochs), _count_of(share.n, share.n + share.missing),
         *(comparison.format_percent(share.percent(kind), "{:.2f}") for kind in KINDS)]
        for share in shares
    ]  # fmt: skip
    return TableData(["model", "epochs", "datasets", *map(comparison.describe_kind, KINDS)], rows)


def _category_table(improvements: Sequence[Improvement]) -> TableData:
    categories = list(dict.fromkeys(one.category for one in improvements))
    settings: dict[tuple[str, int], dict[str, str]] = {}
    for one in improvements:
        cells = settings.setdefault((one.model, one.epochs), {})
        cells[one.category] = comparison.format_percent(one.percent, "{:+.2f}")
    rows = [
        [model, str(epochs), *(cells.get(category, "") for category in categories)]
        for (model, epochs), cells in settings.items()
    ]
    return TableData(["model", "epochs", *categories], rows)


def _count_of(n: int, total: int) -> str:
    return str(n) if n == total else f"{n} of {total}"


def text(rows: Sequence[Row]) -> str:
    """Return the tables and the claims as plain text."""
    parts = [f"{title}\n{_align([table.header, *table.rows])}" for title, table in tables(rows).items()]
    return "\n\n".join([*parts, *map(str, check_claims(rows))])


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    return "\n".join(form.format(*row) for row in rows)


def html(rows: Sequence[Row], title: str) -> str:
    """Return the same as a page, with the figures."""
    sections = [
        Section(title="What the paper says", paragraphs=[str(claim) for claim in check_claims(rows)]),
        *(Section(title=name, tables=[table]) for name, table in tables(rows).items()),
        Section(title="Figures", charts=figures(rows)),
    ]
    return render_page(title, sections)


def write(rows: Sequence[Row], title: str, target: Path) -> None:
    write_whole(target, html(rows, title).encode())


class Bar(NamedTuple):
    """Parts from the first bound to the second, to the third and so on, and the text at the end."""

    label: str
    bounds: Sequence[float]
    styles: Sequence[int]  # of the parts
    text: str


# Of the page's colours; the values are written next to the bars for those who cannot tell them apart.
_GOOD, _NEAR, _FAR, _BAD = 2, 6, 4, 1
_LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 205, 100, 34, 70, 15


def figures(rows: Sequence[Row], other: str = OTHER, baseline: str = BASELINE) -> list[Markup]:
    """Return each family's improvements by configuration, and the shares of all models."""
    improvements = comparison.improvements(rows)
    label = "improvement of the average in %, by size / category, epochs"
    charts = []
    for family in dict.fromkeys(one.family for one in improvements):
        bars = [_improvement_bar(one) for one in improvements if one.family == family]
        title = f"{family}: {other} over {baseline}"
        charts.append(_bar_chart(bars, title, label, {"better": _GOOD, "worse": _BAD}))
    legend = dict(zip(map(comparison.describe_kind, KINDS), (_GOOD, _NEAR, _FAR), strict=True))
    title, label = f"{other} better than {baseline}, or similar", "% of the datasets, by model, epochs"
    return [*charts, _bar_chart([*map(_share_bar, comparison.shares(rows))], title, label, legend)]


def _improvement_bar(one: Improvement) -> Bar:
    size = comparison.size_of(one.model)
    label = f"{size + ' / ' if size else ''}{one.category}, {one.epochs}"
    if one.percent is None:
        return Bar(label, [], [], "no figure")
    style = _GOOD if one.percent >= 0 else _BAD
    return Bar(label, [0, float(one.percent)], [style], f"{float(one.percent):+.2f}")


def _share_bar(share: Share) -> Bar:
    ends = [float(percent) for kind in KINDS if (percent := share.percent(kind)) is not None]
    styles = [_GOOD, _NEAR, _FAR] if ends else []
    text = " / ".join(f"{percent:.0f}" for percent in ends) or "no figure"
    return Bar(f"{share.model}, {share.epochs}", [0, *ends], styles, text)


def _bar_chart(bars: Sequence[Bar], title: str, x_label: str, legend: Mapping[str, int]) -> Markup:
    """Return horizontal bars as an `<svg>` element, in the style of the line charts."""
    bottom = _TOP + _LINE * len(bars)
    axis = Axis([0, *(x for bar in bars for x in bar.bounds)], _LEFT, WIDTH - _RIGHT, margin=0.02)
    parts = [title_at(12, title)]
    for value, label in axis.ticks:
        parts.append(element("path", class_="grid", d=f"M{axis(value):.1f} {_TOP}V{bottom}"))
        parts.append(label_at(round(axis(value), 1), bottom + 16, label, "middle", "dim"))
    for i, bar in enumerate(bars):
        parts += _draw_bar(bar, axis, _TOP + i * _LINE)
    parts.append(element("path", class_="axis", d=f"M{axis(0):.1f} {_TOP}V{bottom}"))
    parts.append(label_at((_LEFT + WIDTH - _RIGHT) / 2, bottom + 34, x_label, "middle"))
    x = 12.0
    for name, style in legend.items():
        parts.append(element("rect", class_=f"dot s{style}", x=f"{x:g}", y=bottom + 48, width=12, height=12))
        parts.append(label_at(x + 18, bottom + 58, name, "start"))
        x += 40 + 6.4 * len(name)
    return chart_element(title, bottom + _BOTTOM, parts)


def _draw_bar(bar: Bar, axis: Axis, y: float) -> Iterator[Markup]:
    yield label_at(_LEFT - 7, y + 12, bar.label, "end", "dim")
    title = element("title", f"{bar.label}: {bar.text}")
    for (start, end), style in zip(pairwise(bar.bounds), bar.styles, strict=True):
        left, right = sorted((axis(start), axis(end)))
        place = {"x": f"{left:.1f}", "y": f"{y + 2:g}", "width": f"{right - left:.1f}", "height": _LINE - 4}
        yield element("rect", title, class_=f"dot s{style}", **place)
    yield label_at(WIDTH - 12, y + 12, bar.text, "end")
