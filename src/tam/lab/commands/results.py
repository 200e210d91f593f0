"""`tam lab status`, `tam lab report`, `tam lab pack` and `tam lab unpack`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tam.lab.commands.options import AsJson, ResultsPath, check_writable
from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.results import load_existing_results, pack, unpack
from tam.lab.core.selection import load_groups, select_plans, selections_of
from tam.lab.core.store import TrialFolder, write_whole


def write_report(
    results: ResultsPath,
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="FILE", help="The file to write: report.html, or report.md for Markdown."
        ),
    ] = Path("report.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of writing a report.")] = False,
) -> None:
    """Write a report: results next to the paper's figures, curves and settings."""
    from tam.lab.report import WRITERS, build_report, render_json

    if as_json:
        print(render_json(build_report(load_groups(results))), end="")
        return
    check_writable(out)
    if out.suffix.lower() not in WRITERS:
        raise LabError(f"--out must end in {' or '.join(WRITERS)}, got {out}")
    page = WRITERS[out.suffix.lower()](build_report(load_groups(results)))
    write_whole(out, page.encode())
    print(out)


def pack_results(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...", help="--out folders of runs, and files of `tam lab pack`: all in one file."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="FILE", help="The file to write, for example trials.jsonl.xz."),
    ],
) -> None:
    """Write the finished trials of run folders into one packed file."""
    if out.suffix != ".xz":
        raise LabError(f"--out must end in .xz, got {out}")
    check_writable(out)
    print("Packing. Long runs take a minute or two.", file=sys.stderr)
    print(f"{out}: {pack(results, out)} trials")


def unpack_results(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A packed file.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The run folder to write.")],
) -> None:
    """Write the trials of a packed file into a run folder."""
    print(f"{out}: {unpack(file, out)} trials")


@dataclass(frozen=True)
class VariantStatus:
    name: str
    lr: float | None  # None while it is not selected
    finished: int  # of the comparison trials, one per seed; of a ladder, one per rung and seed
    planned: int  # 0 for a control that is left out
    blocked: int  # comparison trials that cannot run, on this machine or at all
    note: str  # why they cannot, what the variant waits for, or why it is left out
    rungs: int = 0  # of a ladder


@dataclass(frozen=True)
class StudyStatus:
    experiment: str
    preset: str
    study: str
    to_run: int  # trials that can run now
    running: int  # of these, by another process
    interrupted: int  # of these, with a checkpoint
    variants: list[VariantStatus]
    state: str  # all this in words


def show_status(results: ResultsPath, as_json: AsJson = False) -> None:
    """Show the progress of the runs in a folder."""
    studies = [study_status(plans, results) for plans in load_plans(results)]
    if as_json:
        print(json.dumps([asdict(study) for study in studies], indent=1))
        return
    for study in studies:
        print(f"{study.experiment} {study.preset} {study.study}: {study.state}")
        for one in study.variants:
            blocked = f"{count_trials(one.blocked)} cannot run: " if one.blocked else ""
            unit = "trials" if one.rungs else "seeds"
            seeds = f"{one.finished} of {one.planned} {unit}" if one.planned else ""  # none: left out
            seeds += f" ({one.rungs} rungs)" if one.rungs else ""
            print(f"  {one.name}: {'; '.join(filter(None, (seeds, blocked + one.note)))}")


def load_plans(path: Path) -> list[list[Plan]]:
    """Return the plans of everything that was run: per study, one for each time it was asked for."""
    results = load_existing_results(path)
    plans_by_study: dict[tuple[str, str, str], list[Plan]] = {}
    for plan in (plan for selection in selections_of(results) for plan in select_plans(selection, results)):
        study = plan.experiment.name, plan.preset, plan.study.identity
        plans_by_study.setdefault(study, []).append(plan)
    return list(plans_by_study.values())


