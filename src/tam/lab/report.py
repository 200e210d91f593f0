"""The report of a folder of results: one HTML page that needs no network, and the same tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from tam.lab import charts, stats
from tam.lab.experiment import Arm, Plan, Study, Table
from tam.lab.models import MODELS
from tam.lab.outcome import Outcome, outcomes, twins
from tam.lab.runner import Group, shown
from tam.lab.stats import Difference, Pairs
from tam.lab.store import write_whole
from tam.step.rule import damping_of

HEADER = (
    "arm", "lr", "n", "{label}", "{test}", "difference to {baseline}", "95% interval", "p (Holm)", "verdict",
    "paper",
)  # fmt: skip
Differences = Mapping[tuple[str, str, str], Difference]  # by study, arm and what it is compared with


def compare(group: Group) -> Differences:
    """All comparisons an experiment's preset plans; of those that were run there is an answer."""
    found = {plan.study.identity: {one.arm.name: one for one in outcomes(plan)} for plan in group.plans}
    family: dict[tuple[str, str, str], Pairs] = {}
    for study in group.planned:
        arms = found.get(study.identity, {})
        for name, other in study.comparisons():
            family[study.identity, name, other] = Pairs([])
            if name in arms and other in arms:
                values, others = (arms[one].values(study.outcome) for one in (name, other))
                pairs = stats.paired(values, others, study.margin, study.higher)
                lost = arms[name].lost + arms[other].lost
                family[study.identity, name, other] = replace(pairs, lost=lost)
    return stats.compare(family)


def table(plan: Plan, differences: Differences) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a study."""
    study = plan.study
    rows = []
    for outcome in outcomes(plan):
        arm, values, test = outcome.arm, outcome.values(study.outcome), outcome.values("test")
        row = [arm.name, _lr(outcome), _count(outcome, len(values))]
        none = "no figure" if outcome.folders else "not run"
        row += [_shown(values, study.digits) or none, _shown(test, study.digits)]
        other = study.compared_with(arm)
        difference = differences.get((study.identity, arm.name, other))
        if difference is not None:
            row += _difference(difference, study.digits, outcome.wanted)
        else:
            row += ["", "", "", f"control of {arm.control_of}" if arm.control_of else ""]
        paper = study.paper.get(arm.name)
        rows.append([*row, "" if paper is None else _paper(*paper)])
    single = not any(arm.versus for arm in study.arms)
    named = {"baseline": study.baseline if single else "its counterpart"}
    named |= {"label": study.label, "test": study.test_label}
    header = [column.format(**named) for column in HEADER]
    empty = [
        i
        for i, name in enumerate(header)
        if name in (study.test_label, "paper") and not any(row[i] for row in rows)
    ]
    return _without(header, empty), [_without(row, empty) for row in rows]


def _paper(mean: float, spread: float | None) -> str:
    return f"{mean}" if spread is None else f"{mean} ± {spread}"


def _lr(outcome: Outcome) -> str:
    if outcome.lr is None:
        return ""
    return f"{outcome.lr:.3g}" + (" (at the edge of its grid)" if outcome.edge else "")


def _count(outcome: Outcome, n: int) -> str:
    return f"{n} of {outcome.wanted}" + (f", {outcome.diverged} diverged" if outcome.diverged else "")


def _without(cells: list[str], places: list[int]) -> list[str]:
    return [cell for i, cell in enumerate(cells) if i not in places]


def _shown(values: Mapping[int, float], digits: int) -> str:
    if not values:
        return ""
    found = stats.summarise(list(values.values()))
    return f"{found.mean:.{digits}f}" + ("" if math.isnan(found.spread) else f" ± {found.spread:.{digits}f}")


def _interval(low: float, high: float, digits: int) -> str:
    return f"{low:+.{digits}f} to {high:+.{digits}f}"


def _difference(found: Difference, digits: int, wanted: int) -> list[str]:
    row = [f"{found.mean:+.{digits}f}"]
    if not found.verdict:
        return [*row, "", "", _without_spread(found)]
    verdict = found.verdict if found.n == wanted else f"so far {found.verdict}"
    return [*row, _interval(found.low, found.high, digits), f"{found.p:.2g}", verdict]


def _without_spread(found: Difference) -> str:
    if found.lost:
        return f"{found.lost} diverged: no verdict"
    return "one seed: no verdict" if found.n == 1 else f"equal in all {found.n} seeds: no verdict"


# ---------------------------------------------------------------------- what is to be said


FOUND = {
    "equivalent": "no difference that matters",
    "undecided": "no difference is shown",
    "better": "better here",
    "worse": "worse here",
}


def beside_the_paper(plan: Plan, differences: Differences) -> list[str]:
    """Whether the paper's differences are found, a line each; where there is none, first."""
    study, papers = plan.study, plan.study.paper
    lines = []
    for arm in study.arms:
        found = differences.get((study.identity, arm.name, study.baseline))
        if found is None or not found.verdict or arm.name not in papers or study.baseline not in papers:
            continue
        there = papers[arm.name][0] - papers[study.baseline][0]
        here = f"{found.mean:+.{study.digits}f} ({_interval(found.low, found.high, study.digits)})"
        agrees = "within" if found.low <= there <= found.high else "outside"
        line = (
            f"{arm.name} minus {study.baseline}: {FOUND[found.verdict]}: {here}, n = {found.n}; the paper's "
            f"{there:+.{study.digits}f} lies {agrees} the interval."
        )
        lines.append((list(FOUND).index(found.verdict), line))
    return [line for _, line in sorted(lines)]


