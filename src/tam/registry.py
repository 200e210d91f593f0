"""The optimizers of the library, and those of torch that the paper compares them with.

The tests and the lab find an optimizer here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from tam.optimizers import TAM, AdaTAM, AdaTAMW, AngularGrad

_IMAGES = (0.1, 0.01, 0.001, 0.0001)  # the paper's grid for image classification
_TEXT = (5e-6, 1e-5, 5e-5)  # the paper's grid for fine-tuning language models
_UNCORRECTED = (("bias_correction", False),)  # said aloud: the grids reach into Adam's lrs


@dataclass(frozen=True)
class OptimizerInfo:
    """An optimizer and its settings in the paper, or in its own paper if this one does not use it.

    Attributes:
        name: its name on the command line
        title: its name in the paper
        cls: its class
        lr: the paper's best lr on CIFAR-10 with ResNet18; None if the paper states none
        lr_grid: the paper's grid of learning rates
        options: the paper's options, where they are not the defaults of the class
    """

    name: str
    title: str
    cls: type[Optimizer]
    lr: float | None
    lr_grid: tuple[float, ...]
    options: tuple[tuple[str, float | bool], ...] = ()

    @property
    def has_alignment(self) -> bool:
        """True for an optimizer that smooths a cosine: TAM, AdaTAM and AdaTAMW."""
        return hasattr(self.cls, "alignment")

    def create(self, params: ParamsT, **options: object) -> Optimizer:
        """Return the optimizer with the paper's options.

        Args:
            params: parameters, named parameters or groups of either
            options: options in place of the paper's, `lr` among them

        Raises:
            ValueError: if the paper states no lr and none is given
        """
        lr = options.pop("lr", self.lr)
        if lr is None:
            raise ValueError(f"{self.name}: the paper states no lr but a grid, {self.lr_grid}: give one")
        return self.cls(params, **{"lr": lr, **dict(self.options), **options})  # type: ignore[arg-type]


OPTIMIZERS: Mapping[str, OptimizerInfo] = MappingProxyType(
    {
        info.name: info
        for info in (
            OptimizerInfo("sgd", "SGD", torch.optim.SGD, 0.1, _IMAGES),
            OptimizerInfo("sgdm", "SGDM", torch.optim.SGD, 0.1, _IMAGES, (("momentum", 0.9),)),
            OptimizerInfo("tam", "TAM", TAM, 0.2, (0.2, 0.02, 0.002, 0.0002)),
            OptimizerInfo("adam", "Adam", torch.optim.Adam, 0.001, _IMAGES),
            OptimizerInfo("adamw", "AdamW", torch.optim.AdamW, None, _TEXT),
            OptimizerInfo("angulargrad", "AngularGrad", AngularGrad, 0.001, _IMAGES),
            OptimizerInfo("adatam", "AdaTAM", AdaTAM, 0.0001, _IMAGES, _UNCORRECTED),
            OptimizerInfo("adatamw", "AdaTAMW", AdaTAMW, None, _TEXT, _UNCORRECTED),
        )
    }
)


def get(name: str) -> OptimizerInfo:
    """Return the optimizer of this name.

    Args:
        name: a key of `OPTIMIZERS`, in upper or lower case

    Raises:
        ValueError: if there is none of this name

    Examples:
        >>> import tam
        >>> tam.registry.get("tam").lr
        0.2
    """
    name = name.lower()
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r}: must be one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
