"""The network and the optimizer of a trial."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tam.lab import optimizers
from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.registry import RunOption
from tam.lab.core.store import digest_of
from tam.lab.models import get_model
from tam.switching.warmup import Warmup

DEVICE_OPTIONS = ("lr", "fused", "foreach", "capturable")  # which a loaded checkpoint does not change
TIMM = "timm:"


def make_network(
    name: str, classes: int, seed: int, checkpoint: str | None, device: torch.device
) -> nn.Module:
    """Return the network of a seed, or a pretrained one, channels last on a GPU."""
    torch.manual_seed(seed)
    model = get_model(name).make(classes).to(device)
    if checkpoint is not None:
        load_pretrained(model, checkpoint)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def load_pretrained(model: nn.Module, checkpoint: str) -> None:
    """Load a pretrained network: FILE#DIGEST or timm:NAME. Tensors of another shape (the head) stay new."""
    if checkpoint.startswith(TIMM):
        import timm

        pretrained = timm.create_model(checkpoint.removeprefix(TIMM), pretrained=True).state_dict()
    else:
        path, _, digest = checkpoint.rpartition("#")
        try:
            content = Path(path).read_bytes()
            if digest_of(content) != digest:
                raise LabError(f"the checkpoint {path} is not the one this trial began with")
            pretrained = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise LabError(f"the checkpoint {path} cannot be read: {error}") from error
    own = model.state_dict()
    fitting = {k: v for k, v in pretrained.items() if k in own and own[k].shape == v.shape}
    if 2 * len(fitting) < len(own):
        raise LabError(f"{checkpoint} is of another network: {len(fitting)} of {len(own)} tensors fit")
    model.load_state_dict(fitting, strict=False)


def resolve_checkpoint(checkpoint: str, out: Path, data_folder: Path) -> dict[str, str]:
    """Return the setting of the option --checkpoint: a file with the digest of its content, or timm:NAME."""
    if checkpoint.startswith(TIMM):
        return {"checkpoint": checkpoint}
    path = Path(checkpoint).resolve()
    try:
        return {"checkpoint": f"{path}#{digest_of(path.read_bytes())}"}
    except OSError as error:
        raise LabError(f"the checkpoint {path} cannot be read: {error.strerror}") from error


CHECKPOINT_OPTION = RunOption(
    name="checkpoint", metavar="FILE|timm:NAME", resolve=resolve_checkpoint,
    help="Pretrained weights to start from: a file with a state dict, or a model of timm.",
)  # fmt: skip


def make_optimizer(
    config: TrialConfig, params: Any, lr: float | Tensor, *, captured: bool = False, **more_options: Any
) -> Optimizer:
    """Return the optimizer of a config. With `captured` its steps can be part of a CUDA graph."""
    record, options = optimizers.get(config.optimizer), {**config.options, **more_options}
    if record.name in optimizers.ONLY_IN_POPULATIONS:
        raise LabError(f"{record.name} is an optimizer of populations: a network that trains alone has none")
    if config.damping is not None:
        options["smoothing"] = 1.0  # the step leaves s as the control sets it
    if captured:
        options |= {"fused": True} if issubclass(record.cls, torch.optim.SGD) else {"capturable": True}
    return record.create(params, lr=lr, **options)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a copy of a checkpoint's state, but keep the options of this device and the lr a graph reads.

    torch's optimizers adopt the tensors of a state: two that load the same one would share them.
    """
    keys = ("lr",) if isinstance(optimizer, Warmup) else DEVICE_OPTIONS
    options_by_group = [{k: group[k] for k in keys if k in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(copy.deepcopy(state))
    for group, options in zip(optimizer.param_groups, options_by_group, strict=True):
        group |= options
