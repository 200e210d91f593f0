"""The parts of a report, built from results: the answer, tables, curves and facts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress, count
from statistics import fmean
from typing import Any

from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Ladder, Study, Variant
from tam.lab.models import MODELS
from tam.lab.report import statistics as stats
from tam.lab.report.charts import line_chart
from tam.lab.report.comparisons import Comparison, StudyResults, distinct_comparisons
from tam.lab.report.curves import curve_lines, describe_undrawn
from tam.lab.report.details import detail_paragraphs, detail_tables
from tam.lab.report.forest import forest_plot
from tam.lab.report.grids import grid_table
from tam.lab.report.ladder_charts import AT_BEST, DAMPING
from tam.lab.report.ladders import describe_rules, ladder_section
from tam.lab.report.model import PresetSection, Report, StudySection, TableData, Tally, VariantSummary
from tam.lab.report.texts import TEXTS

HOLLOW = "not at an equal effective lr"


def build_report(groups: Sequence[PresetGroup]) -> Report:
    """Return the report of what was run."""
    every_result = _without_repeats([[StudyResults(plan) for plan in group.plans] for group in groups])
    flat = [results for of_preset in every_result for results in of_preset]
    names = dict.fromkeys(name for results in flat for name, one in results.outcomes.items() if one.records)
    styles = {name: style for style, name in enumerate(names)}  # one look per variant on the whole page
    anchors = iter(_unique([section_anchor(results.plan) for results in flat]))
    presets: list[PresetSection] = []
    for group, of_preset in zip(groups, every_result, strict=True):
        if not of_preset:
            continue
        experiment = group.plans[0].experiment
        is_first = experiment.name not in {one.experiment for one in presets}
        studies = [_study_section(results, styles, next(anchors)) for results in of_preset]
        choices = dict(experiment.choices) if is_first else {}
        presets.append(PresetSection(experiment.name, group.plans[0].preset, studies, choices))
    comparisons = distinct_comparisons(flat)
    tally = _tally(comparisons)
    rows = [results.forest_row(one, with_preset=len(groups) > 1) for results, one in comparisons]
    is_small = bool(flat) and all(results.study.small for results in flat)
    answer = ["This is a small test run.", "Its figures mean nothing."] if is_small else _answer(tally)
    ladders = [isinstance(results.plan, LadderPlan) for results in flat]
    if all(ladders) and flat and not is_small:
        answer = TEXTS["ladder"]["answer"]
    drawn = [row for row in rows if row is not None]
    forest = forest_plot(drawn, "Differences in units of the margin", answer[0], HOLLOW) if drawn else ""
    experiments = ", ".join(dict.fromkeys(one.experiment for one in presets))
    notes = [*TEXTS["notes"], *(TEXTS["ladder"]["notes"] if any(ladders) else ()), *_missing_studies(groups)]
    return Report(f"Torque-aware momentum: {experiments}", answer, tally, forest, notes, presets)


def _without_repeats(every_result: Sequence[Sequence[StudyResults]]) -> list[list[StudyResults]]:
    """Leave out a study if another preset has one of this name with all of its finished trials."""
    flat = [results for of_preset in every_result for results in of_preset]
    names = [(results.plan.experiment.name, results.study.name) for results in flat]
    keys = [{record.key for record in results.records} for results in flat]

    def is_repeated(results: StudyResults) -> bool:
        i = next(place for place, one in enumerate(flat) if one is results)
        others = [j for j in range(len(flat)) if j != i and names[j] == names[i]]
        return bool(keys[i]) and any(keys[i] < keys[j] or (keys[i] == keys[j] and j < i) for j in others)

    return [[results for results in of_preset if not is_repeated(results)] for of_preset in every_result]


def section_anchor(plan: Plan) -> str:
    """Return the anchor of a study's section, in plain letters: names can have any text."""
    name = f"{plan.experiment.name}-{plan.preset}-{plan.study.name}"
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name)


def _unique(anchors: Sequence[str]) -> list[str]:
    """Number the anchors of studies that share one: those of two models, for example."""
    unique: list[str] = []
    for anchor in anchors:
        numbered = (anchor if i == 1 else f"{anchor}-{i}" for i in count(1))
        unique.append(next(one for one in numbered if one not in unique))
    return unique


def _missing_studies(groups: Sequence[PresetGroup]) -> list[str]:
    return [
        f"Planned in the preset {group.plans[0].preset}, but not run: {'; '.join(titles)}."
        for group in groups
        if (titles := [study.title for study in group.not_run])
    ]


def _tally(comparisons: Sequence[tuple[StudyResults, Comparison]]) -> Tally:
    """Count whom the intervals favour at an equal effective lr."""
    favoured = Counter(
        results.favours(one.estimate) for results, one in comparisons if one.shape == "square" and one.counts
    )
    return Tally(favoured["first"], favoured["second"], favoured[""])


def _answer(tally: Tally) -> list[str]:
    """Return two sentences: how often TAM differs at an equal effective lr, and what that is worth."""
    if not tally.total:
        nothing = "No variant of TAM is compared at an equal effective learning rate yet."
        return [nothing, TEXTS["exploratory"]]
    comparisons = f"{tally.total} comparison{'s' if tally.total > 1 else ''}"
    sentence = (
        f"At an equal effective learning rate, TAM or AdaTAM is ahead in {tally.ahead} of {comparisons} and "
        f"behind in {tally.behind}; in {tally.unclear} the 95 % interval includes 0."
    )
    return [sentence, TEXTS["exploratory"]]


