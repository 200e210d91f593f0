"""Names of things in error messages."""

from __future__ import annotations

from torch.optim import Optimizer


def describe_parameter(optimizer: Optimizer, i: int, j: int) -> str:
    """Return how messages call parameter j of group i."""
    group = optimizer.param_groups[i]
    shape = tuple(group["params"][j].shape)
    name = f" {group['param_names'][j]!r}" if "param_names" in group else ""
    return f"parameter {j}{name} of group {i} (shape {shape})"
