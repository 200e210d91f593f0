"""Run an experiment. Started again, the same command continues where it stopped."""

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

from tam.lab.commands.data import sets_needed
from tam.lab.commands.lazy import LazyGroup, make_app, make_command, read_summary
from tam.lab.commands.options import DataFolder
from tam.lab.commands.progress import ProgressDisplay, describe_duration
from tam.lab.core import runner
from tam.lab.core.environment import count_cores
from tam.lab.core.errors import LabError
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, experiment_module, experiment_names, get_experiment
from tam.lab.core.results import load_results
from tam.lab.core.selection import Selection, select_plans
from tam.lab.core.study import Study
from tam.lab.data import default_folder, get_set
from tam.lab.engines import torchrun
from tam.lab.engines.events import RunLocation


def complete_preset(ctx: typer.Context) -> list[str]:
    """Return the presets of the experiment whose command it is."""
    return list(get_experiment(str(ctx.info_name)).presets)


def complete_study(ctx: typer.Context) -> list[str]:
    return [study.name for study in _studies(ctx)]


def complete_variant(ctx: typer.Context) -> list[str]:
    return list({variant.name: None for study in _studies(ctx) for variant in study.variants})


def _studies(ctx: typer.Context) -> tuple[Study, ...]:
    """Return the studies of the preset on the command line."""
    return get_experiment(str(ctx.info_name)).presets.get(ctx.params.get("preset") or "quick", ())


PRESET = (
    "paper: its settings in full. fair: grids of one range of effective lr. quick: minutes on one "
    "GPU. smoke: under a minute on a CPU. `tam lab list NAME` shows all."
)
VARIANT = "Only this variant and what it needs (repeatable)."
CONTROLS = (
    "Add the controls of every variant of TAM or AdaTAM: the baseline at its effective lr, replayed damping."
)
Preset = Annotated[str, Option(help=PRESET, autocompletion=complete_preset)]
Out = Annotated[Path, Option(metavar="FOLDER", help="Output folder. Finished trials in it are reused.")]
Studies = Annotated[list[str], Option(help="Only this study (repeatable).", autocompletion=complete_study)]
Variants = Annotated[list[str], Option(help=VARIANT, autocompletion=complete_variant)]
Arms = Annotated[list[str], Option("--arm", hidden=True)]  # the former name of --variant
Seeds = Annotated[int | None, Option(min=1, help="Only this many of the seeds.")]
Controls = Annotated[bool, Option("--controls", help=CONTROLS)]
DryRun = Annotated[
    bool, Option("--dry-run", help="Show the trials, the data and the time they need. Run nothing.")
]
Device = Annotated[str, Option(help="cpu, cuda or cuda:1. auto: a GPU if there is one.")]
Workers = Annotated[
    int | None, Option(min=1, help="Processes. Default: one per GPU, or one per core on a CPU.")
]
Together = Annotated[int, Option(min=1, help="Trials that share one GPU.")]
SaveEvery = Annotated[
    float, Option(min=0.0, metavar="SECONDS", help="Least time between two checkpoints of a trial.")
]
Engine = Annotated[str, Option(help="local: processes on this machine. ray: tasks of a Ray cluster.")]
Address = Annotated[str | None, Option(help="Address of a Ray cluster. Without it, Ray runs here.")]


class ExperimentGroup(LazyGroup):
    """The experiments, as commands."""

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
            option.name.replace("-", "_"), inspect.Parameter.KEYWORD_ONLY, default=None,
            annotation=Annotated[str | None, Option(f"--{option.name}", metavar=option.metavar,
                                                    help=option.help)])
        for option in experiment.options
    ]  # fmt: skip

    def run(**values: Any) -> None:
        run_experiment(experiment, **values)

    run.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    run.__doc__ = f"{experiment.title}.\n\nExample: tam lab run {name} --preset smoke --out /tmp/lab"
    return make_command(run)


