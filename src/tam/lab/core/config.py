"""The configuration of a trial: everything that determines it, its canonical form and its key.

The canonical form leaves out defaults, so a new field with a default does not rename stored trials. The key
is a hash of the canonical form and names the trial's folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from tam.lab import optimizers
from tam.lab.core.toml import read_toml

DAMPING_CONTROLS = ("mean", "shuffled", "another", "same")  # the last one checks the replacement itself
# The option values that a key leaves out, by optimizer.
CANONICAL_DEFAULTS = read_toml(Path(__file__).with_name("canonical_defaults.toml"))


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """What every trial has. An experiment adds its own fields in a subclass.

    `options` are the optimizer's besides lr. `damping` and `damping_of` make a control: d is replaced by that
    of the trial with this key.
    """

    unit: ClassVar[str] = "epoch"  # what `epochs` counts: steps, tasks, rounds ...
    always_stored: ClassVar[frozenset[str]] = frozenset()  # fields that are part of the key at any value

    optimizer: str  # its name in tam.registry
    lr: float
    seed: int
    epochs: int
    options: dict[str, Any] = field(default_factory=dict)
    damping: str | None = None
    damping_of: str | None = None
    test: bool = False  # whether test data is read, once, at the end

    def __post_init__(self) -> None:
        info = optimizers.get(self.optimizer)
        if (self.damping is None) != (self.damping_of is None):
            raise ValueError("damping and damping_of must be given together")
        if self.damping is None:
            return
        if self.damping not in DAMPING_CONTROLS or not info.has_alignment:
            raise ValueError(
                f"damping={self.damping!r} of {self.optimizer}: must be 'mean', 'shuffled' or 'another', "
                "and the optimizer must have a damping"
            )

    @cached_property
    def canonical(self) -> dict[str, Any]:
        """The form that is stored and hashed: normalized values, no defaults."""
        defaults = {f.name: f.default for f in fields(self)}
        name = optimizers.get(self.optimizer).name
        fixed = CANONICAL_DEFAULTS.get(name, {})
        written = {
            k: list(v) if isinstance(v, tuple) else v for k, v in self.options.items() if v is not None
        }
        options = {k: v for k, v in written.items() if k not in fixed or v != fixed[k]}
        values = {**asdict(self), "lr": float(self.lr), "optimizer": name, "options": options}
        return {k: v for k, v in values.items() if k in self.always_stored or (v != defaults[k] and v != {})}

    @cached_property
    def key(self) -> str:
        """The name of the trial's folder."""
        return trial_key(self.canonical)


def trial_key(canonical: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()[:12]


def effective_settings(config: TrialConfig, optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole configuration, with the optimizer's defaults. Call it before training.

    A warm-up replaces its optimizer on the way: afterwards its groups hold the second one's options.
    """
    group = optimizer.param_groups[0]
    options = {k: v for k, v in group.items() if k not in ("params", "lr") and not isinstance(v, Tensor)}
    return {**asdict(config), "options": options}
