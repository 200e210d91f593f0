"""What trials of all kinds share: how far one is, and what it was run with."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tam import registry


@dataclass(frozen=True)
class Progress:
    """Where a trial stands."""

    epoch: int
    epochs: int
    metrics: dict[str, Any]


def told(config: Any) -> dict[str, Any]:
    """A config as JSON has it: one form of what is the same, without what is the default."""
    given, defaults = asdict(config), {f.name: f.default for f in fields(config)}
    record = registry.get(given["optimizer"])
    given |= {"lr": float(given["lr"]), "optimizer": record.name}
    usual = {k: p.default for k, p in inspect.signature(record.cls).parameters.items()} | dict(record.options)
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in given["options"].items()}
    usual = {k: list(v) if isinstance(v, tuple) else v for k, v in usual.items()}
    given["options"] = {k: v for k, v in options.items() if k not in usual or usual[k] != v}
    return {k: v for k, v in given.items() if v != defaults[k] and v != {}}


def resolved(config: Any, optimizer: Optimizer) -> dict[str, Any]:
    """All that a trial was run with, defaults too."""
    group = optimizer.param_groups[0]
    options = {k: v for k, v in group.items() if k not in ("params", "lr") and not isinstance(v, Tensor)}
    return {**asdict(config), "options": options}