CONTROLS = {None, "shuffled", "mean"}  # an arm must be better than all three kinds to be said to help


def against_controls(plan: Plan, differences: Differences) -> list[str]:
    """An arm with controls against each of them: a line each, and whether it helps."""
    study, lines = plan.study, []
    for source in dict.fromkeys(arm.control_of for arm in study.arms if arm.control_of):
        controls = [arm for arm in study.arms if arm.control_of == source]
        found = [differences.get((study.identity, source, control.name)) for control in controls]
        lines += [
            f"{source} minus {control.name}: {_against(d, plan)}."
            for control, d in zip(controls, found, strict=True)
        ]
        lines += _without_d(plan, source, [control.name for control in controls if control.damping])
        better = {
            control.damping
            for control, d in zip(controls, found, strict=True)
            if d is not None and d.verdict == "better" and d.n == len(study.seeds)
        }
        verdict = "helps" if better >= CONTROLS else "is not shown to help"
        if not {control.damping for control in controls} >= CONTROLS:
            verdict += " (not all of its controls are planned)"
        elif any(d is None for d in found):
            verdict += " (not all of its controls were run)"
        lines.append(
            f"{source} {verdict}: it must be better than SGDM or Adam at its effective lr and than both "
            "controls of d, with all seeds."
        )
    return lines


def _without_d(plan: Plan, source: str, controls: Sequence[str]) -> list[str]:
    """Why controls have fewer seeds than the run whose d they take."""
    found = {one.arm.name: one.folders for one in outcomes(plan)}
    ended = [seed for seed, folder in found[source].items() if (folder.result or {}).get("diverged")]
    some = [name for name in controls if found[name] and not found[name].keys() & set(ended)]
    if not ended or not some:
        return []
    seeds = ", ".join(map(str, ended))
    return [f"{' and '.join(some)}: no run of seed {seeds}, where {source} diverged and there is no d."]


def dampings(plan: Plan) -> list[str]:
    """The mean s of all epochs, and d: at 1/2, and an lr twice SGDM's, TAM is SGDM."""
    told = []
    again = twins(plan)
    for outcome in outcomes(plan):
        if outcome.arm.control_of or outcome.arm.name in again:  # a control's is replaced
            continue
        rows = [folder.metrics() for folder in outcome.folders.values()]
        s = [row["alignment"] for run in rows for row in run if "alignment" in row]
        told += [f"{outcome.arm.name} {mean(s):+.3f} and {damping_of(mean(s)):.3f}"] if s else []
    return [f"Mean s, and d = (1 + s) / 2: {'; '.join(told)}."] if told else []


def others(plan: Plan, differences: Differences) -> list[str]:
    """Arms against arms that are neither the baseline nor a control."""
    of = plan.study.identity
    return [
        f"{arm.name} minus {other}: {_against(differences.get((of, arm.name, other)), plan)}."
        for arm in plan.study.arms
        for other in arm.against
    ]


def _against(found: Difference | None, plan: Plan) -> str:
    if found is None:
        return "not run"
    digits = plan.study.digits
    if not found.verdict:
        return f"{found.mean:+.{digits}f}, {_without_spread(found)}"
    interval = _interval(found.low, found.high, digits)
    return f"{found.mean:+.{digits}f} ({interval}), n = {found.n}, p = {found.p:.2g}: {found.verdict}"


