"""The optimizer of a trial: as the registry makes it, with what a control and a CUDA graph need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam import registry
from tam.lab.damping import Damped
from tam.warmup import Warmup

OF_THE_DEVICE = ("lr", "fused", "foreach", "capturable")  # options that are not a checkpoint's


def make_optimizer(config: Damped, params: Any, lr: float | Tensor, graphed: bool = False) -> Optimizer:
    """The optimizer a config asks for; `graphed`: its steps are to be captured."""
    record, options = registry.get(config.optimizer), dict(config.options)
    if config.damping is not None:
        options["smoothing"] = 1.0  # s stays what it is told to be
    if graphed:
        options |= {"fused": True} if issubclass(record.cls, torch.optim.SGD) else {"capturable": True}
    return record.create(params, lr=lr, **options)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads a checkpoint's state; what belongs to the device, and the lr a graph reads, stay as they are."""
    keys = ("lr",) if isinstance(optimizer, Warmup) else OF_THE_DEVICE
    own = [{k: group[k] for k in keys if k in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group |= kept
