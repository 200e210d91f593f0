"""The comparison as text, as a page, and as figures in the style of the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from tam.lab.experiments.llm.paper_tables import comparison
from tam.lab.experiments.llm.paper_tables.claims import check_claims
from tam.lab.experiments.llm.paper_tables.comparison import BASELINE, KINDS, OTHER, Improvement, Row, Share
from tam.lab.report.charts import Bar, bar_chart
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
    rows, counts = [], comparison.counts(improvements)
    for family, members in comparison.group_by(improvements, lambda one: one.family).items():
        known = sum(one.percent is not None for one in members)
        rows.append([family, _count_of(known, len(members)), *map(str, counts[family].values())])
    return TableData(["family", "configurations", *(f"within {t}%" for t in comparison.THRESHOLDS)], rows)


def _model_table(shares: Iterable[Share]) -> TableData:
    rows = []
    for share in shares:
        percents = (comparison.format_percent(share.percent(kind), "{:.2f}") for kind in KINDS)
        rows.append([share.model, str(share.epochs), _count_of(share.n, share.n + share.missing), *percents])
    return TableData(["model", "epochs", "datasets", *map(comparison.describe_kind, KINDS)], rows)


def _category_table(improvements: Sequence[Improvement]) -> TableData:
    percents = {(one.model, one.epochs, one.category): one.percent for one in improvements}
    categories = dict.fromkeys(one.category for one in improvements)
    rows = []
    for setting in dict.fromkeys((one.model, one.epochs) for one in improvements):
        cells = (percents.get((*setting, category)) for category in categories)
        rows.append([*map(str, setting), *(comparison.format_percent(cell, "{:+.2f}") for cell in cells)])
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


# Of the page's colours; the values are written next to the bars for those who cannot tell them apart.
_GOOD, _NEAR, _FAR, _BAD = 2, 6, 4, 1


def figures(rows: Sequence[Row], other: str = OTHER, baseline: str = BASELINE) -> list[Markup]:
    """Return each family's improvements by configuration, and the shares of all models."""
    improvements = comparison.improvements(rows)
    label = "improvement of the average in %, by size / category, epochs"
    charts = []
    for family in dict.fromkeys(one.family for one in improvements):
        bars = [_improvement_bar(one) for one in improvements if one.family == family]
        title = f"{family}: {other} over {baseline}"
        charts.append(bar_chart(bars, title, label, {"better": _GOOD, "worse": _BAD}))
    legend = dict(zip(map(comparison.describe_kind, KINDS), (_GOOD, _NEAR, _FAR), strict=True))
    title, label = f"{other} better than {baseline}, or similar", "% of the datasets, by model, epochs"
    return [*charts, bar_chart([*map(_share_bar, comparison.shares(rows))], title, label, legend)]


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
