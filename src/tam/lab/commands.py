"""`tam lab`: list, run, status, report, mteb, data, paper."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import torch
import typer

from tam.lab import comparison, graph, llm, runner
from tam.lab import data as sets
from tam.lab import report as reports
from tam.lab.data import DataError, default_folder, files
from tam.lab.embedding import score
from tam.lab.embedding.tasks import check as check_tasks
from tam.lab.engines.work import Place
from tam.lab.experiment import Plan, experiments
from tam.lab.machine import cores
from tam.lab.models import language
from tam.lab.outcome import Outcome, outcomes
from tam.lab.progress import Show
from tam.lab.store import LabError, TrialFolder, digest_of

app = typer.Typer(
    no_args_is_help=True, help="Run the paper's experiments, and report them beside its figures."
)
data_app = typer.Typer(no_args_is_help=True, help="The data sets: get them, check them.")
app.add_typer(data_app, name="data")
paper_app = typer.Typer(no_args_is_help=True, help="The paper's own figures, recomputed from its tables.")
app.add_typer(paper_app, name="paper")

SETS = "Of " + ", ".join((*sets.SETS, *sets.OTHERS))
Data = Annotated[
    Optional[Path],  # noqa: UP045  typer reads this at run time, on Python 3.10 too
    typer.Option(
        metavar="FOLDER", help=f"Where the data lies; default {default_folder()}.", envvar="TAM_DATA"
    ),
]


def _ends(error: Exception) -> NoReturn:
    sys.exit(f"tam: {error}")


def check_writable(path: Path) -> None:
    """End the program with a message if the file cannot be written."""
    file = Path(os.path.realpath(path))  # a link itself must not be removed below
    existed = file.exists()
    try:
        file.open("a").close()  # permissions alone do not tell: the folder may be missing or read-only
    except OSError as error:
        sys.exit(f"tam: cannot write {path}: {error.strerror}")
    if not existed:
        file.unlink()


@app.command("list")
def list_experiments(
    name: Annotated[Optional[str], typer.Argument(help="Only this experiment.")] = None,  # noqa: UP045
) -> None:
    """Show the experiments and their presets; of one that is named, all studies and arms."""
    try:
        found = list(experiments().values()) if name is None else [runner.get_experiment(name)]
    except LabError as error:
        _ends(error)
    for experiment in found:
        print(f"{experiment.name}: {experiment.title}")
        if name is None:
            print(f"  presets {', '.join(experiment.presets)}")
            continue
        for preset, studies in experiment.presets.items():
            print(f"  --preset {preset}")
            for study in studies:
                arms = ", ".join(f'"{arm.name}"' for arm in study.arms)
                length = study.workload.get("epochs", "")
                by = experiment.curves[0].by if experiment.curves else "epoch"  # or a task, an experience
                print(f"    --study {study.name}: up to {study.trials()} trials, {length} {by}s; arms {arms}")


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="An experiment; `tam lab list` shows them.")],
    preset: Annotated[
        str,
        typer.Option(
            help="paper: its settings in full; fair: grids of one range of effective lr, extended alike; "
            "quick: minutes, or half an hour, on one GPU; smoke: under a minute on a CPU; `tam lab list "
            "NAME` shows all."
        ),
    ] = "quick",
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Results go there; what is there is not run again.")
    ] = Path("lab-results"),
    data: Data = None,
    study: Annotated[list[str], typer.Option(help="Only this study (repeatable).")] = [],  # noqa: B006
    arm: Annotated[list[str], typer.Option(help="Only this arm, and what it needs (repeatable).")] = [],  # noqa: B006
    seeds: Annotated[Optional[int], typer.Option(min=1, help="Only so many of the seeds.")] = None,  # noqa: UP045
    controls: Annotated[
        bool,
        typer.Option(
            "--controls",
            help="For every arm of TAM or AdaTAM, also SGDM or Adam at its effective lr, and its own d "
            "shuffled, or its mean.",
        ),
    ] = False,
    encoder: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FOLDER|NAME", help="A sentence encoder, for the titles of graph's movies."),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="NAME=FOLDER|NAME", help="What llm fine-tunes: a folder, or a name on Hugging Face's hub."
        ),
    ] = None,
    tasks: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="NAME,…",
            help="Of MTEB, on which llm's networks are evaluated; none: ''. Finished ones: `tam lab mteb`.",
        ),
    ] = None,
    checkpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FILE|timm:NAME",
            help="What vit (images) and continual begin from: a state dict, or timm's.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:1; auto takes a GPU if there is one.")
    ] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes. Default: one a GPU, or one a core on a CPU.")
    ] = None,
    together: Annotated[int, typer.Option(min=1, help="Trials side by side on one GPU.")] = 4,
    save_every: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="The least time between checkpoints of a trial.")
    ] = 60.0,
    engine: Annotated[
        str, typer.Option(help="local: processes here; ray: tasks of a Ray cluster.")
    ] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster; without it Ray runs here.")] = None,
) -> None:
    """Run an experiment; started again, it goes on where it stopped.

    Example: tam lab run images --preset smoke --out /tmp/lab
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device.startswith("cuda")
    place = Place(
        out.resolve(), (data or default_folder()).resolve(), device, together if on_gpu else 1, save_every
    )
    count = workers or (max(1, torch.cuda.device_count()) if on_gpu else cores())
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a cluster ends a job with
    if address is not None and engine != "ray":
        _ends(LabError("--address is of a Ray cluster: it needs --engine ray"))
    try:
        given = _given(name, place, checkpoint, encoder, model, tasks)
        selection = runner.Selection(name, preset, tuple(study), tuple(arm), seeds, controls, given)
        with Show(quiet=os.environ.get("RANK", "0") != "0") as show:  # of torchrun's
            runner.run(selection, place, count, show, engine, address)
    except (LabError, DataError) as error:
        _ends(error)
    except KeyboardInterrupt:
        sys.exit("tam: stopped; the same command goes on from the last checkpoints")
    finally:
        signal.signal(signal.SIGTERM, before)
    if os.environ.get("RANK", "0") == "0":
        print(f"{out}: done; `tam lab report {out} -o report.html` writes the report")


