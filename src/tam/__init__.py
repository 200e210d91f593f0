"""Torque-aware momentum: TAM, AdaTAM and AdaTAMW for PyTorch."""

from tam import functional, kernels, reference, registry
from tam._version import __version__
from tam.hand_over import explain_handover, handover
from tam.optimizers import TAM, AdaTAM, AdaTAMW, AngularGrad
from tam.transfer import transfer_lr
from tam.warmup import Warmup

__all__ = [
    "TAM",
    "AdaTAM",
    "AdaTAMW",
    "AngularGrad",
    "Warmup",
    "__version__",
    "explain_handover",
    "functional",
    "handover",
    "kernels",
    "reference",
    "registry",
    "transfer_lr",
]
