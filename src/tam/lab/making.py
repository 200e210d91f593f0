"""The network and the optimizer of a trial, with what a seed, a control and a CUDA graph need."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tam import registry
from tam.lab.damping import Damped
from tam.lab.models import get_model
from tam.lab.store import LabError, digest_of
from tam.switching.warmup import Warmup

OF_THE_DEVICE = ("lr", "fused", "foreach", "capturable")  # options that are not a checkpoint's


class Seeded(Protocol):
    """The part of a trial's config that speaks of its network."""

    @property
    def model(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def checkpoint(self) -> str | None: ...


def make_network(config: Seeded, classes: int, device: torch.device) -> tuple[nn.Module, torch.dtype]:
    """A seed's network, and what it computes in: bfloat16 on a GPU, where its images lie channels last."""
    torch.manual_seed(config.seed)
    model = get_model(config.model).make(classes).to(device)
    if config.checkpoint is not None:
        begin_from(model, config.checkpoint)
    if device.type != "cuda":
        return model, torch.float32
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, torch.bfloat16


def begin_from(model: nn.Module, source: str) -> None:
    """Loads a pretrained network; what has another shape (its head) stays new."""
    if source.startswith("timm:"):
        import timm

        found = timm.create_model(source.removeprefix("timm:"), pretrained=True).state_dict()
    else:
        path, _, digest = source.rpartition("#")
        try:
            content = Path(path).read_bytes()
            if digest_of(content) != digest:
                raise LabError(f"the checkpoint {path} is not the one this trial began with")
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise LabError(f"the checkpoint {path} cannot be read: {error}") from error
    own = model.state_dict()
    fitting = {k: v for k, v in found.items() if k in own and own[k].shape == v.shape}
    if 2 * len(fitting) < len(own):
        raise LabError(f"{source} is of another network: {len(fitting)} of {len(own)} tensors fit")
    model.load_state_dict(fitting, strict=False)


def make_optimizer(
    config: Damped, params: Any, lr: float | Tensor, graphed: bool = False, **more: Any
) -> Optimizer:
    """The optimizer a config asks for, with more options; `graphed`: its steps are to be captured."""
    record, options = registry.get(config.optimizer), {**config.options, **more}
    if config.damping is not None:
        options["smoothing"] = 1.0  # s stays what it is told to be
    if graphed:
        options |= {"fused": True} if issubclass(record.cls, torch.optim.SGD) else {"capturable": True}
    return record.create(params, lr=lr, **options)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads a copy of a checkpoint's state; what belongs to the device, and the lr a graph reads, stay.

    torch's optimizers take the tensors they are given as their own: two that load one state would share it.
    """
    keys = ("lr",) if isinstance(optimizer, Warmup) else OF_THE_DEVICE
    own = [{k: group[k] for k in keys if k in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(copy.deepcopy(state))
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group |= kept
