"""Torque-aware momentum: TAM, AdaTAM and AdaTAMW for PyTorch."""

from tam import functional, kernels, reference, registry
from tam._version import __version__
from tam.optimizers import TAM, AdaTAM, AdaTAMW, AngularGrad

__all__ = [
    "TAM",
    "AdaTAM",
    "AdaTAMW",
    "AngularGrad",
    "__version__",
    "functional",
    "kernels",
    "reference",
    "registry",
]
