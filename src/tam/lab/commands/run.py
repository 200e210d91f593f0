"""Run an experiment. The same command continues a run that was stopped."""

from __future__ import annotations

import inspect
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from typer import Option

from tam.lab.commands.app import LazyGroup, make_app, make_command, read_summary
from tam.lab.commands.data import sets_needed
from tam.lab.commands.list import describe_ladder
from tam.lab.commands.options import DataFolder
from tam.lab.commands.progress import ProgressDisplay, describe_duration
from tam.lab.core import runner
from tam.lab.core.config import TrialConfig
from tam.lab.core.environment import count_cores
from tam.lab.core.errors import DataError, LabError, StoppedError
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, experiment_modules, get_experiment
from tam.lab.core.selection import Selection
from tam.lab.core.study import Ladder, Study
from tam.lab.core.toml import read_toml
from tam.lab.data import default_folder, find
from tam.lab.engines import torchrun
from tam.lab.engines.events import RoundStarted, RunLocation

HELP = read_toml(Path(__file__).with_name("run.toml"))
Names = list[str] | None


def complete_preset(ctx: typer.Context) -> list[str]:
    return list(get_experiment(str(ctx.info_name)).presets)


def complete_study(ctx: typer.Context) -> list[str]:
    return [study.name for study in _studies(ctx)]


def complete_variant(ctx: typer.Context) -> list[str]:
    return list({variant.name: None for study in _studies(ctx) for variant in study.variants})


def _studies(ctx: typer.Context) -> tuple[Study, ...]:
    """Return the studies of the preset on the command line."""
    return get_experiment(str(ctx.info_name)).presets.get(ctx.params.get("preset") or "quick", ())


class ExperimentGroup(LazyGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not ctx.resilient_parsing:
            get_experiment(args[0])  # its error names the experiments there are
        return super().resolve_command(ctx, args)


def make_run_command(name: str) -> Any:
    """Return `tam lab run NAME`: the common options and those of the experiment."""
    experiment = get_experiment(name)
    common = list(inspect.signature(run_experiment, eval_str=True).parameters.values())[1:-1]
    own = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=None,
            annotation=Annotated[str | None, Option(metavar=option.metavar, help=option.help)])
        for option in experiment.options
    ]  # fmt: skip

    def run(**values: Any) -> None:
        run_experiment(experiment, **values)

    run.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    run.__doc__ = f"{experiment.title}.\n\nExample: tam lab run {name} --preset smoke --out /tmp/lab"
    return make_command(run)


def run_experiment(
    experiment: Experiment,
    *,
    preset: Annotated[
        str, Option(metavar="NAME", help=HELP["preset"], autocompletion=complete_preset)
    ] = "quick",
    out: Annotated[Path, Option(metavar="FOLDER", help=HELP["out"])] = Path("lab-results"),
    data: DataFolder = None,
    study: Annotated[Names, Option(metavar="NAME", help=HELP["study"], autocompletion=complete_study)] = None,
    variant: Annotated[
        Names, Option(metavar="NAME", help=HELP["variant"], autocompletion=complete_variant)
    ] = None,
    arm: Annotated[Names, Option(hidden=True)] = None,  # the former name of --variant
    seeds: Annotated[int | None, Option(min=1, metavar="N", help=HELP["seeds"])] = None,
    controls: Annotated[bool, Option("--controls", help=HELP["controls"])] = False,
    dry_run: Annotated[bool, Option("--dry-run", help=HELP["dry_run"])] = False,
    device: Annotated[str, Option(metavar="DEVICE", help=HELP["device"])] = "auto",
    workers: Annotated[int | None, Option(min=1, metavar="N", help=HELP["workers"])] = None,
    together: Annotated[int, Option(min=1, metavar="N", help=HELP["together"])] = 4,
    save_every: Annotated[float, Option(min=0.0, metavar="SECONDS", help=HELP["save_every"])] = 60.0,
    engine: Annotated[str, Option(metavar="ENGINE", help=HELP["engine"])] = "local",
    address: Annotated[str | None, Option(metavar="ADDRESS", help=HELP["address"])] = None,
    **own: str | None,
) -> None:
    """Run what is selected of an experiment, or describe it. `own` are the experiment's own options."""
    if address is not None and engine != "ray":
        raise LabError("--address is for a Ray cluster: add --engine ray")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device.startswith("cuda")
    data_folder = (data or default_folder()).resolve()
    location = RunLocation(out.resolve(), data_folder, device, together if on_gpu else 1, save_every)
    count = workers or (max(1, torch.cuda.device_count()) if on_gpu else count_cores())

    def select(folder: Path) -> Selection:
        overrides: dict[str, Any] = {}  # of the workload, by the experiment's own options
        for option in experiment.options:
            if (value := own[option.name]) is not None:
                overrides |= option.resolve(value, folder, data_folder)
        studies, variants = tuple(study or ()), (*(variant or ()), *(arm or ()))
        return Selection(experiment.name, preset, studies, variants, seeds, controls, overrides)

    if dry_run:
        with TemporaryDirectory() as scratch:  # some options leave files in the output folder
            selection = select(Path(scratch))
        plans = runner.make_plans(selection, location, engine, address)
        print("\n".join(describe_run(plans, location, count)))
        return
    is_main = torchrun.is_first_rank()
    with interrupted_by_sigterm():
        selection = select(location.root)
        with ProgressDisplay(quiet=not is_main) as display:
            runner.run(selection, location, count, display, engine, address)
    if is_main:
        print(f"{out}: done. Write a report with: tam lab report {shlex.quote(str(out))} -o report.html")
    if torchrun.started():
        torchrun.end_process()


