"""Run an experiment. Started again, the same command continues where it stopped."""

from __future__ import annotations

import inspect
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from tam.lab.commands.dry_run import describe_run
from tam.lab.commands.lazy import LazyGroup, make_app, make_command, read_summary
from tam.lab.commands.options import DataFolder, complete_preset, complete_study, complete_variant
from tam.lab.commands.progress import ProgressDisplay
from tam.lab.core import runner
from tam.lab.core.environment import count_cores
from tam.lab.core.errors import LabError
from tam.lab.core.registry import Experiment, RunOption, experiment_module, experiment_names, get_experiment
from tam.lab.core.selection import Selection
from tam.lab.data import default_folder
from tam.lab.engines import torchrun
from tam.lab.engines.job import RunLocation

Preset = Annotated[
    str,
    typer.Option(
        help="paper: its settings in full. fair: grids of one range of effective lr. quick: minutes on one "
        "GPU. smoke: under a minute on a CPU. `tam lab list NAME` shows all.",
        autocompletion=complete_preset,
    ),
]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder. Finished trials in it are reused.")]
Studies = Annotated[
    list[str], typer.Option(help="Only this study (repeatable).", autocompletion=complete_study)
]
Variants = Annotated[
    list[str],
    typer.Option(help="Only this variant and what it needs (repeatable).", autocompletion=complete_variant),
]
Arms = Annotated[list[str], typer.Option("--arm", hidden=True)]  # the former name of --variant
Seeds = Annotated[int | None, typer.Option(min=1, help="Only this many of the seeds.")]
CONTROLS = (
    "Add the controls of every variant of TAM or AdaTAM: the baseline at its effective lr, replayed damping."
)
DRY_RUN = "Show the trials, the data and the time they need. Run nothing."
Controls = Annotated[bool, typer.Option("--controls", help=CONTROLS)]
DryRun = Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1. auto: a GPU if there is one.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes. Default: one per GPU, or one per core on a CPU.")
]
Together = Annotated[int, typer.Option(min=1, help="Trials that share one GPU.")]
SaveEvery = Annotated[
    float, typer.Option(min=0.0, metavar="SECONDS", help="Least time between two checkpoints of a trial.")
]
Engine = Annotated[str, typer.Option(help="local: processes on this machine. ray: tasks of a Ray cluster.")]
Address = Annotated[str | None, typer.Option(help="Address of a Ray cluster. Without it, Ray runs here.")]


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
    own = [_parameter(option) for option in experiment.options]

    def run(**values: Any) -> None:
        run_experiment(experiment, **values)

    run.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    run.__doc__ = f"{experiment.title}.\n\nExample: tam lab run {name} --preset smoke --out /tmp/lab"
    return make_command(run)


def _parameter(option: RunOption) -> inspect.Parameter:
    details = typer.Option(f"--{option.name}", metavar=option.metavar, help=option.help)
    return inspect.Parameter(
        option.name.replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, details],
    )


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
    {
        name: (read_summary(experiment_module(name)), partial(make_run_command, name))
        for name in experiment_names()
    },
    ExperimentGroup,
    help=__doc__,
    subcommand_metavar="EXPERIMENT [OPTIONS]",
)
