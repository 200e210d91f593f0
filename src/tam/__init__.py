"""Torque-aware momentum: TAM, AdaTAM and AdaTAMW for PyTorch."""

from importlib import import_module
from typing import Any

from tam import functional, kernels, landscape, reference, registry
from tam._version import __version__
from tam.hand_over import explain_handover, handover
from tam.optimizers import TAM, AdaTAM, AdaTAMW, AngularGrad
from tam.recording import Recorder
from tam.transfer import transfer_lr
from tam.warmup import Warmup

__all__ = [
    "TAM",
    "AdaTAM",
    "AdaTAMW",
    "AngularGrad",
    "Recorder",
    "Warmup",
    "__version__",
    "explain_handover",
    "functional",
    "handover",
    "kernels",
    "landscape",
    "reference",
    "registry",
    "transfer_lr",
]


def __getattr__(name: str) -> Any:
    """`tam.optax` and `tam.integrations` are imported when they are asked for."""
    if name in ("integrations", "optax"):
        return import_module(f"tam.{name}")
    raise AttributeError(f"module 'tam' has no attribute {name!r}")
