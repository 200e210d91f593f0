"""What a result was found on."""

from __future__ import annotations

import platform
from typing import Any

import torch

from tam._version import __version__


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "hardware": name, "tam": __version__, "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
