"""The report of a folder of results: one HTML page that needs no network, and the same tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from tam.lab import charts, stats
from tam.lab.experiment import Arm, Plan
from tam.lab.runner import Selection, plans, remembered
from tam.lab.store import LabError, TrialFolder

HEADER = (
    "arm", "lr", "n", "{label}", "test %", "difference to {baseline}", "95% interval", "verdict", "paper",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What is known of an arm: its finished trials, by seed."""

    arm: Arm
    lr: float | None
    edge: bool  # the lr is at an edge of its grid
    folders: dict[int, TrialFolder]
    wanted: int

    def values(self, key: str) -> dict[int, float]:
        found = {seed: folder.result for seed, folder in self.folders.items()}
        return {seed: result[key] for seed, result in found.items() if result is not None and key in result}


def outcomes(plan: Plan) -> list[Outcome]:
    found = []
    for arm in plan.study.arms:
        chosen, trials = plan.chosen(arm), plan.reported(arm) or []
        folders = {trial["seed"]: TrialFolder(plan.root, trial) for trial in trials}
        done = {seed: folder for seed, folder in folders.items() if folder.result is not None}
        lr, edge = chosen if chosen is not None else (None, False)
        found.append(Outcome(arm, lr, edge, done, len(plan.study.seeds)))
    return found


