"""`tam lab status`, `tam lab report`, `tam lab pack` and `tam lab unpack`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tam.lab.commands.options import AsJson, ResultsPath, check_writable
from tam.lab.core.errors import LabError
from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.results import load_existing_results, pack, unpack
from tam.lab.core.selection import load_groups, select_plans, selections_of
from tam.lab.core.store import TrialFolder, write_whole


def write_report(
    results: ResultsPath,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="report.html, or report.md for Markdown.")
    ] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a report: tables next to the paper's, curves, settings and machines."""
    from tam.lab.report import WRITERS, build_report, render_json

    if as_json:
        print(render_json(build_report(load_groups(results))), end="")
        return
    check_writable(out)
    if out.suffix.lower() not in WRITERS:
        raise LabError(f"{out}: must end in {' or '.join(WRITERS)}")
    page = WRITERS[out.suffix.lower()](build_report(load_groups(results)))
    write_whole(out, page.encode())
    print(out)


def pack_results(
    folder: Annotated[Path, typer.Argument(help="The --out of a run.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="trials.jsonl.xz, for example.")],
) -> None:
    """Write the finished trials of a run folder into one packed file."""
    check_writable(out)
    print(f"{out}: {pack(folder, out)} trials")


def unpack_results(
    file: Annotated[Path, typer.Argument(help="A packed file.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The run folder to write.")],
) -> None:
    """Write the trials of a packed file into a run folder."""
    print(f"{out}: {unpack(file, out)} trials")


@dataclass(frozen=True)
class VariantStatus:
    name: str
    lr: float | None  # None while it is not selected
    finished: int  # of the comparison trials, one per seed
    planned: int  # 0 for a control that is left out
    blocked: int  # comparison trials that can never run
    note: str  # why they cannot, what the variant waits for, or why it is left out


@dataclass(frozen=True)
class StudyStatus:
    experiment: str
    preset: str
    study: str
    to_run: int  # trials that can run now
    running: int  # of these, by another process
    variants: list[VariantStatus]
    state: str  # all this in words


def show_status(results: ResultsPath, as_json: AsJson = False) -> None:
    """Show how far the runs of a folder are."""
    studies = [study_status(plan, results) for plan in load_plans(results)]
    if as_json:
        print(json.dumps([asdict(study) for study in studies], indent=1))
        return
    for study in studies:
        print(f"{study.experiment} {study.preset} {study.study}: {study.state}")
        for one in study.variants:
            blocked = f"{count_trials(one.blocked)} cannot run: " if one.blocked else ""
            seeds = f"{one.finished} of {one.planned} seeds" if one.planned else ""  # none: left out
            print(f"  {one.name}: {'; '.join(filter(None, (seeds, blocked + one.note)))}")


def load_plans(path: Path) -> list[Plan]:
    """Return the plans of everything that was run, without parts of what was run another time."""
    results = load_existing_results(path)
    plans = [plan for selection in selections_of(results) for plan in select_plans(selection, results)]
    whole_plans: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: -plan.study.trials()):
        if not any(_covers(other, plan) for other in whole_plans):
            whole_plans.append(plan)
    return sorted(whole_plans, key=plans.index)


def _covers(plan: Plan, other: Plan) -> bool:
    """Return whether a plan has all variants and seeds of another one of the same study."""
    identity, other_identity = ((p.experiment.name, p.preset, p.study.identity) for p in (plan, other))
    names, other_names = ({variant.name for variant in p.study.variants} for p in (plan, other))
    has_seeds = len(plan.study.seeds) >= len(other.study.seeds)
    return identity == other_identity and names >= other_names and has_seeds


def study_status(plan: Plan, path: Path) -> StudyStatus:
    """Return how far a study is, given the results in this folder or packed file."""
    to_run = {trial.key: trial for _, trial in plan.to_run()}
    running = sum(TrialFolder(path, trial).busy() for trial in to_run.values())
    variants = [variant_status(plan, outcome, is_over=not to_run) for outcome in plan.outcomes()]
    state = f"{count_trials(len(to_run))} can run now" if to_run else "done"
    state += f", {running} of them running" if running else ""
    blocked = sum(variant.blocked for variant in variants)
    reasons = ", ".join(dict.fromkeys(variant.note for variant in variants if variant.blocked))
    state += f"; {count_trials(blocked)} cannot run: {reasons}" if blocked else ""
    names = plan.experiment.name, plan.preset, plan.study.name
    return StudyStatus(*names, len(to_run), running, variants, state)


def count_trials(count: int) -> str:
    return f"{count} trial{'' if count == 1 else 's'}"


def variant_status(plan: Plan, outcome: Outcome, is_over: bool) -> VariantStatus:
    """Return how far a variant is. `is_over`: no trial of the study can run now or later."""
    variant, blocked, note = outcome.variant, 0, ""
    if left_out := plan.why_left_out(variant):
        return VariantStatus(variant.name, outcome.lr, 0, 0, 0, f"left out: {left_out}")
    missing = [trial for trial in plan.comparison_trials(variant) or [] if plan.record(trial) is None]
    sources = [plan.results.get(trial.damping_of) for trial in missing if trial.damping_of]
    diverged = sum(source is not None and source.diverged for source in sources)
    if outcome.lr is None:
        tuned = plan.study.variant(variant.control_of or variant.name)
        lrs = plan.grid(tuned)
        tried = sum(plan.tuning_score(tuned, lr) is not None for lr in lrs)
        if tried == len(lrs):
            blocked, note = outcome.planned, f"every lr of {tuned.name} diverged"
        elif variant.control_of:
            note = f"waits for the lr of {tuned.name}"
        else:
            note = f"lr not selected yet, {tried} of {len(lrs)} tried"
    elif diverged:
        blocked, note = diverged, "the source of the damping diverged"
    elif is_over and missing:
        blocked, note = len(missing), "the source of the damping was not run"
    return VariantStatus(variant.name, outcome.lr, len(outcome.records), outcome.planned, blocked, note)