def facts(plan: Plan) -> dict[str, str]:
    """What was run, where, and what was chosen where the paper is silent."""
    study = plan.study
    folders = [folder for outcome in outcomes(plan) for folder in outcome.folders.values()]
    results: list[dict[str, Any]] = [folder.result or {} for folder in folders]
    machines = sorted({", ".join(f"{k} {v}" for k, v in result["machine"].items()) for result in results})
    seconds = [result["timing"]["seconds"] for result in results]
    dates = sorted({result["timing"]["date"] for result in results if "date" in result["timing"]})
    when = f" ({' to '.join(dict.fromkeys((dates[0], dates[-1])))})" if dates else ""
    return {
        "workload": _told(study.workload),
        "network": _network(study.workload.get("model", "")),
        "arms": "; ".join(f"{arm.name}: {_told_arm(arm)}" for arm in study.arms),
        "learning rates": "; ".join(_choice(plan, arm) for arm in study.arms if not arm.control_of),
        "parameters": ", ".join(
            f"{n:,}" for n in sorted({r["parameters"] for r in results if "parameters" in r})
        ),
        "seeds": ", ".join(map(str, study.seeds)),
        "margin": f"±{study.margin:g}" if study.margin else "none: equivalence is not asked for",
        "machines": ("; ".join(machines) or "none: no trial of the comparison was run") + when,
        "time": f"{mean(seconds):.3g} s a trial from start to end{_beside(results)}" if seconds else "",
        **({} if study.small else plan.experiment.choices),
        **study.choices,
    }


def _beside(results: Sequence[dict[str, Any]]) -> str:
    counts = [result["timing"].get("together") for result in results]
    if None in counts:
        return ", with others beside it"  # of the first ones there is no number
    return f", up to {max(counts)} side by side in a process" if max(counts) > 1 else ""


def _network(name: str) -> str:
    """A network the lab knows, with the paper's figure of its parameters."""
    if name not in MODELS:
        return ""
    model = MODELS[name]
    told = [model.title, *([f"{model.paper} parameters in the paper"] if model.paper else [])]
    return ", ".join(told) + (f" ({model.note})" if model.note else "")


def _told(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in settings.items())


def _told_arm(arm: Arm) -> str:
    told = _told({**arm.options, **arm.settings})
    return arm.optimizer + (f" with {told}" if told else "")


def _choice(plan: Plan, arm: Arm) -> str:
    """Between which learning rates it was, and what they came to."""
    lrs = plan.grid(arm)
    if len(lrs) == 1:
        return f"{arm.name} {lrs[0]:.3g}, given"
    scores = {lr: plan.tuned_to(arm, lr) for lr in lrs}
    told = (
        f"{lr:.3g}: " + ("not run" if score is None else _score(score, plan.study.digits))
        for lr, score in scores.items()
    )
    return f"{arm.name} by seeds {', '.join(map(str, plan.study.tuning_seeds))} of {', '.join(told)}"


def _score(score: float, digits: int) -> str:
    return f"{score:.{digits}f}" if math.isfinite(score) else "diverged"


def curves(plan: Plan, key: str) -> Iterator[charts.Series]:
    """A line for each arm that has the curve: mean over its seeds, band from least to greatest."""
    again = twins(plan)
    for style, outcome in enumerate(outcomes(plan)):
        if outcome.arm.name in again:
            continue
        runs = [folder.metrics() for folder in outcome.folders.values()]
        runs = [run for run in runs if run and key in run[0]]
        if not runs:
            continue
        found: dict[int, list[float]] = {}  # not all runs have it at all epochs
        for row in (row for run in runs for row in run if key in row):
            found.setdefault(row["epoch"], []).append(row[key])
        epochs = sorted(found)
        columns = [found[epoch] for epoch in epochs]
        yield charts.Series(
            outcome.arm.name, epochs, [*map(mean, columns)], [*map(min, columns)], [*map(max, columns)], style
        )


# ---------------------------------------------------------------------- the page


NOTES = (
    "Outcomes are of the last epoch unless the study says otherwise, mean ± standard deviation over the "
    "seeds; a run whose loss is no longer finite ends there, and counts with what it then has; where that "
    "is no figure, nothing is decided. Test data is read once, at the end, unless the outcome is of test "
    "data. Differences are taken seed by seed: for one seed all arms share the split, the initial weights "
    "and the batches; on GPUs, not always the rounding, so that runs that begin alike may part early. The "
    "95% interval is that of one comparison (Student's t). "
    "Better or worse: p is at most 0.05 after Holm's correction for all comparisons the preset {preset} "
    "plans, {count}, run or not; an interval may thus exclude 0 where nothing is decided: with {n} seeds the "
    "first verdict takes a mean of {least:g} standard errors. Equivalent, whatever p: the interval lies "
    "within the margin (0.2 points for accuracies). Undecided: none of these."
)
CURVES = "Curves: mean over the seeds, band from least to greatest."
ELSEWHERE = "Curves are in the report as HTML."


def write(root: Path, target: Path) -> None:
    """Writes the report of a folder: as Markdown where the file is called so, else as HTML."""
    write_whole(target, WRITERS[target.suffix.lower()](shown(root)).encode())


