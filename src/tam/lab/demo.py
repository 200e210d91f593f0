"""The demo: the paper's six optimizers on the digits of scikit-learn, side by side from the same start."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import sklearn
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from tam._version import __version__
from tam.lab import charts
from tam.registry import OPTIMIZERS, OptimizerInfo

NAMES = ("sgd", "sgdm", "tam", "adam", "angulargrad", "adatam")
BATCH = 64
TEST = 360  # images held out, of 1797
HIDDEN = 64

NOISE = (
    "Differences within the spread over the seeds are noise. The learning rates are those the paper "
    "found for ResNet18 on CIFAR-10; they are not tuned for this task, so the order here ranks nothing."
)

ALIGNMENT = (
    "Alignment s: the smoothed cosine between gradient and momentum, mean over the seeds; "
    "only TAM and AdaTAM have one."
)


@dataclass(frozen=True)
class Start:
    """What the optimizers share for one seed."""

    train: tuple[Tensor, Tensor]  # images and labels
    test: tuple[Tensor, Tensor]
    model: nn.Module  # as initialised; a run trains a copy
    orders: Tensor  # of the training images, one row an epoch


@dataclass(frozen=True)
class Run:
    """One training. A curve has one entry an epoch."""

    loss: Tensor  # mean over the epoch's steps
    accuracy: Tensor  # on the test images after the epoch, in percent
    grad_norm: Tensor  # mean over the epoch's steps
    alignment: Tensor | None  # s, mean over the epoch's steps
    last_alignment: float | None  # s after the last step
    seconds: float


Results = Mapping[str, Sequence[Run]]  # the runs of each optimizer, one a seed


def start(seed: int, epochs: int) -> Start:
    """The split, the initial weights and the batches of a seed."""
    digits = load_digits()
    x = torch.as_tensor(digits.data / 16, dtype=torch.float32)
    y = torch.as_tensor(digits.target, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    split = torch.randperm(len(x), generator=generator)
    test, train = split[:TEST], split[TEST:]
    orders = torch.stack([torch.randperm(len(train), generator=generator) for _ in range(epochs)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(x.shape[1], HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 10),
        )
    return Start((x[train], y[train]), (x[test], y[test]), model, orders)


def train(record: OptimizerInfo, start: Start, after_epoch: Callable[[], object] = lambda: None) -> Run:
    """Trains a copy of the start's model, at the paper's learning rate held constant."""
    model = copy.deepcopy(start.model)
    optimizer: Any = record.create(model.parameters(), weight_decay=0.0)
    images, labels = start.train
    curves: dict[str, list[Tensor]] = {"loss": [], "grad_norm": [], "accuracy": [], "alignment": []}
    begin = time.perf_counter()
    for order in start.orders:
        steps: dict[str, list[Tensor]] = {"loss": [], "grad_norm": [], "alignment": []}
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
            curves[name] += [torch.stack(values).mean()] if values else []
        curves["accuracy"].append(accuracy(model, *start.test))
        after_epoch()
    seconds = time.perf_counter() - begin
    return Run(
        loss=torch.stack(curves["loss"]),
        accuracy=torch.stack(curves["accuracy"]),
        grad_norm=torch.stack(curves["grad_norm"]),
        alignment=torch.stack(curves["alignment"]) if record.has_alignment else None,
        last_alignment=float(optimizer.alignment) if record.has_alignment else None,
        seconds=seconds,
    )


def grad_norm(model: nn.Module) -> Tensor:
    """|g| over all parameters, 0-dim."""
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """In percent, 0-dim."""
    hits: Tensor = model(images).argmax(1) == labels
    return 100 * hits.float().mean()


def progress_bar(console: Console) -> Progress:
    """Fits into 80 columns; shows nothing where the console is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
    )


def compare(seeds: int, epochs: int, console: Console) -> Results:
    """All trainings, one after another; progress goes to the console."""
    results: dict[str, list[Run]] = {name: [] for name in NAMES}
    starts = [start(seed, epochs) for seed in range(seeds)]
    plan = [(seed, name) for seed in range(seeds) for name in NAMES]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are too small to share out
    try:
        train(OPTIMIZERS[NAMES[0]], start(0, 1))  # the first steps of a process take longer; not timed
        with progress_bar(console) as progress:
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


# ------------------------------------------------------------------ what is shown


