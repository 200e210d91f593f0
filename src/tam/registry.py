"""One record per optimizer: what tests, command line and docs know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from tam.optimizers import TAM, AdaTAM, AdaTAMW, AngularGrad

_IMAGES = (0.1, 0.01, 0.001, 0.0001)  # the paper's grid for image classification
_TEXT = (5e-6, 1e-5, 5e-5)  # the paper's grid for fine-tuning language models
_PAPERS = (("bias_correction", False),)  # said aloud: the grids reach into Adam's lrs


@dataclass(frozen=True)
class Record:
    """An optimizer as the paper uses it."""

    name: str  # as on the command line
    title: str  # as in the paper
    cls: type[Optimizer]
    lr: float | None  # the paper's best on CIFAR-10 with ResNet18; None where it states none
    lr_grid: tuple[float, ...]
    options: tuple[tuple[str, Any], ...] = ()  # the paper's, where not the class's

    @property
    def has_alignment(self) -> bool:
        return hasattr(self.cls, "alignment")

    def create(self, params: Any, **options: Any) -> Optimizer:
        """The optimizer with the paper's options, those given here first."""
        lr = options.pop("lr", self.lr)
        if lr is None:
            raise ValueError(f"{self.name}: the paper states no lr but a grid, {self.lr_grid}: give one")
        given: dict[str, Any] = {"lr": lr, **dict(self.options), **options}
        return self.cls(params, **given)


OPTIMIZERS: Mapping[str, Record] = MappingProxyType(
    {
        record.name: record
        for record in (
            Record("sgd", "SGD", torch.optim.SGD, 0.1, _IMAGES),
            Record("sgdm", "SGDM", torch.optim.SGD, 0.1, _IMAGES, (("momentum", 0.9),)),
            Record("tam", "TAM", TAM, 0.2, (0.2, 0.02, 0.002, 0.0002)),
            Record("adam", "Adam", torch.optim.Adam, 0.001, _IMAGES),
            Record("adamw", "AdamW", torch.optim.AdamW, None, _TEXT),
            Record("angulargrad", "AngularGrad", AngularGrad, 0.001, _IMAGES),
            Record("adatam", "AdaTAM", AdaTAM, 0.0001, _IMAGES, _PAPERS),
            Record("adatamw", "AdaTAMW", AdaTAMW, None, _TEXT, _PAPERS),
        )
    }
)


def get(name: str) -> Record:
    """The record of this name."""
    name = name.lower()
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r}: must be one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
