"""Controls: TAM with its d replaced by that of another trial: by its mean, in shuffled order, or in order.

A trial that has an alignment leaves s of all its steps in `alignment.pt`; a control reads it there. With
"mean" and "shuffled" the other trial is the same variant with the same seed, with "another" the same variant
with another seed: a schedule of d without feedback.
"""

from __future__ import annotations

import bz2
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam import registry
from tam.lab.store import LabError, TrialFolder
from tam.optimizers.base import make_state
from tam.optimizers.torque import TorqueOptimizer
from tam.switching.warmup import Warmup

FILE = "alignment.pt"
HOW = ("mean", "shuffled", "another", "same")  # the last checks that the replacement itself changes nothing
LEVELS = 128  # between s = 0 and s = 1, where s is kept in 8 bits


class Damped(Protocol):
    """The part of a trial's config that speaks of it."""

    @property
    def optimizer(self) -> str: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def seed(self) -> int: ...
    @property
    def damping(self) -> str | None: ...
    @property
    def damping_of(self) -> str | None: ...


def check_damping(config: Damped) -> None:
    """Raises where d cannot be replaced."""
    if (config.damping is None) != (config.damping_of is None):
        raise ValueError("damping and damping_of go together")
    if config.damping is None:
        return
    if config.damping not in HOW or not registry.get(config.optimizer).has_alignment:
        raise ValueError(
            f"damping={config.damping!r} of {config.optimizer}: must be 'mean', 'shuffled' or 'another', "
            "of an optimizer with d"
        )
    if config.options.get("scope", "global") != "global":
        raise ValueError("damping replaces the one d of scope='global'")


def given_alignment(config: Damped, folder: TrialFolder) -> Tensor | None:
    """s of every step, where another trial's d replaces TAM's own."""
    if config.damping is None:
        return None
    path = folder.path.parent / str(config.damping_of) / FILE
    if not path.exists():
        raise LabError(f"{path} is missing: the trial whose d is to be used has left none")
    s = read_alignment(path)
    if config.damping == "mean":
        return torch.full_like(s, float(s.double().mean()))
    if config.damping == "shuffled":
        return s[torch.randperm(len(s), generator=torch.Generator().manual_seed(config.seed))]
    return s


def read_alignment(path: Path) -> Tensor:
    """Return s of every step that a trial has left."""
    try:
        s: Tensor = torch.load(path, weights_only=True)
        return unpacked_levels(s).float() / LEVELS if s.dtype == torch.uint8 else s
    except Exception as error:  # torch raises whatever its reader meets
        raise LabError(f"{path} is damaged: remove the trial's folder, and it is run again") from error


def check_length(given: Tensor | None, steps: int) -> None:
    """A control needs as many as it has steps."""
    if given is not None and len(given) != steps:
        raise LabError(f"the trial whose d is to be used had {len(given)} steps, not {steps}")


@torch.no_grad()
def replace_alignment(s: list[Tensor], given: Tensor, taken: Tensor) -> None:
    """Before a step: s as given for it. `taken` counts the steps, on the device, so that a graph can."""
    # Not given[taken]: that would wait for the device, and a graph would keep the first value.
    s[0].copy_(given.index_select(0, taken.reshape(1))[0])


def watched(optimizer: Optimizer) -> list[Tensor]:
    """The tensors a step writes s to, before it is taken: a Warmup may drop them with its last step."""
    active = optimizer.optimizer if isinstance(optimizer, Warmup) else optimizer
    if not isinstance(active, TorqueOptimizer):
        return []
    make_state(active)
    return active.segments.alignments()


def keep_alignment(folder: TrialFolder, s: Tensor) -> None:
    """Of all steps; nothing where the optimizer has none."""
    if not s.isnan().any():
        folder.write(FILE, s.clone())


# A trial of `online` has 499,200 steps: 1 MB in 16 bits, for each of hundreds of networks. In steps of 1/128,
# which change d by at most 1/512, and compressed, it is 0.16 MB.


def levels_of(s: Tensor) -> Tensor:
    """Return s rounded to multiples of 1/128, as int8."""
    return (s * LEVELS).round().clamp(-LEVELS, LEVELS - 1).to(torch.int8)


def packed_levels(levels: Tensor) -> Tensor:
    """Return the levels compressed, as bytes: their differences are small. int8 wraps, there and back."""
    steps = torch.diff(levels, prepend=levels.new_zeros(1))
    return torch.frombuffer(bytearray(bz2.compress(steps.numpy().tobytes())), dtype=torch.uint8)


def unpacked_levels(packed: Tensor) -> Tensor:
    """Return the levels that were packed."""
    steps = torch.frombuffer(bytearray(bz2.decompress(packed.numpy().tobytes())), dtype=torch.int8)
    return steps.cumsum(0, dtype=torch.int8)


def keep_levels(folder: TrialFolder, levels: Tensor) -> None:
    """Write s of all steps, in 8 bits and compressed."""
    folder.write(FILE, packed_levels(levels))
