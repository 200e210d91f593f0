"""How far a settled step goes, and the learning rate that keeps it when the optimizer changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from tam.optimizers import TAM, AdaTAM
from tam.options import below_one, learning_rate
from tam.step.rule import damping_of

LR = TypeVar("LR", float, Tensor)

NEGLIGIBLE = 1e-6  # a floor the paper's equation leaves out ("epsilon << 1")


def transfer_lr(
    lr: LR, *, momentum: float = 0.9, to_momentum: float | None = None, alignment: float = 0.0
) -> LR:
    r"""SGDM's tuned learning rate as TAM's (the paper's section on learning rate transfer).

    .. math:: \eta_{TAM} = \frac{2 (1 - \beta_{TAM})}{(1 + s^*) (1 - \beta_{SGDM})} \eta_{SGDM}

    Adam's momentum is an average, so that its effective lr is lr itself, as SGD's without momentum:
    `transfer_lr(lr, momentum=0.0, to_momentum=0.9)` is Adam's lr as AdaTAM's. Divide AdamW's weight
    decay by the same factor: the decay of a step is lr times lambda.

    Args:
        lr: SGDM's learning rate, a float or a tensor
        momentum: SGDM's momentum
        to_momentum: TAM's momentum, where it differs
        alignment: s*, the value s settles at; near 0 in the paper

    Example:
        >>> import tam
        >>> tam.transfer_lr(0.1)
        0.2
    """
    to_momentum = momentum if to_momentum is None else to_momentum
    learning_rate("lr", lr)
    below_one("momentum", momentum)
    below_one("to_momentum", to_momentum)
    alignment = check_alignment(alignment)
    return lr * (2 * (1 - to_momentum) / ((1 + alignment) * (1 - momentum)))


def check_alignment(alignment: Any) -> float:
    """Return s* as a number. It must leave gradients some weight, and is not read from a device."""
    value = alignment
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 < value <= 1:
        raise ValueError(f"alignment must be a number in (-1, 1] or a CPU tensor of one, got {alignment!r}")
    return float(value)


def family(cls: type[Optimizer]) -> str | None:
    """Which optimizers share a meaning of lr and buffers: "sgd", "adam", or None for all others."""
    if issubclass(cls, (SGD, TAM)):
        return "sgd"
    return "adam" if issubclass(cls, (Adam, AdamW, AdaTAM)) else None


def settled_step(cls: type[Optimizer], group: Mapping[str, Any], alignment: Any = 0.0) -> Any:
    """Return the settled step in units of lr: times the gradient ("sgd") or the normalised one ("adam").

    lr times this is the effective learning rate. `alignment` is s, a number or a tensor.
    """
    weight: Any = 1.0
    if issubclass(cls, (TAM, AdaTAM)):
        weight = damping_of(alignment, group.get("gain", 1.0))
        if group["floor"] > NEGLIGIBLE:
            weight = weight + group["floor"]
    if family(cls) == "sgd":
        return weight / (1 - group["momentum"])
    if issubclass(cls, AdaTAM) and not group["ema"]:
        return weight / (1 - group["betas"][0])
    return 1.0  # the momentum is an average


def settled_steps(
    before: tuple[type[Optimizer], Mapping[str, Any]],
    after: tuple[type[Optimizer], Mapping[str, Any]],
    alignment: float,
) -> tuple[float, float]:
    """Return the settled steps of a group before and after; raise if one is 0, which has no ratio."""
    steps = []
    for cls, group in (before, after):
        steps.append(settled_step(cls, group, alignment))
        if steps[-1] == 0:
            raise ValueError(
                f"alignment={alignment:g} with gain={group['gain']:g} gives {cls.__name__} d = 0, no step: "
                "gain times alignment must be above -1"
            )
    return steps[0], steps[1]
