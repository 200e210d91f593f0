"""From dicts, lists and tuples of tensors to lists, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

from torch import Tensor

Tensors = Mapping[str, Tensor] | Sequence[Tensor]  # a dict, list or tuple of tensors
T = TypeVar("T", bound=Tensors)


def by_name(tensors: Tensors) -> dict[object, Tensor]:
    """Return the tensors by name, those of a list or tuple by index."""
    named: Iterable[tuple[object, Tensor]]
    named = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    return dict(named)


def as_list(tensors: Tensors) -> list[Tensor]:
    """Return the tensors in their order. Raise if there are none, or they have another form."""
    if not isinstance(tensors, (Mapping, list, tuple)) or not tensors:
        raise TypeError(
            f"expected a dict, list or tuple of tensors with something in it, got {type(tensors)}"
        )
    return list(by_name(tensors).values())


def in_form_of(params: T, tensors: list[Tensor]) -> T:
    """Return the tensors in the form of `params`."""
    if isinstance(params, Mapping):
        return cast("T", dict(zip(params, tensors, strict=True)))
    return cast("T", tuple(tensors) if isinstance(params, tuple) else tensors)


def column_of(params: Tensors, tensors: Tensors, what: str) -> list[Tensor]:
    """Return the tensors in the order of the parameters."""
    if len(tensors) != len(params):
        raise ValueError(f"{len(params)} parameters, but {len(tensors)} of {what}")
    named, column = by_name(tensors), []
    for name, p in by_name(params).items():
        if name not in named:
            raise ValueError(f"parameter {name!r} has no {what}; there are {list(named)[:5]}")
        x = named[name]
        if not isinstance(x, Tensor) or x.shape != p.shape:
            shape = tuple(x.shape) if isinstance(x, Tensor) else x
            raise ValueError(f"parameter {name!r} has shape {tuple(p.shape)}, its {what} {shape}")
        column.append(x)
    return column
