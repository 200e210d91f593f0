"""Torque-aware momentum: TAM, AdaTAM and AdaTAMW for PyTorch."""

from importlib import import_module
from typing import Any

from tam import functional, landscape, reference, registry
from tam._version import __version__
from tam.optimizers import TAM, AdaTAM, AdaTAMW, AngularGrad
from tam.recorder import Recorder
from tam.step.fused.support import available_kernels
from tam.switching import Warmup, explain_handover, handover, transfer_lr

__all__ = [
    "TAM", "AdaTAM", "AdaTAMW", "AngularGrad", "Recorder", "Warmup", "__version__", "available_kernels",
    "explain_handover", "functional", "handover", "landscape", "reference", "registry", "transfer_lr",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `tam.optax`, `tam.integrations` and the alias `tam.distributed` when they are asked for."""
    if name in ("distributed", "integrations", "optax"):
        return import_module(f"tam.{name}")
    if name == "kernels":
        raise AttributeError("tam.kernels was removed: use tam.available_kernels() and optimizer.backend")
    raise AttributeError(f"module 'tam' has no attribute {name!r}")
