"""The sections of a report, built from results: tables, sentences, charts and facts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Curve, Study, Variant
from tam.lab.core.toml import read_toml
from tam.lab.models import MODELS
from tam.lab.report import comparisons
from tam.lab.report import statistics as stats
from tam.lab.report.charts import Series, line_chart, mean_series
from tam.lab.report.comparisons import StudyResults
from tam.lab.report.model import PresetSection, Report, Section, StudySection, TableData, VariantSummary

TEXTS = read_toml(Path(__file__).with_name("texts.toml"))


def build_report(groups: Sequence[PresetGroup]) -> Report:
    """Return the report of what was run."""
    return Report("Torque-aware momentum: lab report", [_preset_section(group) for group in groups])


def _preset_section(group: PresetGroup) -> PresetSection:
    name, preset = group.plans[0].experiment.name, group.plans[0].preset
    studies, rows = [], []
    for i, results in enumerate(comparisons.compare_studies(group)):
        study, section = results.study, _study_section(results, f"{name}-{preset}-{results.study.name}-{i}")
        studies.append(section)
        direction = "" if study.higher else ", lower is better"
        rows.append([f"{study.title}: {study.label}{direction}", _rank_variants(study, section.variants)])
    table = TableData([f"study (preset {preset})", TEXTS["ranking"]], rows, is_prose=True)
    title, anchor = f"{name}: overview (preset {preset})", f"{name}-{preset}"
    overview = Section(title=title, anchor=anchor, notes=_notes(group), tables=[table])
    return PresetSection(name, preset, overview, studies)


def _notes(group: PresetGroup) -> list[str]:
    count = sum(len(study.comparisons()) for study in group.planned)
    n = max(len(study.seeds) for study in group.planned)
    least = float(f"{stats.needed_standard_errors(n, count):.2g}")
    preset, missing = group.plans[0].preset, "; ".join(study.title for study in group.not_run)
    notes = [note.format(preset=preset, count=count, n=n, least=least) for note in TEXTS["notes"]]
    return [*notes, *([f"Also planned, but not run: {missing}."] if missing else [])]


def _rank_variants(study: Study, variants: Sequence[VariantSummary]) -> str:
    """Return each variant with its outcome and verdict, the best first."""
    ranked = []
    for one in variants:
        if one.outcome is not None and not one.control_of:
            verdict = f" ({_difference_cells(one, study.digits)[-1]})" if one.difference else ""
            ranked.append((one.outcome.mean, f"{one.name} {one.outcome.format(study.digits)}{verdict}"))
    if not any(variant.versus for variant in study.variants):  # else each has a counterpart of its own
        ranked.sort(key=lambda entry: entry[0], reverse=study.higher)
    return "; ".join(text for _, text in ranked)


def _study_section(results: StudyResults, anchor: str) -> StudySection:
    plan, study, experiment = results.plan, results.study, results.plan.experiment
    smoke = ": a small test run, its figures mean nothing" if study.small else ""
    variants = [_summarise(results, outcome) for outcome in results.outcomes.values()]
    further_tables = [TableData(*table) for table in experiment.extras.tables(plan)]
    curve_lines = [(curve, [*_curve_lines(results, curve)]) for curve in experiment.curves]
    curves = [line_chart(lines, c.title, c.by, c.label, log_y=c.log) for c, lines in curve_lines if lines]
    return StudySection(
        title=f"{experiment.name}: {study.title} (preset {plan.preset}{smoke})", anchor=anchor,
        tables=[_variant_table(study, variants), *further_tables],
        paragraphs=[*comparisons.describe_comparisons(results), *experiment.extras.lines(plan)],
        charts=[*curves, *experiment.extras.figures(plan)],
        facts={name: text for name, text in _facts(results).items() if text},
        study=study.name, outcome=study.label, higher_is_better=study.higher, variants=variants,
    )  # fmt: skip


def _summarise(results: StudyResults, outcome: Outcome) -> VariantSummary:
    study, variant, values = results.study, outcome.variant, outcome.values(results.study.outcome)
    summaries = [stats.summarise([*of.values()]) if of else None for of in (values, outcome.values("test"))]
    other = study.compared_with(variant)
    return VariantSummary(
        name=variant.name, lr=outcome.lr, at_edge=outcome.at_edge, n=len(values), planned=outcome.planned,
        finished=len(outcome.records), diverged=outcome.diverged, outcome=summaries[0], test=summaries[1],
        control_of=variant.control_of, compared_with=other, paper=study.paper.get(variant.name),
        difference=results.difference(variant.name, other),
    )  # fmt: skip


def _variant_table(study: Study, variants: Sequence[VariantSummary]) -> TableData:
    other = "its counterpart" if any(variant.versus for variant in study.variants) else study.baseline
    test, paper = study.test_label, "paper"
    header = ["variant", "lr", "n", study.label, test, f"difference to {other}", "95% interval", "p (Holm)",
              "verdict", paper]  # fmt: skip
    rows = []
    for one in variants:
        lr = "" if one.lr is None else f"{one.lr:.3g}" + (" (at the edge of its grid)" if one.at_edge else "")
        count = f"{one.n} of {one.planned}" + (f", {one.diverged} diverged" if one.diverged else "")
        outcomes = [of.format(study.digits) if of else "" for of in (one.outcome, one.test)]
        in_paper = " ± ".join(str(value) for value in one.paper or () if value is not None)
        outcomes[0] = outcomes[0] or ("no figure" if one.finished else "not run")
        rows.append([one.name, lr, count, *outcomes, *_difference_cells(one, study.digits), in_paper])
    used = [name not in (test, paper) or any(row[i] for row in rows) for i, name in enumerate(header)]
    return TableData([*compress(header, used)], [[*compress(row, used)] for row in rows])


def _difference_cells(variant: VariantSummary, digits: int) -> list[str]:
    """Return the difference, its interval, p and the verdict."""
    difference = variant.difference
    if difference is None:
        return ["", "", "", f"control of {variant.control_of}" if variant.control_of else ""]
    middle = f"{difference.mean:+.{digits}f}"
    if not difference.verdict:
        return [middle, "", "", difference.explain_no_verdict()]
    verdict = difference.verdict if difference.n == variant.planned else f"so far {difference.verdict}"
    return [middle, difference.format_interval(digits), f"{difference.p:.2g}", verdict]


def _curve_lines(results: StudyResults, curve: Curve) -> Iterator[Series]:
    """Return the mean over the seeds of each variant, with a band from the smallest to the largest value."""
    for style, (name, outcome) in enumerate(results.outcomes.items()):
        by_epoch: dict[float, list[float]] = {}  # not all runs have the metric at all epochs
        runs = [record.metrics for record in outcome.records.values() if name not in results.duplicates]
        for row in (row for run in runs if run and curve.key in run[0] for row in run if curve.key in row):
            by_epoch.setdefault(row["epoch"], []).append(row[curve.key])
        if by_epoch:
            yield mean_series(name, dict(sorted(by_epoch.items())), style)


def _facts(results: StudyResults) -> dict[str, str]:
    """Return what was run, where, and what was chosen where the paper leaves it open."""
    plan, study = results.plan, results.study
    stored = [record.result for outcome in results.outcomes.values() for record in outcome.records.values()]
    machines = sorted({_join_settings(result["machine"]) for result in stored})
    dates = sorted({result["timing"]["date"] for result in stored if "date" in result["timing"]})
    period = f" ({' to '.join(dict.fromkeys((dates[0], dates[-1])))})" if dates else ""
    sizes = sorted({result["parameters"] for result in stored if isinstance(result.get("parameters"), int)})
    tuned = [variant for variant in study.variants if not variant.control_of]
    network, model = "", MODELS.get(study.workload.get("model", ""))
    if model is not None:
        paper = f", {model.paper} parameters in the paper" if model.paper else ""
        network = model.title + paper + (f" ({model.note})" if model.note else "")
    return {
        "workload": _join_settings(study.workload),
        "network": network,
        "variants": "; ".join(map(_describe_variant, study.variants)),
        "learning rates": "; ".join(_describe_selection(plan, variant) for variant in tuned),
        "parameters": ", ".join(f"{size:,}" for size in sizes),
        "seeds": ", ".join(map(str, study.seeds)),
        "margin": f"±{study.margin:g}" if study.margin else "none: equivalence is not tested",
        "machines": ("; ".join(machines) or "none: no trial of the comparison was run") + period,
        "time": _describe_time([result["timing"] for result in stored]),
        **({} if study.small else plan.experiment.choices),
        **study.choices,
    }


def _join_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _describe_variant(variant: Variant) -> str:
    settings = _join_settings({**variant.options, **variant.settings})
    return f"{variant.name}: {variant.optimizer}" + (f" with {settings}" if settings else "")


def _describe_selection(plan: Plan, variant: Variant) -> str:
    """Return the learning rates of a variant and the scores by which one was selected."""
    lrs = plan.grid(variant)
    if len(lrs) == 1:
        return f"{variant.name} {lrs[0]:.3g} (fixed)"
    texts = []
    for lr in lrs:
        score = plan.tuning_score(variant, lr)
        figure = "diverged" if score is None or not math.isfinite(score) else f"{score:.{plan.study.digits}f}"
        texts.append(f"{lr:.3g}: {'not run' if score is None else figure}")
    return f"{variant.name} with seeds {', '.join(map(str, plan.study.tuning_seeds))}: {', '.join(texts)}"


def _describe_time(timings: Sequence[Mapping[str, Any]]) -> str:
    if not timings:
        return ""
    others = ", with others next to it"  # the first ones did not record the number
    if all("together" in timing for timing in timings):
        most = max(timing["together"] for timing in timings)
        others = f", up to {most} side by side in a process" if most > 1 else ""
    return f"{fmean(timing['seconds'] for timing in timings):.3g} s per trial from start to end{others}"
