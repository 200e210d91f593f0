"""What a result was found on."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tam._version import __version__


@cache
def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions."""
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "tam": __version__, "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip


def cores() -> int:
    """Those this process may use; where the system does not tell, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