def table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a study."""
    found = outcomes(plan)
    study = plan.study
    values = {outcome.arm.name: outcome.values(study.outcome) for outcome in found}
    baseline = study.baseline
    keys = {outcome.arm.name: {folder.key for folder in outcome.folders.values()} for outcome in found}
    # An arm may come to the baseline's own trials: that is no comparison.
    same = {name for name in values if name != baseline and keys[name] and keys[name] <= keys[baseline]}
    compared = {name: x for name, x in values.items() if name not in same}
    differences = (
        stats.compare(compared, baseline, study.margin, study.higher) if values.get(baseline) else {}
    )
    rows = []
    for outcome in found:
        name = outcome.arm.name
        difference, paper = differences.get(name), plan.study.paper.get(name)
        lr = (
            ""
            if outcome.lr is None
            else f"{outcome.lr:.3g}" + (" (at the edge of its grid)" if outcome.edge else "")
        )
        diverged = sum(bool((folder.result or {}).get("diverged")) for folder in outcome.folders.values())
        row = [
            name,
            lr,
            f"{len(values[name])} of {outcome.wanted}" + (f", {diverged} diverged" if diverged else ""),
        ]
        row += [_shown(values[name], study.digits) or "not run", _shown(outcome.values("test"), study.digits)]
        row += ["", "", "the baseline's trials" if name in same else ""]
        if difference is not None:
            row[-3:] = _difference(difference, study.digits)
            if difference.n < outcome.wanted:
                row[-1] = f"so far {row[-1]}"
        rows.append([*row, "" if paper is None else f"{paper[0]} ± {paper[1]}"])
    header = [column.format(baseline=baseline, label=study.label) for column in HEADER]
    empty = [
        i for i, name in enumerate(header) if name in ("test %", "paper") and not any(row[i] for row in rows)
    ]
    return _without(header, empty), [_without(row, empty) for row in rows]


def against_controls(plan: Plan) -> list[str]:
    """An arm with controls against each of them: a line each, and whether it helps."""
    study, found = plan.study, {outcome.arm.name: outcome for outcome in outcomes(plan)}
    lines = []
    for source in dict.fromkeys(arm.control_of for arm in study.arms if arm.control_of):
        controls = [arm.name for arm in study.arms if arm.control_of == source]
        values = {name: found[name].values(study.outcome) for name in (source, *controls)}
        if not all(values.values()):
            missing = [name for name in values if not values[name]]
            lines.append(f"{source} against its controls: not run are {', '.join(missing)}.")
            continue
        differences = stats.compare(values, source, study.margin, study.higher)
        swapped = {"better": "worse", "worse": "better"}  # the control's verdict is not the arm's
        verdicts = {name: swapped.get(d.verdict, d.verdict) for name, d in differences.items()}
        for name, d in differences.items():
            low, high = -d.high, -d.low
            interval = f"{low:+.{study.digits}f} to {high:+.{study.digits}f}, n = {d.n}"
            lines.append(
                f"{source} minus {name}: {-d.mean:+.{study.digits}f} ({interval}): {verdicts[name]}."
            )
        complete = all(len(x) == len(study.seeds) for x in values.values())
        helps = complete and all(verdict == "better" for verdict in verdicts.values())
        lines.append(
            f"{source} {'helps' if helps else 'is not shown to help'}: it must be better than all of them."
        )
    return lines


def _without(cells: list[str], places: list[int]) -> list[str]:
    return [cell for i, cell in enumerate(cells) if i not in places]


def _shown(values: dict[int, float], digits: int) -> str:
    if not values:
        return ""
    found = stats.summarise(list(values.values()))
    return f"{found.mean:.{digits}f}" + ("" if math.isnan(found.spread) else f" ± {found.spread:.{digits}f}")


def _difference(found: stats.Difference, digits: int) -> list[str]:
    low, high = (f"{x:+.{digits}f}" for x in (found.low, found.high))
    interval = "" if math.isnan(found.low) else f"{low} to {high}"
    return [f"{found.mean:+.{digits}f}", interval, found.verdict]


def curves(plan: Plan, key: str) -> Iterator[charts.Series]:
    """A line for each arm that has the curve: mean over its seeds, band from least to greatest."""
    for style, outcome in enumerate(outcomes(plan)):
        runs = [folder.metrics() for folder in outcome.folders.values()]
        runs = [run for run in runs if run and key in run[0]]
        if not runs:
            continue
        epochs = [row["epoch"] for row in min(runs, key=len)]
        columns = [[run[i][key] for run in runs] for i in range(len(epochs))]
        yield charts.Series(
            outcome.arm.name, epochs, [*map(mean, columns)], [*map(min, columns)], [*map(max, columns)], style
        )


# ---------------------------------------------------------------------- the page


NOTES = (
    "Outcomes are of the last epoch, mean ± standard deviation over the seeds; test images are read once, at "
    "the end. Differences are taken seed by seed: for one seed all arms share the split, the initial weights "
    "and the batches. The intervals of a study's comparisons hold together with 95% (Bonferroni); better and "
    "worse are decided by Holm's method. Equivalent: the interval lies within the study's margin, 0.2 points "
    "for accuracies. Curves: mean over the seeds, band from least to greatest."
)


def write(root: Path, target: Path) -> None:
    """Writes the report of a folder: as Markdown where the file is called so, else as HTML."""
    selections = remembered(root)
    if not selections:
        raise LabError(f"{root} has no runs.json: nothing was run there")
    text = markdown(root, selections) if target.suffix == ".md" else html(root, selections)
    target.write_text(text, encoding="utf-8")


def html(root: Path, selections: Sequence[Selection]) -> str:
    body = [f"<p>{escape(NOTES)}</p>"]
    for selection in selections:
        for plan in plans(selection, root):
            header, rows = table(plan)
            body += [f"<h2>{escape(plan.study.title)} (preset {escape(selection.preset)})</h2>"]
            body += [charts.table(header, rows)]
            body += [f"<p>{escape(line)}</p>" for line in against_controls(plan)]
            body += ['<div class="charts">']
            for curve in plan.experiment.curves:
                lines = list(curves(plan, curve.key))
                if lines:
                    drawn = charts.line_chart(lines, curve.title, curve.by, curve.label, log_y=curve.log)
                    body.append(drawn)
            if plan.experiment.figures is not None:
                body += plan.experiment.figures(plan.study)
            body += ["</div>", _listed(facts(plan))]
    return charts.page("Torque-aware momentum: the lab's report", "\n".join(body))


def _listed(entries: dict[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items()) + "</dl>"


def facts(plan: Plan) -> dict[str, str]:
    """What was run, where, and what was chosen where the paper is silent."""
    folders = [folder for outcome in outcomes(plan) for folder in outcome.folders.values()]
    results: list[dict[str, Any]] = [folder.result or {} for folder in folders]
    machines = sorted({", ".join(f"{k} {v}" for k, v in result["machine"].items()) for result in results})
    seconds = [result["timing"]["seconds"] for result in results]
    return {
        "workload": ", ".join(f"{k} {v}" for k, v in plan.study.workload.items()),
        "machines": "; ".join(machines) or "none: nothing was run",
        "time": f"{mean(seconds):.0f} s a trial from start to end, others beside it" if seconds else "",
        **plan.experiment.choices,
    }


def markdown(root: Path, selections: Sequence[Selection]) -> str:
    lines = ["# The lab's report", "", NOTES]
    for selection in selections:
        for plan in plans(selection, root):
            header, rows = table(plan)
            lines += ["", f"## {plan.study.title} (preset {selection.preset})", ""]
            lines += [_row(header), _row(["---"] * len(header)), *map(_row, rows), ""]
            lines += [*against_controls(plan), ""] if against_controls(plan) else []
            lines += [f"- **{k}**: {v}" for k, v in facts(plan).items()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
