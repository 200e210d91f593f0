"""Optimizers inside optimizers: a Warmup, and the wrappers of accelerate, Lightning and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer


def layers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer and what it wraps, from outside to inside."""
    yield optimizer
    while isinstance(optimizer := getattr(optimizer, "optimizer", None), Optimizer):
        yield optimizer


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers."""
    return list(layers(optimizer))[-1]
