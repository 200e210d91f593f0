"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings


def warn_user(message: str) -> None:
    """Warn with the location of the first caller outside of this library and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("tam.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