def study_status(plans: list[Plan], path: Path) -> StudyStatus:
    """Return how far a study is, given its plans and the results in this folder or packed file."""
    to_run = {
        trial.key: TrialFolder(path, trial)
        for plan in plans for _, trial in plan.to_run() if not plan.experiment.missing(trial)
    }  # fmt: skip
    busy = {key for key, folder in to_run.items() if folder.busy()}
    interrupted = sum(folder.checkpoint_epoch() > 0 for key, folder in to_run.items() if key not in busy)
    outcomes = {  # of each variant, the one with the most seeds
        outcome.variant.name: (plan, outcome)
        for plan in sorted(plans, key=lambda plan: len(plan.study.seeds))
        for outcome in plan.outcomes()
    }
    whole = max((plan.whole for plan in plans), key=lambda study: len(study.variants))  # one has controls
    asked = [outcomes[variant.name] for variant in whole.variants if variant.name in outcomes]
    variants = [variant_status(plan, outcome, is_over=not to_run) for plan, outcome in asked]
    state = f"{count_trials(len(to_run))} can run now" if to_run else "done"
    state += f", {len(busy)} of them running" if busy else ""
    state += f", {interrupted} interrupted" if interrupted else ""
    blocked = sum(variant.blocked for variant in variants)
    reasons = ", ".join(dict.fromkeys(variant.note for variant in variants if variant.blocked))
    state += f"; {count_trials(blocked)} cannot run: {reasons}" if blocked else ""
    counts = {
        "variants": (len(asked), len(whole.variants)),
        "seeds": (max(len(plan.study.seeds) for plan, _ in asked), len(whole.seeds)),
    }
    parts = [f"{count} of {total} {name}" for name, (count, total) in counts.items() if count < total]
    state += f" ({' and '.join(parts)} were asked for)" if parts else ""
    names = plans[0].experiment.name, plans[0].preset, whole.name
    return StudyStatus(*names, len(to_run), len(busy), interrupted, variants, state)


def count_trials(count: int) -> str:
    return f"{count} trial{'' if count == 1 else 's'}"


def variant_status(plan: Plan, outcome: Outcome, is_over: bool) -> VariantStatus:
    """Return how far a variant is. `is_over`: no trial of the study can run now or later."""
    variant, blocked, note = outcome.variant, 0, ""
    if isinstance(plan, LadderPlan):
        return ladder_status(plan, outcome, is_over)
    if left_out := plan.why_left_out(variant):
        return VariantStatus(variant.name, outcome.lr, 0, 0, 0, f"left out: {left_out}")
    missing = [trial for trial in plan.comparison_trials(variant) or [] if plan.record(trial) is None]
    sources = [plan.results.get(trial.damping_of) for trial in missing if trial.damping_of]
    diverged = sum(source is not None and source.diverged for source in sources)
    reasons = missing_packages(plan, missing)
    if outcome.lr is None:
        tuned = plan.study.variant(variant.control_of or variant.name)
        lrs = plan.grid(tuned)
        tried = sum(plan.tuning_score(tuned, lr) is not None for lr in lrs)
        if tried == len(lrs):
            blocked, note = outcome.planned, f"every lr of {tuned.name} diverged"
        elif reasons := missing_packages(plan, plan.tuning_trials(tuned, lrs)):
            blocked, note = outcome.planned, reasons[0]
        elif variant.control_of:
            note = f"waits for the lr of {tuned.name}"
        else:
            note = f"lr not selected yet, {tried} of {len(lrs)} tried"
    elif reasons:
        blocked, note = len(reasons), reasons[0]
    elif diverged:
        blocked, note = diverged, "the source of the damping diverged"
    elif is_over and missing:
        blocked, note = len(missing), "a trial that it waits for was not run"
        if all(trial.damping_of for trial in missing):
            note = "the source of the damping was not run"
    return VariantStatus(variant.name, outcome.lr, len(outcome.records), outcome.planned, blocked, note)


def missing_packages(plan: Plan, trials: Sequence[TrialConfig]) -> list[str]:
    """Return why this machine cannot run trials that have no result: one reason per trial that it cannot."""
    reasons = [plan.experiment.missing(trial) for trial in trials if plan.record(trial) is None]
    return [reason for reason in reasons if reason]


def ladder_status(plan: LadderPlan, outcome: Outcome, is_over: bool) -> VariantStatus:
    """Return how far a variant of a ladder is. Rungs that the stop rule leaves out are not planned."""
    variant, notes = outcome.variant, []
    if left_out := plan.why_left_out(variant):
        return VariantStatus(variant.name, None, 0, 0, 0, f"left out: {left_out}")
    trials = plan.comparison_trials(variant)
    missing = [trial for trial in trials if plan.record(trial) is None]
    sources = [plan.results.get(trial.damping_of) for trial in missing if trial.damping_of]
    blocked = sum(source is not None and source.diverged for source in sources)
    if is_over and missing:
        blocked = len(missing)
    if reasons := missing_packages(plan, missing):
        blocked = max(blocked, len(reasons))
        notes.append(reasons[0])
    elif blocked:
        notes.append("the source of the damping diverged or was not run")
    if skipped := plan.skipped_rungs(variant):
        lrs = ", ".join(f"{lr:.3g}" for lr in skipped)
        notes.append(f"left out: lr {lrs}, above two rungs where every seed failed")
    counts = len(trials) - len(missing), len(trials), blocked
    return VariantStatus(variant.name, outcome.lr, *counts, "; ".join(notes), len(plan.grid(variant)))
