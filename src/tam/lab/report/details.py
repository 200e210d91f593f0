"""What a report shows below the table of a study: further comparisons, s and d, and why runs are missing."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from tam.lab.report.comparisons import StudyResults
from tam.lab.report.model import TableData
from tam.lab.report.texts import TEXTS
from tam.step.rule import damping_of


def detail_tables(results: StudyResults) -> list[TableData]:
    """Return the tables below the main one that have rows."""
    return [table for table in (_further_comparisons(results), _mean_damping(results)) if table.rows]


def detail_paragraphs(results: StudyResults) -> list[str]:
    """Return the paper's words, the variants that share runs, and why runs are missing."""
    study, paper = results.study, results.study.choices.get("the paper says")
    return [
        *([f"The paper says: {paper}"] if paper else []),
        *(f'"{name}" has the same lr and runs as "{other}".' for name, other in results.duplicates.items()),
        *(f'"{one.name}": {why}.' for one in study.variants if (why := results.plan.why_left_out(one))),
        *_explain_missing_seeds(results),
    ]


def _further_comparisons(results: StudyResults) -> TableData:
    """Return the comparisons that the main table has no column for."""
    rows = []
    for variant in results.study.variants:
        for other in variant.against:
            found = results.difference(variant.name, other)
            if found is not None:
                rows.append([variant.name, other, found.format(results.study.digits), str(found.n)])
    header = ["variant", "compared with", "difference [95 % interval]", "n"]
    return TableData(header, rows, caption=TEXTS["details"]["further"])


def _mean_damping(results: StudyResults) -> TableData:
    """Return the mean s and d of each variant. With d = 1/2 and twice SGDM's lr, TAM equals SGDM."""
    rows = []
    for name, outcome in results.outcomes.items():
        if not outcome.variant.control_of and name not in results.duplicates:  # d of a control is replaced
            metrics = (row for record in outcome.records.values() for row in record.metrics)
            s = [row["alignment"] for row in metrics if "alignment" in row]
            rows += [[name, f"{fmean(s):+.3f}", f"{damping_of(fmean(s)):.3f}"]] if s else []
    return TableData(["variant", "mean s", "mean d"], rows, caption=TEXTS["details"]["damping"])


def _explain_missing_seeds(results: StudyResults) -> Iterator[str]:
    """Say why controls have fewer seeds than the run whose d they take."""
    controls = [one for one in results.study.variants if one.damping and one.name in results.outcomes]
    for source in dict.fromkeys(one.control_of for one in controls if one.control_of):
        diverged = [seed for seed, one in results.outcomes[source].records.items() if one.diverged]
        names = [one.name for one in controls if one.control_of == source]
        records = {name: results.outcomes[name].records for name in names}
        affected = [f'"{name}"' for name, own in records.items() if own and not own.keys() & set(diverged)]
        if diverged and affected:
            affected_names, seeds = " and ".join(affected), ", ".join(map(str, diverged))
            yield f'{affected_names}: no run with seed {seeds}, where "{source}" diverged and left no d.'