def table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Header and rows, as text."""
    header = ["optimizer", "lr", "test accuracy %\nmean ± std", "seconds\nper run", "alignment s\nat the end"]
    rows = []
    for name, runs in results.items():
        last = torch.stack([run.accuracy[-1] for run in runs])
        deviation = f" ± {last.std():.2f}" if len(runs) > 1 else ""
        s = [run.last_alignment for run in runs if run.last_alignment is not None]
        rows.append(
            [
                OPTIMIZERS[name].title,
                f"{OPTIMIZERS[name].lr:g}",
                f"{last.mean():.2f}{deviation}",
                f"{sum(run.seconds for run in runs) / len(runs):.2f}",
                f"{sum(s) / len(s):+.3f}" if s else "-",
            ]
        )
    return header, rows


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def spread(seeds: int) -> str:
    """What the ± of the table is."""
    if seeds == 1:
        return "std: none, as there is 1 seed"
    return f"std: standard deviation over {seeds} seeds (split, initialisation and batch order differ)"


def print_table(results: Results, seeds: int, epochs: int) -> None:
    header, rows = table(results)
    title = f"digits, {count(epochs, 'epoch')}, n = {count(seeds, 'seed')}"
    shown = Table(title=title, caption=spread(seeds))
    for i, name in enumerate(header):
        shown.add_column(name, justify="right" if i else "left")
    for row in rows:
        shown.add_row(*row)
    console = Console()
    console.print(shown)
    console.print(NOISE, highlight=False)


def curves(results: Results, key: str) -> Iterator[charts.Series]:
    """A line for each optimizer that has the curve: mean over the seeds, band from min to max."""
    for style, (name, runs) in enumerate(results.items()):
        found = [getattr(run, key) for run in runs]
        if found[0] is None:
            continue
        values = torch.stack(found)
        epochs = list(range(1, values.shape[1] + 1))
        mean, low, high = (v.tolist() for v in (values.mean(0), values.amin(0), values.amax(0)))
        yield charts.Series(OPTIMIZERS[name].title, epochs, mean, low, high, style)


def facts(seeds: int, epochs: int, seconds: float) -> dict[str, str]:
    """What was run."""
    begin = start(0, 1)
    parameters = sum(p.numel() for p in begin.model.parameters())
    train, test = len(begin.train[0]), len(begin.test[0])
    return {
        "data": f"scikit-learn's digits: 8 x 8 grey images, {train} to train on, {test} to test on",
        "model": f"multilayer perceptron 64-{HIDDEN}-{HIDDEN}-10 with ReLU, {parameters} parameters",
        "training": f"cross-entropy, batch size {BATCH}, {count(epochs, 'epoch')}, "
        "constant learning rate, no weight decay, no augmentation",
        "seeds": f"{seeds}; for one seed all optimizers share the split, the initial weights and the batches",
        "seconds": f"{seconds:.1f} for all {len(NAMES) * seeds} runs; those of a run count "
        "its steps, its readings and its tests",
        "versions": f"tam {__version__}, torch {torch.__version__}, scikit-learn {sklearn.__version__}, "
        f"Python {platform.python_version()}",
        "processor": f"{processor()}, 1 thread",
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def report(results: Results, seeds: int, epochs: int, seconds: float) -> str:
    """The page."""
    drawn = [
        ("loss", "Training loss", "cross-entropy, epoch mean", True),
        ("accuracy", "Test accuracy", "accuracy (%)", False),
        ("alignment", "Alignment s", "s, epoch mean", False),
        ("grad_norm", "Gradient norm", "|g|, epoch mean", True),
    ]
    figures = [
        charts.line_chart(list(curves(results, key)), title, "epoch", label, log_y=log)
        for key, title, label, log in drawn
    ]
    header, rows = table(results)
    listed = [f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts(seeds, epochs, seconds).items()]
    n = count(seeds, "seed")
    body = [
        f"<p>The paper's six optimizers on scikit-learn's digits, from the same start, {n}.</p>",
        f"<p>{escape(NOISE)}</p>",
        charts.table(header, rows),
        f"<p>{escape(spread(seeds))}. {escape(ALIGNMENT)}</p>",
        f"<h2>Curves</h2>\n<p>Line: mean over {n}. Band: least to greatest value over them.</p>",
        '<div class="charts">',
        *figures,
        "</div>",
        "<h2>What was run</h2>",
        f"<dl>{''.join(listed)}</dl>",
    ]
    return charts.page("Torque-aware momentum: demo", "\n".join(body))


def run(seeds: int, epochs: int, out: Path) -> None:
    """Trains, prints the table and writes the page."""
    begin = time.perf_counter()
    results = compare(seeds, epochs, Console(stderr=True))
    seconds = time.perf_counter() - begin
    out.write_text(report(results, seeds, epochs, seconds), encoding="utf-8")
    print_table(results, seeds, epochs)
