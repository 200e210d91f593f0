"""How far a settled step goes, and the learning rate that keeps it when the optimizer changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from tam.options import below_one, learning_rate
from tam.step.rule import damping_of

LR = TypeVar("LR", float, Tensor)
LRFamily = Literal["sgd", "adam"]
ParamGroup = dict[str, Any]  # as in `optimizer.param_groups`
GroupOfClass = tuple[type[Optimizer], ParamGroup]  # a group, and the class of its optimizer

NEGLIGIBLE = 1e-6  # a floor the paper's equation leaves out ("epsilon << 1")

# What torch's classes lack: our optimizers have the class attributes `lr_family` and `decoupled`.
_TORCH_FAMILIES: dict[type[Optimizer], LRFamily] = {SGD: "sgd", Adam: "adam", AdamW: "adam"}


def transfer_lr(
    lr: LR, *, momentum: float = 0.9, to_momentum: float | None = None, alignment: float | Tensor = 0.0
) -> LR:
    r"""Convert a learning rate tuned for SGD with momentum into one for TAM.

    This is the rule of the paper's section on learning rate transfer:

    $$
    \eta_\mathrm{TAM} = \frac{2 (1 - \beta_\mathrm{TAM})}{(1 + s^*) (1 - \beta_\mathrm{SGDM})}
    \eta_\mathrm{SGDM}
    $$

    Adam's momentum is an average, so its effective lr is lr itself, like that of SGD without momentum:
    `transfer_lr(lr, momentum=0.0, to_momentum=0.9)` converts Adam's lr into AdaTAM's. Divide AdamW's weight
    decay by the same factor: one step decays by lr times $\lambda$.

    Args:
        lr: SGD's learning rate, a float or a tensor
        momentum: SGD's momentum $\beta_\mathrm{SGDM}$
        to_momentum: TAM's momentum $\beta_\mathrm{TAM}$; None means the same as `momentum`
        alignment: $s^*$, the value at which the alignment settles (near 0 in the paper): a number, or a CPU
            tensor with one

    Returns:
        TAM's learning rate, of the same type as `lr`.

    Raises:
        ValueError: if a value is outside its range: momenta in [0, 1), `alignment` in (-1, 1], `lr` >= 0

    Examples:
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


def check_alignment(alignment: float | Tensor) -> float:
    """Return s* as a number. It must leave gradients some weight, and is not read from a device."""
    value = alignment
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 < value <= 1:
        raise ValueError(f"alignment must be a number in (-1, 1] or a CPU tensor of one, got {alignment!r}")
    return float(value)


def family(cls: type[Optimizer]) -> LRFamily | None:
    """Return which optimizers share a meaning of lr and buffers: "sgd", "adam", or None for all others."""
    if is_torque(cls):
        return cls.lr_family  # type: ignore[attr-defined, no-any-return]
    return next((_TORCH_FAMILIES[base] for base in cls.__mro__ if base in _TORCH_FAMILIES), None)


def is_torque(cls: type[Optimizer]) -> bool:
    """Return True for TAM, AdaTAM, AdaTAMW and their subclasses."""
    return hasattr(cls, "lr_family")


def is_decoupled(cls: type[Optimizer], group: Mapping[str, Any]) -> bool:
    """Return True if weight decay is outside the gradient."""
    return bool(getattr(cls, "decoupled", issubclass(cls, AdamW)) or group.get("decoupled_weight_decay"))


def settled_step(cls: type[Optimizer], group: Mapping[str, Any], alignment: float = 0.0) -> float:
    """Return the settled step in units of lr: times the gradient ("sgd") or the normalised one ("adam").

    lr times this is the effective learning rate.
    """
    is_average = not is_torque(cls) or group.get("ema", False)
    if family(cls) != "sgd" and is_average:
        return 1.0
    beta: float = group["momentum"] if family(cls) == "sgd" else group["betas"][0]
    if is_torque(cls):
        weight = damping_of(alignment, group.get("gain", 1.0))
        if group["floor"] > NEGLIGIBLE:
            weight = weight + group["floor"]
    else:  # SGD, which ignores dampening without momentum
        weight = 1 - group.get("dampening", 0.0) if beta else 1.0
    return weight / (1 - beta)


def settled_steps(before: GroupOfClass, after: GroupOfClass, alignment: float) -> tuple[float, float]:
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