def describe_run(plans: list[Plan], location: RunLocation, workers: int) -> list[str]:
    """Return the lines of `--dry-run`."""
    lines, seconds, unknown = [], 0.0, []
    for plan in plans:
        counts = runner.count_trials([plan])
        ladder = f" ({describe_ladder(plan.study)})" if isinstance(plan.study, Ladder) else ""
        lines.append(f"{plan.study.name}: {describe_counts(counts)}{ladder}")
        lines += describe_trials(plan)
        total, per_trial = counts.trials + counts.later_trials, measure_seconds(plan)
        seconds += total * (per_trial or 0.0) / workers
        if total and per_trial is None:
            unknown.append(plan.study.name)
    if len(plans) > 1:
        lines.append(f"total: {describe_counts(runner.count_trials(plans))} (studies can share trials)")
    for name in dict.fromkeys(name for plan in plans for name in sets_needed(plan)):
        try:
            find(name, location.data)
            lines.append(f"data: {name} is present in {location.data}")
        except DataError as error:
            lines.append(f"data: {error}")
    if unknown:
        lines.append(
            f"time: unknown for {', '.join(unknown)}, because {location.root} has no finished trial of it"
        )
    if seconds:
        others = " for the others" if unknown else ""
        lines.append(f"time: about {describe_duration(seconds)} with {workers} processes{others}")
    return lines


def describe_trials(plan: Plan) -> list[str]:
    """Return a line per variant and lr of the trials that can run now."""
    trials_by_line: dict[tuple[str, str], list[TrialConfig]] = {}
    first_variant: dict[str, str] = {}  # that has a trial, by the trial's key
    if isinstance(plan.study, Ladder):
        return describe_rungs(plan)
    for variant, trial in plan.to_run():
        text = f"lr {trial.lr:.3g}, {'seed' if trial.test else 'tuning seed'}"
        trials_by_line.setdefault((variant.name, text), []).append(trial)
        first_variant.setdefault(trial.key, variant.name)
    lines = []
    for (name, text), trials in trials_by_line.items():
        seeds = f"{'s' * (len(trials) > 1)} {', '.join(str(trial.seed) for trial in trials)}"
        sources = {first_variant[trial.key] for trial in trials}
        shared = f" (the same trials as {sources.pop()})" if len(sources) == 1 and name not in sources else ""
        lines.append(f"  {name}: {text}{seeds}{shared}")
    return lines


def describe_rungs(plan: Plan) -> list[str]:
    """Return a line per variant of the rungs of a ladder that can run now."""
    trials_by_name: dict[str, list[TrialConfig]] = {}
    for variant, trial in plan.to_run():
        trials_by_name.setdefault(variant.name, []).append(trial)
    lines = []
    for name, trials in trials_by_name.items():
        lrs, seeds = sorted({trial.lr for trial in trials}), sorted({trial.seed for trial in trials})
        rungs = f"{len(lrs)} rungs, lr {lrs[0]:.3g} to {lrs[-1]:.3g}" if len(lrs) > 1 else f"lr {lrs[0]:.3g}"
        which = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        lines.append(f"  {name}: {rungs}, {which} ({len(trials)} trials)")
    return lines


def describe_counts(counts: RoundStarted) -> str:
    if not counts.trials + counts.later_trials:
        return "nothing left to run"
    stages = f"{counts.later_rounds} later stage{'s' if counts.later_rounds > 1 else ''}"
    later = f", about {counts.later_trials} in {stages}" if counts.later_trials else ""
    return f"{counts.trials} trials now{later}"


def measure_seconds(plan: Plan) -> float | None:
    """Return the mean time of the study's finished trials, or None. Trials that shared a device: a share."""
    timings = [record.result["timing"] for record in runner.finished_trials(plan).values()]
    return mean(timing["seconds"] / timing.get("together", 1) for timing in timings) if timings else None


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM, with which a cluster ends a job, like Ctrl-C. Both end with a message."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError("stopped. The same command continues from the last checkpoints") from None
    finally:
        signal.signal(signal.SIGTERM, handler)


app = make_app(
    {name: (read_summary(module), partial(make_run_command, name))
     for name, module in experiment_modules().items()},
    ExperimentGroup, help=__doc__, subcommand_metavar="EXPERIMENT [OPTIONS]",
)  # fmt: skip