def _given(
    name: str, place: Place, checkpoint: str | None, encoder: str | None, model: str | None, tasks: str | None
) -> dict[str, Any]:
    """What options add to the workload of an experiment's studies."""
    if encoder is not None and name != "graph":
        raise LabError("--encoder is for graph alone")
    if (model is not None or tasks is not None) and name != "llm":
        raise LabError("--model and --tasks are for llm alone")
    given: dict[str, Any] = {}
    if checkpoint:
        given["checkpoint"] = _with_digest(checkpoint)
    if encoder is not None:
        given["titles"] = graph.embed_titles(encoder, place.data, place.root)
    if model is not None:
        given["model"] = language.note(model, place.root)
    if tasks is not None:
        given["tasks"] = _names(tasks)
    return given


def _names(given: str | None) -> list[str]:
    """Of what was given as NAME,…"""
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def _with_digest(checkpoint: str) -> str:
    """A file with the digest of its content: trials that begin from another one are others."""
    if checkpoint.startswith("timm:"):
        return checkpoint
    path = Path(checkpoint).resolve()
    try:
        return f"{path}#{digest_of(path.read_bytes())}"
    except OSError as error:
        raise LabError(f"the checkpoint {path} cannot be read: {error.strerror}") from error


@app.command()
def status(folder: Annotated[Path, typer.Argument(help="The --out of a run.")]) -> None:
    """Show how far the runs of a folder are."""
    try:
        selections = runner.remembered(folder)
        if not selections:
            raise LabError(f"{folder} has no runs.json: nothing was run there")
        plans = [plan for selection in selections for plan in runner.plans(selection, folder)]
        wanted: list[Plan] = []  # without parts of what was asked for another time
        for plan in sorted(plans, key=lambda plan: -plan.study.trials()):
            if not any(_covers(other, plan) for other in wanted):
                wanted.append(plan)
        for plan in sorted(wanted, key=plans.index):
            print(f"{plan.experiment.name} {plan.preset} {plan.study.name}: {_how_far(plan)}")
            for one in outcomes(plan):
                print(f"  {one.arm.name}: {_how_far_is(one, plan)}")
    except LabError as error:
        _ends(error)


def _covers(plan: Plan, other: Plan) -> bool:
    """Whether it has all arms and seeds of the other, which is of the same study."""
    study, its = ((one.experiment.name, one.preset, one.study.identity) for one in (plan, other))
    arms, its_arms = ({arm.name for arm in one.study.arms} for one in (plan, other))
    return study == its and arms >= its_arms and len(plan.study.seeds) >= len(other.study.seeds)


def _how_far(plan: Plan) -> str:
    left = [TrialFolder(plan.root, trial) for _, trial in plan.to_run()]
    at_work = sum(folder.busy() for folder in left)
    if not left:
        return "done"
    return f"{len(left)} trials can be run now" + (f", {at_work} of them are at work" if at_work else "")


