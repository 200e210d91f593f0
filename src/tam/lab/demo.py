"""The demo: the paper's six optimizers on the digits of scikit-learn, side by side from the same start."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import sklearn
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table as TerminalTable
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tam.lab.core.environment import describe_machine
from tam.lab.core.study import Curve
from tam.lab.models import count_parameters
from tam.lab.report.charts import Series, line_chart, mean_series
from tam.lab.report.model import TableData
from tam.lab.report.render import render
from tam.lab.report.statistics import estimate, summarise
from tam.lab.training.metrics import grad_norm
from tam.registry import OPTIMIZERS, OptimizerInfo

NAMES = ("sgd", "sgdm", "tam", "adam", "angulargrad", "adatam")
BATCH = 64
TEST = 360  # images held out, of 1797
HIDDEN = 64

MARGIN = 1.0  # in points: two optimizers do the same if the 95 % interval lies within it

NOISE = (
    "A difference is within the noise if its 95 % interval, paired by seed, includes 0. The intervals are "
    "not corrected for the number of pairs. The learning rates are the paper's for ResNet18 on CIFAR-10. "
    "They are not tuned for this task, so the order ranks nothing."
)
CHARTS = (
    Curve("loss", "Training loss", "cross-entropy, epoch mean", log=True),
    Curve("accuracy", "Test accuracy", "accuracy (%)"),
    Curve("alignment", "Alignment s", "s, epoch mean"),
    Curve("grad_norm", "Gradient norm", "|g|, epoch mean", log=True),
)


@dataclass(frozen=True)
class Start:
    """What the optimizers share for one seed."""

    train: tuple[Tensor, Tensor]  # images and labels
    test: tuple[Tensor, Tensor]
    model: nn.Module  # as initialised; a run trains a copy
    orders: Tensor  # of the training images, one row per epoch


@dataclass(frozen=True)
class Run:
    """One training. A curve has one entry per epoch."""

    loss: Tensor  # mean over the epoch's steps
    accuracy: Tensor  # on the test images after the epoch, in percent
    grad_norm: Tensor  # mean over the epoch's steps
    alignment: Tensor | None  # s, mean over the epoch's steps
    last_alignment: float | None  # s after the last step
    seconds: float


Results = Mapping[str, Sequence[Run]]  # the runs of each optimizer, one per seed


def start(seed: int, epochs: int) -> Start:
    """Return the split, the initial weights and the batches of a seed."""
    digits = load_digits()
    x = torch.as_tensor(digits.data / 16, dtype=torch.float32)
    y = torch.as_tensor(digits.target, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    split = torch.randperm(len(x), generator=generator)
    test, train = split[:TEST], split[TEST:]
    orders = torch.stack([torch.randperm(len(train), generator=generator) for _ in range(epochs)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
        model = nn.Sequential(*layers, nn.Linear(HIDDEN, 10))
    return Start((x[train], y[train]), (x[test], y[test]), model, orders)


def train(record: OptimizerInfo, start: Start, after_epoch: Callable[[], object] = lambda: None) -> Run:
    """Train a copy of the start's model at the paper's learning rate, held constant."""
    model = copy.deepcopy(start.model)
    optimizer: Any = record.create(model.parameters(), weight_decay=0.0)
    images, labels = start.train
    curves: dict[str, list[Tensor]] = defaultdict(list)
    begin = time.perf_counter()
    for order in start.orders:
        steps: dict[str, list[Tensor]] = defaultdict(list)
        for batch in order.split(BATCH):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            steps["loss"].append(loss.detach())
            steps["grad_norm"].append(grad_norm(model))
            optimizer.step()
            if record.has_alignment:
                steps["alignment"].append(optimizer.alignment)
        for name, values in steps.items():
            curves[name].append(torch.stack(values).mean())
        with torch.no_grad():
            hits = model(start.test[0]).argmax(1) == start.test[1]
        curves["accuracy"].append(100 * hits.float().mean())
        after_epoch()
    seconds = time.perf_counter() - begin
    losses, accuracies, norms = (torch.stack(curves[key]) for key in ("loss", "accuracy", "grad_norm"))
    s = torch.stack(curves["alignment"]) if record.has_alignment else None
    return Run(losses, accuracies, norms, s, None if s is None else float(optimizer.alignment), seconds)


def compare(seeds: int, epochs: int, console: Console) -> Results:
    """Run all trainings, one after another; progress goes to the console."""
    results: dict[str, list[Run]] = {name: [] for name in NAMES}
    starts = [start(seed, epochs) for seed in range(seeds)]
    plan = [(seed, name) for seed in range(seeds) for name in NAMES]
    # The bar fits into 80 characters.
    columns = "{task.description}", BarColumn(16), MofNCompleteColumn(), "epochs", TimeRemainingColumn()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are too small to share out
    try:
        train(OPTIMIZERS[NAMES[0]], start(0, 1))  # the first steps of a process take longer; not timed
        with Progress(*columns, "left", console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=len(plan) * epochs)
            for i, (seed, name) in enumerate(plan):
                what = f"run {i + 1} of {len(plan)}: {OPTIMIZERS[name].title}, seed {seed}"
                progress.update(bar, description=what)
                if not console.is_terminal:
                    console.print(what, highlight=False)
                results[name].append(train(OPTIMIZERS[name], starts[seed], lambda: progress.advance(bar)))
    finally:
        torch.set_num_threads(threads)
    return results


def table(results: Results) -> TableData:
    """Return the outcomes as text."""
    header = ["optimizer", "lr", "test accuracy %\nmean ± std", "seconds\nper run", "s at\nthe end"]
    rows = []
    for name, runs in results.items():
        info, outcome = OPTIMIZERS[name], summarise([float(run.accuracy[-1]) for run in runs])
        s = [run.last_alignment for run in runs if run.last_alignment is not None]
        seconds, alignment = fmean(run.seconds for run in runs), f"{fmean(s):+.3f}" if s else "-"
        rows.append([info.title, f"{info.lr:g}", outcome.format(2), f"{seconds:.2f}", alignment])
    return TableData(header, rows)


def answer(results: Results) -> list[str]:
    """Return who is best and by how much, and how TAM compares with SGDM at half of TAM's lr."""
    accuracies = {
        name: {seed: float(run.accuracy[-1]) for seed, run in enumerate(runs)}
        for name, runs in results.items()
    }
    sentences = [_name_best(accuracies)]
    if {"tam", "sgdm"} <= accuracies.keys():
        sentences.append(_compare_at_half_lr(accuracies["sgdm"], accuracies["tam"]))
    return sentences


