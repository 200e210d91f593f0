"""The machine a trial runs on."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tam._version import __version__


@cache
def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return hardware and versions, as results store them."""
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "tam": __version__, "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip


def count_cores() -> int:
    """Return the number of cores this process may use. Where the system does not tell, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