def _study_section(results: StudyResults, styles: Mapping[str, int], anchor: str) -> StudySection:
    plan, study, experiment = results.plan, results.study, results.plan.experiment
    smoke = ": a small test run, its figures mean nothing" if study.small else ""
    variants = [_summarise(results, outcome) for outcome in results.outcomes.values()]
    further_tables = [
        TableData(one.header, one.rows, caption=one.caption) for one in experiment.extras.tables(plan)
    ]
    is_ladder = isinstance(plan, LadderPlan)  # which has a chart of d
    shown = [curve for curve in experiment.curves if not (is_ladder and curve.key == DAMPING)]
    drawn = [outcome for name, outcome in results.outcomes.items() if name not in results.duplicates]
    lines_by_curve = [(curve, [*curve_lines(drawn, curve.key, styles)]) for curve in shown]
    at_best = f", {AT_BEST}" if is_ladder else ""
    curves = [
        line_chart(lines, c.title + at_best, c.by, c.label, log_y=c.log)
        for c, lines in lines_by_curve
        if lines
    ]
    section = StudySection(
        title=f"{experiment.name}: {study.title} (preset {plan.preset}{smoke})",
        anchor=anchor,
        tables=further_tables,
        paragraphs=experiment.extras.lines(plan),
        charts=[*curves, *experiment.extras.figures(plan, styles)],
        undrawn=[*describe_undrawn(drawn)] if curves else (),
        facts={name: text for name, text in _facts(results).items() if text},
        study=study.name, outcome=study.label, higher_is_better=study.higher, variants=variants,
    )  # fmt: skip
    if isinstance(plan, LadderPlan):
        return ladder_section(section, plan, styles)
    tables = [table for table in (_variant_table(study, variants), grid_table(results)) if table]
    tables += detail_tables(results)
    paragraphs = [*detail_paragraphs(results), *section.paragraphs]
    return replace(section, tables=[*tables, *section.tables], paragraphs=paragraphs)


def _summarise(results: StudyResults, outcome: Outcome) -> VariantSummary:
    study, variant, values = results.study, outcome.variant, outcome.values(results.study.outcome)
    summaries = [stats.summarise([*of.values()]) if of else None for of in (values, outcome.values("test"))]
    other = "" if isinstance(study, Ladder) else variant.control_of or study.compared_with(variant)
    return VariantSummary(
        name=variant.name, lr=outcome.lr, effective_lr=results.effective_lr(variant.name),
        at_edge=outcome.at_edge, n=len(values), planned=outcome.planned, finished=len(outcome.records),
        diverged=outcome.diverged, outcome=summaries[0], test=summaries[1], control_of=variant.control_of,
        compared_with=other, paper=study.paper.get(variant.name),
        difference=results.difference(variant.name, other),
    )  # fmt: skip


def _variant_table(study: Study, variants: Sequence[VariantSummary]) -> TableData:
    test, paper, direction = study.test_label, "paper", "" if study.higher else " (lower is better)"
    header = ["variant", "lr", "effective lr", "n", f"{study.label}{direction}", test, "compared with",
              "difference [95 % interval]", paper]  # fmt: skip
    rows = []
    for one in variants:
        lr = "" if one.lr is None else f"{one.lr:.3g}" + (" (edge of its grid)" if one.at_edge else "")
        effective = "" if one.effective_lr is None else f"{one.effective_lr:.3g}"
        count = f"{one.n} of {one.planned}" + (f", {one.diverged} diverged" if one.diverged else "")
        outcomes = [of.format(study.digits) if of else "" for of in (one.outcome, one.test)]
        outcomes[0] = outcomes[0] or ("no figure" if one.finished else "not run")
        difference = one.difference.format(study.digits) if one.difference else ""
        in_paper = " ± ".join(str(value) for value in one.paper or () if value is not None)
        other = one.compared_with if difference else ""
        rows.append([one.name, lr, effective, count, *outcomes, other, difference, in_paper])
    used = [name not in (test, paper) or any(row[i] for row in rows) for i, name in enumerate(header)]
    return TableData([*compress(header, used)], [[*compress(row, used)] for row in rows])


def _facts(results: StudyResults) -> dict[str, str]:
    """Return what was run, where, and what was chosen where the paper leaves it open."""
    plan, study = results.plan, results.study
    stored = [record.result for record in results.records]
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
        "learning rates": "; ".join(_describe_lrs(plan, variant) for variant in tuned),
        "parameters": ", ".join(f"{size:,}" for size in sizes),
        "seeds": ", ".join(map(str, study.seeds)),
        "margin": f"±{study.margin:g}" if study.margin else "none",
        **describe_rules(study),
        "machines": ("; ".join(machines) or "none: no trial of the comparison was run") + period,
        "time": _describe_time([result["timing"] for result in stored]),
        **{name: text for name, text in study.choices.items() if name != "the paper says"},
    }


def _join_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _describe_variant(variant: Variant) -> str:
    settings = _join_settings({**variant.options, **variant.settings})
    return f"{variant.name}: {variant.optimizer}" + (f" with {settings}" if settings else "")


def _describe_lrs(plan: Plan, variant: Variant) -> str:
    """Return the learning rates of a variant. The table of the grids has their scores."""
    lrs, seeds = plan.grid(variant), ", ".join(map(str, plan.study.tuning_seeds))
    text = f"{variant.name}: {', '.join(f'{lr:.3g}' for lr in lrs)}"
    if isinstance(plan, LadderPlan):
        return f"{text} (a ladder)"
    return text + (" (fixed)" if len(lrs) == 1 else f" (tuned, seeds {seeds})")


def _describe_time(timings: Sequence[Mapping[str, Any]]) -> str:
    if not timings:
        return ""
    others = ", with others next to it"  # the first ones did not record the number
    if all("together" in timing for timing in timings):
        most = max(timing["together"] for timing in timings)
        others = f", up to {most} side by side in a process" if most > 1 else ""
    return f"{fmean(timing['seconds'] for timing in timings):.3g} s per trial from start to end{others}"