def html(groups: Sequence[Group]) -> str:
    """The page."""
    body: list[str] = []
    links: list[str] = []
    for group in groups:
        differences = compare(group)
        body += [
            f"<p>{escape(_notes(group))} {CURVES}</p>",
            charts.table(*overview(group, differences), prose=True),
        ]
        for plan in group.plans:
            header, rows = table(plan, differences)
            title = _title(plan)
            anchor = f"{plan.experiment.name}-{plan.preset}-{plan.study.name}-{len(links)}"
            links.append(f'<li><a href="#{escape(anchor)}">{escape(title)}</a></li>')
            body += [f'<h2 id="{escape(anchor)}">{escape(title)}</h2>', charts.table(header, rows)]
            body += [charts.table(*one) for one in _tables(plan)]
            body += [f"<p>{escape(line)}</p>" for line in _lines(plan, differences)]
            body += ['<div class="charts">', *_charts(plan), "</div>", _listed(facts(plan))]
    contents = ["<ul>", *links, "</ul>"] if len(links) > 1 else []
    return charts.page("Torque-aware momentum: the lab's report", "\n".join([*contents, *body]))


def markdown(groups: Sequence[Group]) -> str:
    """The same without curves."""
    lines = ["# The lab's report"]
    for group in groups:
        differences = compare(group)
        lines += ["", f"{_notes(group)} {ELSEWHERE}", "", *_table(*overview(group, differences))]
        for plan in group.plans:
            lines += ["", f"## {_title(plan)}", ""]
            for one in (table(plan, differences), *_tables(plan)):
                lines += [*_table(*one), ""]
            for line in _lines(plan, differences):
                lines += [line, ""]
            lines += [f"- **{k}**: {v}" for k, v in facts(plan).items() if v]
    return "\n".join(lines) + "\n"


WRITERS = {".html": html, ".md": markdown}


def _notes(group: Group) -> str:
    count = sum(len(study.comparisons()) for study in group.planned)
    n = max(len(study.seeds) for study in group.planned)
    least = float(f"{stats.least(n, count):.2g}")
    told = NOTES.format(preset=group.plans[0].preset, count=count, n=n, least=least)
    missing = "; ".join(study.title for study in group.not_run)
    return told + (f" Planned, too, and not run: {missing}." if missing else "")


def _title(plan: Plan) -> str:
    small = ": in small, its figures mean nothing" if plan.study.small else ""
    return f"{plan.experiment.name}: {plan.study.title} (preset {plan.preset}{small})"


def _tables(plan: Plan) -> list[Table]:
    return plan.experiment.tables(plan) if plan.experiment.tables is not None else []


def _lines(plan: Plan, differences: Differences) -> list[str]:
    said = plan.experiment.says(plan) if plan.experiment.says is not None else []
    compared = [*beside_the_paper(plan, differences), *others(plan, differences)]
    paper = plan.study.choices.get("the paper says")
    first = [f"The paper says: {paper}"] if paper else []
    controls = against_controls(plan, differences)
    same = [f"{arm}: the same runs as {other}, at the same lr." for arm, other in twins(plan).items()]
    return [*first, *same, *compared, *controls, *dampings(plan), *said]


def overview(group: Group, differences: Differences) -> tuple[list[str], list[list[str]]]:
    """Header and rows: of every study its arms, the best mean first, and the verdict its table gives."""
    first = "the best first unless they have different counterparts"
    told = f"mean ± standard deviation of its arms, {first}, and the verdict of its table"
    header = [f"study (preset {group.plans[0].preset})", told]
    return header, [[_asked(plan.study), _ranking(plan, differences)] for plan in group.plans]


def _asked(study: Study) -> str:
    return f"{study.title}: {study.label}{'' if study.higher else ', lower is better'}"


def _ranking(plan: Plan, differences: Differences) -> str:
    study, told = plan.study, {}
    for outcome in outcomes(plan):
        arm, values = outcome.arm, outcome.values(study.outcome)
        if values and not arm.control_of:
            found = differences.get((study.identity, arm.name, study.compared_with(arm)))
            verdict = [] if found is None else _difference(found, study.digits, outcome.wanted)[-1:]
            shown = f"{arm.name} {_shown(values, study.digits)}"
            told[arm.name] = mean(values.values()), " ".join([shown, *(f"({one})" for one in verdict)])
    order = list(told.values())
    if not any(arm.versus for arm in study.arms):  # else each has a counterpart of its own
        order.sort(key=lambda one: one[0], reverse=study.higher)
    return "; ".join(text for _, text in order)


def _charts(plan: Plan) -> Iterator[str]:
    for curve in plan.experiment.curves:
        lines = list(curves(plan, curve.key))
        if lines:
            yield charts.line_chart(lines, curve.title, curve.by, curve.label, log_y=curve.log)
    if plan.experiment.figures is not None:
        yield from plan.experiment.figures(plan)


def _listed(entries: dict[str, str]) -> str:
    told = (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items() if v)
    return "<dl>" + "".join(told) + "</dl>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
