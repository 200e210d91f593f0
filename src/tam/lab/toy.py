"""The paper's two illustrations, computed: momenta along a given trajectory, their size against the angle.

The surfaces have two dimensions and a narrow valley; gradients are noisy. A trial is one trajectory of an
optimizer; for one seed all optimizers meet the same noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tam import registry
from tam.lab.damping import (
    check_damping,
    check_length,
    given_alignment,
    keep_alignment,
    replace_alignment,
    watched,
)
from tam.lab.making import make_optimizer
from tam.lab.store import TrialFolder
from tam.lab.trial import Progress, told
from tam.optimizers.torque import TorqueOptimizer


def ravine(x: Tensor) -> Tensor:
    """A quadratic, 100 times steeper across than along, turned by 30 degrees."""
    c, s = math.cos(math.pi / 6), math.sin(math.pi / 6)
    along, across = c * x[0] + s * x[1], -s * x[0] + c * x[1]
    return 0.005 * along.square() + 0.5 * across.square()


def banana(x: Tensor) -> Tensor:
    """Rosenbrock's valley, which bends, at a hundredth of its height."""
    return 0.01 * ((1 - x[0]).square() + 20 * (x[1] - x[0].square()).square())


SURFACES: Mapping[str, tuple[Callable[[Tensor], Tensor], tuple[float, float]]] = {
    "ravine": (ravine, (-8.0, 1.0)),  # and where to start
    "banana": (banana, (-1.2, 1.0)),
}


@dataclass(frozen=True)
class Config:
    """All that determines a trial."""

    surface: str
    optimizer: str
    lr: float
    seed: int
    epochs: int  # steps
    noise: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)
    damping: str | None = None  # d replaced: "mean" or "shuffled" of another trial's
    damping_of: str | None = None  # that trial's key
    test: bool = False  # there is nothing to test on

    def __post_init__(self) -> None:
        registry.get(self.optimizer)
        if self.surface not in SURFACES:
            raise ValueError(f"surface={self.surface!r}: must be one of {', '.join(SURFACES)}")
        check_damping(self)


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**options))


def walk(
    config: Config, given: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, float, torch.optim.Optimizer]]:
    """Place, noisy gradient, loss and optimizer after each step; with another run's s, where it is given."""
    surface, start = SURFACES[config.surface]
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = make_optimizer(config, [x], config.lr)
    for i in range(config.epochs):
        (slope,) = torch.autograd.grad(surface(x), x)
        x.grad = slope + config.noise * torch.randn(2, generator=generator, dtype=torch.float64)
        if given is not None:
            replace_alignment(watched(optimizer), given, torch.tensor(i))
        optimizer.step()
        with torch.no_grad():
            yield x.detach().clone(), x.grad.clone(), float(surface(x)), optimizer


def run(
    config: dict[str, Any],
    folder: TrialFolder,
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress]:
    """A trajectory; it takes no time, so that a killed one begins anew."""
    begin, settings, losses = time.monotonic(), Config(**config), []
    folder.load(device)  # no checkpoint, but the metrics of a try before this one
    alignments = []
    given = given_alignment(settings, folder)
    check_length(given, settings.epochs)
    for i, (x, gradient, loss, optimizer) in enumerate(walk(settings, given)):
        losses.append(loss)
        row = {
            "epoch": i + 1,
            "loss": loss,
            "grad_norm": float(gradient.norm()),
            "x": float(x[0]),
            "y": float(x[1]),
        }
        if isinstance(optimizer, TorqueOptimizer):
            row["alignment"] = float(optimizer.alignment)
        alignments.append(row.get("alignment", math.nan))
        folder.log(row)
        yield Progress(i + 1, settings.epochs, row)
    keep_alignment(folder, torch.tensor(alignments, dtype=torch.float64))
    tail = losses[-max(1, len(losses) // 10) :]
    final = sum(tail) / len(tail)
    result = {"final": final, "diverged": not math.isfinite(final), "epochs": settings.epochs}
    folder.finish(result, time.monotonic() - begin, device)


# ---------------------------------------------------------------------- the paper's figures


def along_a_trajectory(surface: str, steps: int = 60, seed: int = 0) -> dict[str, list[Tensor]]:
    """The momenta SGDM and TAM would have along one SGD trajectory, TAM's twice: at SGDM's effective lr.

    They are of the real optimizers, which are shown the trajectory's gradients one after the other.
    """
    trajectory = list(walk(Config(surface, "sgd", lr=0.5, seed=seed, epochs=steps)))
    found: dict[str, list[Tensor]] = {"trajectory": [x for x, *_ in trajectory]}
    for name, factor in (("sgdm", 1.0), ("tam", 2.0)):
        p = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimizer = registry.get(name).create([p], lr=0.0)
        found[name] = []
        for _, gradient, *_ in trajectory:
            p.grad = gradient.clone()
            optimizer.step()
            found[name].append(factor * optimizer.state[p]["momentum_buffer"])
    return found


def turns(momenta: list[Tensor]) -> list[float]:
    """The angle between each momentum and the one before it, in degrees."""
    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairwise(momenta)]
    return [math.degrees(math.acos(max(-1.0, min(1.0, cosine)))) for cosine in cosines]


def size_by_angle(name: str, angles: list[float], beta: float = 0.9) -> list[float]:
    """|m| after a gradient of length 1 at this angle to a momentum of length 1, s being the cosine itself."""
    sizes = []
    for angle in angles:
        p = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        more = {"smoothing": 0.0} if name == "tam" else {}
        optimizer = registry.get(name).create([p], lr=0.0, momentum=beta, **more)
        p.grad = torch.zeros(2, dtype=torch.float64)
        optimizer.step()
        optimizer.state[p]["momentum_buffer"].copy_(torch.tensor([1.0, 0.0]))
        radians = math.radians(angle)
        p.grad = torch.tensor([math.cos(radians), math.sin(radians)], dtype=torch.float64)
        optimizer.step()
        sizes.append(float(optimizer.state[p]["momentum_buffer"].norm()))
    return sizes
