"""What a run would do: its trials, the data and the time they need."""

from __future__ import annotations

from statistics import mean

from tam.lab.commands.data import sets_needed
from tam.lab.core.plan import Plan
from tam.lab.core.results import load_results
from tam.lab.core.runner import TrialCounts, count_trials
from tam.lab.core.selection import Selection, select_plans
from tam.lab.data import get_set
from tam.lab.engines.job import RunLocation


def describe_run(selection: Selection, location: RunLocation, workers: int) -> list[str]:
    """Return the lines of `--dry-run`."""
    plans = select_plans(selection, load_results(location.root))
    lines, seconds, unknown = [], 0.0, []
    for plan in plans:
        counts = count_trials([plan])
        lines.append(f"{plan.study.name}: {describe_counts(counts)}")
        lines += describe_round(plan)
        total, per_trial = counts.now + counts.later, measure_seconds(plan)
        seconds += total * (per_trial or 0.0) / workers
        if total and per_trial is None:
            unknown.append(plan.study.name)
    if len(plans) > 1:
        lines.append(f"in all: {describe_counts(count_trials(plans))} (studies can share trials)")
    for name in dict.fromkeys(name for plan in plans for name in sets_needed(plan)):
        lines.append(f"data: {name} is {get_set(name).presence(location.data)} in {location.data}")
    if unknown:
        lines.append(f"time: unknown for {', '.join(unknown)}: no trial is finished in {location.root}")
    if seconds:
        amount = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
        lines.append(f"time: about {amount} with {workers} processes{' for the others' if unknown else ''}")
    return lines


def describe_counts(counts: TrialCounts) -> str:
    """Return how many trials run now and later."""
    stages = f"{counts.later_rounds} later stage{'s' if counts.later_rounds > 1 else ''}"
    return f"{counts.now} trials now" + (f", about {counts.later} in {stages}" if counts.later else "")


def describe_round(plan: Plan) -> list[str]:
    """Return one line per variant that has trials in the next round."""
    seeds: dict[str, list[int]] = {}
    for variant, trial in plan.to_run():
        kind = "seed" if trial.test else "tuning seed"
        seeds.setdefault(f"  {variant.name}: lr {trial.lr:.3g}, {kind}", []).append(trial.seed)
    return [
        f"{line}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        for line, numbers in seeds.items()
    ]


def measure_seconds(plan: Plan) -> float | None:
    """Return the mean time of the study's finished trials, or None. Trials that shared a device: a share."""
    trials = [trial for variant in plan.study.variants for trial in plan.comparison_trials(variant) or ()]
    for variant in plan.study.variants:
        trials += plan.tuning_trials(variant, plan.grid(variant) if variant.lrs else ())
    timings = [record.result["timing"] for record in map(plan.record, trials) if record is not None]
    return mean(timing["seconds"] / timing.get("together", 1) for timing in timings) if timings else None
