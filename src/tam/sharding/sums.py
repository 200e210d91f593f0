"""The columns of a step's sums. setup.py reads this file without the package, so it must not import torch."""

from __future__ import annotations

from enum import IntEnum


class Sum(IntEnum):
    """The columns of the sums, one row per share. Their last row is for all parameters together.

    The sums before `PRESENT` are measured, and `PRESENT` is the last column.
    """

    DOT = 0  # <m, g>; in the last row: 1 if GradScaler found a gradient that is not finite
    MM = 1  # |m|^2
    GG = 2  # |g|^2
    PRESENT = 3  # above 0 if any parameter has a gradient


FOUND_INF = Sum.DOT  # of the last row