def run_experiment(
    experiment: Experiment, *, preset: Preset = "quick", out: Out = Path("lab-results"),
    data: DataFolder = None, study: Studies = [], variant: Variants = [], arm: Arms = [],  # noqa: B006
    seeds: Seeds = None, controls: Controls = False, dry_run: DryRun = False, device: Device = "auto",
    workers: Workers = None, together: Together = 4, save_every: SaveEvery = 60.0, engine: Engine = "local",
    address: Address = None, **own: str | None,
) -> None:  # fmt: skip
    """Run what is selected of an experiment, or describe it. `own` are the experiment's own options."""
    if address is not None and engine != "ray":
        raise LabError("--address is the address of a Ray cluster: it needs --engine ray")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device.startswith("cuda")
    data_folder = (data or default_folder()).resolve()
    location = RunLocation(out.resolve(), data_folder, device, together if on_gpu else 1, save_every)
    count = workers or (max(1, torch.cuda.device_count()) if on_gpu else count_cores())
    select = partial(Selection, experiment.name, preset, tuple(study), (*variant, *arm), seeds, controls)
    if dry_run:
        with TemporaryDirectory() as scratch:  # some options leave files in the output folder
            selection = select(resolve_options(experiment, own, Path(scratch), data_folder))
        print("\n".join(describe_run(selection, location, count)))
        return
    is_main = torchrun.is_first_rank()
    with interrupted_by_sigterm():
        selection = select(resolve_options(experiment, own, location.root, data_folder))
        with ProgressDisplay(quiet=not is_main) as display:
            runner.run(selection, location, count, display, engine, address)
    if is_main:
        print(f"{out}: done. For a report, run: tam lab report {shlex.quote(str(out))} -o report.html")


def describe_run(selection: Selection, location: RunLocation, workers: int) -> list[str]:
    """Return the lines of `--dry-run`."""
    plans = select_plans(selection, load_results(location.root))
    lines, seconds, unknown = [], 0.0, []
    for plan in plans:
        counts = runner.count_trials([plan])
        lines.append(f"{plan.study.name}: {describe_counts(counts)}")
        seeds_by_line: dict[str, list[int]] = {}
        for variant, trial in plan.to_run():
            line = f"  {variant.name}: lr {trial.lr:.3g}, {'seed' if trial.test else 'tuning seed'}"
            seeds_by_line.setdefault(line, []).append(trial.seed)
        for line, seeds in seeds_by_line.items():
            lines.append(f"{line}{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
        total, per_trial = counts.now + counts.later, measure_seconds(plan)
        seconds += total * (per_trial or 0.0) / workers
        if total and per_trial is None:
            unknown.append(plan.study.name)
    if len(plans) > 1:
        lines.append(f"in all: {describe_counts(runner.count_trials(plans))} (studies can share trials)")
    for name in dict.fromkeys(name for plan in plans for name in sets_needed(plan)):
        lines.append(f"data: {name} is {get_set(name).presence(location.data)} in {location.data}")
    if unknown:
        lines.append(f"time: unknown for {', '.join(unknown)}: no trial is finished in {location.root}")
    if seconds:
        others = " for the others" if unknown else ""
        lines.append(f"time: about {describe_duration(seconds)} with {workers} processes{others}")
    return lines


def describe_counts(counts: runner.TrialCounts) -> str:
    """Return how many trials run now and later."""
    stages = f"{counts.later_rounds} later stage{'s' if counts.later_rounds > 1 else ''}"
    return f"{counts.now} trials now" + (f", about {counts.later} in {stages}" if counts.later else "")


def measure_seconds(plan: Plan) -> float | None:
    """Return the mean time of the study's finished trials, or None. Trials that shared a device: a share."""
    trials = [trial for variant in plan.study.variants for trial in plan.comparison_trials(variant) or ()]
    for variant in plan.study.variants:
        trials += plan.tuning_trials(variant, plan.grid(variant) if variant.lrs else ())
    timings = [record.result["timing"] for record in map(plan.record, trials) if record is not None]
    return mean(timing["seconds"] / timing.get("together", 1) for timing in timings) if timings else None


def resolve_options(
    experiment: Experiment, values: dict[str, str | None], out: Path, data_folder: Path
) -> dict[str, Any]:
    """Return what the experiment's own options add to the workload of its studies."""
    overrides: dict[str, Any] = {}
    for option in experiment.options:
        value = values[option.name.replace("-", "_")]
        if value is not None:
            overrides |= option.resolve(value, out, data_folder)
    return overrides


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM, with which a cluster ends a job, like Ctrl-C. Both end with a message."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise LabError("stopped. The same command continues from the last checkpoints") from None
    finally:
        signal.signal(signal.SIGTERM, handler)


app = make_app(
    {name: (read_summary(experiment_module(name)), partial(make_run_command, name))
     for name in experiment_names()},
    ExperimentGroup, help=__doc__, subcommand_metavar="EXPERIMENT [OPTIONS]",
)  # fmt: skip
