"""The paper's two illustrations, computed: momenta along a trajectory, and their size by the angle.

The surfaces have two dimensions and a narrow valley. Gradients are noisy. A trial is one trajectory of an
optimizer. All optimizers of a seed meet the same noise.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from tam import registry
from tam.lab.core.config import TrialConfig
from tam.lab.core.store import TrialFolder
from tam.lab.training.damping_control import load_source_alignment
from tam.lab.training.factory import make_optimizer
from tam.lab.training.loop import Progress, StepRecorder

CPU = torch.device("cpu")


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


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    unit: ClassVar[str] = "step"
    surface: str
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.surface not in SURFACES:
            raise ValueError(f"surface={self.surface!r}: must be one of {', '.join(SURFACES)}")


def walk(config: Config, recorder: StepRecorder | None = None) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield the position, the noisy gradient and the loss after each step."""
    surface, start = SURFACES[config.surface]
    recorder = recorder or StepRecorder(config.epochs, CPU, dtype=torch.float64)
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = make_optimizer(config, [x], config.lr)
    for _ in range(config.epochs):
        (slope,) = torch.autograd.grad(surface(x), x)
        x.grad = slope + config.noise * torch.randn(2, generator=generator, dtype=torch.float64)
        recorder.step(optimizer)
        with torch.no_grad():
            yield x.detach().clone(), x.grad.clone(), float(surface(x))


def run(
    config: Config, folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float = 60.0
) -> Iterator[Progress]:
    """Follow a trajectory. It takes so little time that one that was killed starts again."""
    start, losses = time.monotonic(), []
    folder.load(device)  # there is no checkpoint, but metrics of an earlier attempt
    source = load_source_alignment(config, folder)
    recorder = StepRecorder(config.epochs, CPU, source, source_name=config.damping_of, dtype=torch.float64)
    for i, (x, gradient, loss) in enumerate(walk(config, recorder)):
        losses.append(loss)
        row = {"epoch": i + 1, "loss": loss, "grad_norm": float(gradient.norm())}
        row |= {"x": float(x[0]), "y": float(x[1])}
        if not recorder.alignment[i].isnan():
            row["alignment"] = float(recorder.alignment[i])
        folder.log(row)
        yield Progress(i + 1, config.epochs, row)
    recorder.write_alignment(folder)
    tail = losses[-max(1, len(losses) // 10) :]
    final = sum(tail) / len(tail)
    result = {"final": final, "diverged": not math.isfinite(final), "epochs": config.epochs}
    folder.finish(result, time.monotonic() - start, device)


def momenta_along_trajectory(surface: str, steps: int = 60, seed: int = 0) -> dict[str, list[Tensor]]:
    """Return an SGD trajectory, and the momenta of SGDM and TAM along it.

    The real optimizers get the trajectory's gradients one after the other. TAM's momenta are doubled: at
    SGDM's effective lr.
    """
    trajectory = list(walk(Config(surface=surface, optimizer="sgd", lr=0.5, seed=seed, epochs=steps)))
    paths: dict[str, list[Tensor]] = {"trajectory": [x for x, *_ in trajectory]}
    for name, factor in (("sgdm", 1.0), ("tam", 2.0)):
        p = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        optimizer = registry.get(name).create([p], lr=0.0)
        paths[name] = []
        for _, gradient, _ in trajectory:
            p.grad = gradient.clone()
            optimizer.step()
            paths[name].append(factor * optimizer.state[p]["momentum_buffer"])
    return paths


def turning_angles(momenta: list[Tensor]) -> list[float]:
    """Return the angle between each momentum and the one before it, in degrees."""
    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in pairwise(momenta)]
    return [math.degrees(math.acos(max(-1.0, min(1.0, cosine)))) for cosine in cosines]


def size_by_angle(name: str, angles: list[float]) -> list[float]:
    """Return |m| after a gradient of length 1 at each angle to a momentum of length 1, with s = cosine."""
    sizes = []
    for angle in map(math.radians, angles):
        p = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        options = {"smoothing": 0.0} if name == "tam" else {}
        with warnings.catch_warnings():  # one step with lr=0 cannot diverge
            warnings.filterwarnings("ignore", ".* averages the cosine over about", UserWarning)
            optimizer = registry.get(name).create([p], lr=0.0, **options)
        p.grad = torch.zeros(2, dtype=torch.float64)
        optimizer.step()
        optimizer.state[p]["momentum_buffer"].copy_(torch.tensor([1.0, 0.0]))
        p.grad = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        optimizer.step()
        sizes.append(float(optimizer.state[p]["momentum_buffer"].norm()))
    return sizes