def _how_far_is(outcome: Outcome, plan: Plan) -> str:
    if outcome.lr is not None:
        return f"{len(outcome.folders)} of {outcome.wanted} seeds"
    if outcome.arm.control_of:
        return "waits for the lr of " + outcome.arm.control_of
    lrs = plan.grid(outcome.arm)
    done = sum(plan.tuned_to(outcome.arm, lr) is not None for lr in lrs)
    return f"lr not chosen yet, {done} of {len(lrs)} tried"


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The --out of a run.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="report.html, or report.md for Markdown.")
    ] = Path("report.html"),
) -> None:
    """Write the report of a folder: tables beside the paper's, curves, settings and machines."""
    check_writable(out)
    if out.suffix.lower() not in reports.WRITERS:
        _ends(LabError(f"{out}: must end in {' or '.join(reports.WRITERS)}"))
    try:
        reports.write(folder, out)
    except LabError as error:
        _ends(error)
    print(out)


@app.command()
def mteb(
    folder: Annotated[Path, typer.Argument(help="The --out of a run of llm.")],
    data: Data = None,
    tasks: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME,…", help="Others than those the networks were trained with."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu or cuda: where embeddings are made that are not there.")
    ] = "cpu",
) -> None:
    """Score the networks of a folder's runs on their tasks of MTEB, as far as they have no scores.

    From their embeddings, where these lie in the folder: they may have been made on another machine.
    """
    if data is not None and not data.is_dir():
        _ends(LabError(f"--data {data}: no such folder"))
    failed, where, asked = 0, data or default_folder(), _names(tasks)
    try:
        runner.check_device(device, torch.cuda.device_count())
        check_tasks(asked, where)
        plans = [
            plan for group in runner.shown(folder) for plan in group.plans if plan.experiment.name == "llm"
        ]
    except (LabError, DataError) as error:
        _ends(error)
    trials = {
        trial.key: (f"{plan.study.name}, {one.arm.name}, seed {seed}", trial)
        for plan in plans
        for one in outcomes(plan)
        for seed, trial in one.folders.items()
    }
    for label, trial in trials.values():
        wanted = asked or llm.Config(**trial.config).tasks
        try:
            score.evaluate(trial.path, wanted, where, torch.device(device))
        except (LabError, DataError) as error:  # the others go on
            print(f"tam: {error}", file=sys.stderr)
        found = {name: value for name, value in score.found(trial.path / "mteb").items() if name in wanted}
        print(f"{label} ({trial.key}): {', '.join(f'{name} {value:.2f}' for name, value in found.items())}")
        failed += len(found) < len(wanted)
    if not trials:
        _ends(LabError(f"{folder} has no finished trials of llm"))
    if failed:
        sys.exit(f"tam: {failed} of the networks have not all of their scores")


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help=SETS)], data: Data = None) -> None:
    """Download a data set, check it and unpack it."""
    try:
        layouts = sets.layouts_of(name)
        folder = data or default_folder()
        if layouts and not files.is_whole(layouts, folder):
            files.get(name, layouts[0], folder, print)
        print(f"{name}: there")
    except (DataError, OSError) as error:
        _ends(error)


@data_app.command("check")
def data_check(name: Annotated[str, typer.Argument(help=SETS)], data: Data = None) -> None:
    """Check every file of a data set against its official size and md5, as far as they are known."""
    folder = data or default_folder()
    try:
        layout = sets.find(name, folder)
        files.check(name, layout, folder)
        unknown = [file.path for file in layout.files if file.md5 is None]
        if unknown:
            sizes = all(file.size is not None for file in layout.files)
            size = "of the right size; no md5 is" if sizes else "but neither size nor md5 are"
            print(f"{name}: all of it is there, {size} known of {', '.join(unknown)}")
        else:
            print(f"{name}: all of it is there, and as its authors published it")
    except DataError as error:
        _ends(error)


@paper_app.command("mteb")
def paper_mteb(
    as_json: Annotated[bool, typer.Option("--json", help="The counts and shares as JSON.")] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "-o", "--out", metavar="FILE", help="A page with tables, claims and figures: mteb.html."
        ),
    ] = None,
) -> None:
    """Compare AdaTAMW with AdamW on MTEB from the paper's six tables, and check what it says of them."""
    rows = comparison.read(comparison.MTEB)
    if out is not None:
        check_writable(out)
        if out.suffix.lower() != ".html":
            _ends(LabError(f"{out}: must end in .html"))
        try:
            comparison.write(rows, "MTEB: the paper's comparison, recomputed from its tables", out)
        except LabError as error:
            _ends(error)
    if as_json:
        print(json.dumps(comparison.summary(rows)))
    else:
        print(comparison.text(rows) if out is None else out)
