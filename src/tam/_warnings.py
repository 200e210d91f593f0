"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings

# Frames of this library, torch, and frameworks that call the step for the user.
_PASSED_OVER = ("tam.", "torch.", "accelerate.", "lightning.", "transformers.")


def warn_user(message: str) -> None:
    """Warn with the location of the first caller outside of this library, torch and training frameworks."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED_OVER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