def _name_best(accuracies: Mapping[str, Mapping[int, float]]) -> str:
    """Return who has the highest mean accuracy, and what its lead is worth."""
    means = {name: fmean(by_seed.values()) for name, by_seed in accuracies.items()}
    best, second = sorted(means, key=means.__getitem__, reverse=True)[:2]
    title, next_title = OPTIMIZERS[best].title, OPTIMIZERS[second].title
    seeds, lead = len(accuracies[best]), f"{means[best] - means[second]:.2f}"
    highest = f"the highest mean test accuracy over {count(seeds, 'seed')}, {means[best]:.2f} %"
    if lead == "0.00":
        return f"{title} and {next_title} share {highest}."
    difference = estimate(accuracies[best], accuracies[second], lower=False)
    if difference is None or not difference.has_interval:
        worth = "cannot be judged without a spread between seeds"
    elif difference.low > 0:
        worth = "is larger than the noise"
    else:
        worth = "is within the noise"
    return f"{title} has {highest}; its lead of {lead} points over {next_title} {worth}."


def _compare_at_half_lr(sgdm: Mapping[int, float], tam: Mapping[int, float]) -> str:
    """Return how SGDM compares with TAM. The paper's lr of SGDM is half of TAM's."""
    title = f"SGDM at half of TAM's lr ({OPTIMIZERS['sgdm'].lr:g} instead of {OPTIMIZERS['tam'].lr:g})"
    difference = estimate(sgdm, tam, lower=False)
    if difference is None or not difference.has_interval:
        mean = fmean(sgdm.values()) - fmean(tam.values())
        return f"{title} differs from TAM by {mean:+.2f} points, and no spread says what that is worth."
    low, high = difference.low, difference.high
    if low > 0 or high < 0:
        relation = f"is {'better' if low > 0 else 'worse'} than TAM"
    elif max(-low, high) <= MARGIN:
        relation = f"is within {MARGIN:g} point of TAM"
    else:
        relation = "and TAM cannot be told apart here"
    return f"{title} {relation}: the 95 % interval of the difference is {low:+.2f} to {high:+.2f} points."


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def describe_spread(seeds: int) -> str:
    """Return what the ± of the table means."""
    if seeds == 1:
        return "std: none, as there is 1 seed"
    return f"std: standard deviation over {seeds} seeds (split, initialisation and batch order differ)"


def curves(results: Results, key: str) -> Iterator[Series]:
    """Return a line for each optimizer that has the curve: mean over the seeds, band from min to max."""
    for style, (name, runs) in enumerate(results.items()):
        if getattr(runs[0], key) is not None:
            by_epoch = zip(*(getattr(run, key).tolist() for run in runs), strict=True)
            yield mean_series(OPTIMIZERS[name].title, dict(enumerate(by_epoch, 1)), style)


def report(results: Results, seeds: int, epochs: int, seconds: float) -> str:
    """Return the page."""
    charts = [
        line_chart([*curves(results, one.key)], one.title, one.by, one.label, log_y=one.log) for one in CHARTS
    ]
    machine = {**describe_machine(torch.device("cpu")), "scikit-learn": sklearn.__version__}
    begin = start(0, 1)
    sizes = {"start": begin, "parameters": count_parameters(begin.model), "hidden": HIDDEN, "batch": BATCH}
    runs = {"seeds": seeds, "epochs": epochs, "runs": len(NAMES) * seeds, "seconds": seconds}
    texts = {"title": "Torque-aware momentum: demo", "noise": NOISE, "spread": describe_spread(seeds)}
    more = {"table": table(results), "charts": charts, "machine": machine, "count": count}
    return render("demo.html.j2", answer=answer(results), **sizes, **runs, **texts, **more)


def run(seeds: int, epochs: int, out: Path) -> None:
    """Train, print the answer and the table, and write the page."""
    begin, console = time.perf_counter(), Console()
    results = compare(seeds, epochs, Console(stderr=True))
    page = report(results, seeds, epochs, time.perf_counter() - begin)
    out.write_text(page, encoding="utf-8")
    title = f"digits, {count(epochs, 'epoch')}, n = {count(seeds, 'seed')}"
    printed, outcomes = TerminalTable(title=title, caption=describe_spread(seeds)), table(results)
    for i, name in enumerate(outcomes.header):
        printed.add_column(name, justify="right" if i else "left")
    for row in outcomes.rows:
        printed.add_row(*row)
    console.print(*answer(results), highlight=False)
    console.print(printed)
    console.print(NOISE, highlight=False)
