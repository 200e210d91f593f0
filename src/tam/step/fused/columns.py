"""The columns of the tables that the fused kernels read, in Triton and in C."""

from __future__ import annotations

from enum import IntEnum


class Row(IntEnum):
    """What is known of a tensor (int64)."""

    THETA = 0  # addresses
    MOMENTUM = 1
    SECOND = 2
    STEP = 3
    NUMEL = 4
    SHARE = 5  # of its segment: see tam.sharding.Exchange. Without other ranks a segment has one
    SEGMENT = 6
    GROUP = 7
    KIND = 8  # of number: see KINDS


class Segment(IntEnum):
    """What is known of a segment (int64)."""

    FIRST = 0  # its first share, and how many there are
    COUNT = 1
    ALIGNMENT = 2  # address of s
    WIDE = 3  # whether s is float64


class Option(IntEnum):
    """The options of a parameter group (float64), and behind them the optimizer's."""

    LR = 0
    BETA1 = 1
    BETA2 = 2
    EPS = 3
    FLOOR = 4
    DECAY = 5
    SIGN = 6  # -1 to maximize
    SMOOTHING = 7
    MAX_NORM = 8
    GAIN = 9


# Besides there is a table of the gradients (int64): the address of each row's, 0 where it has none,
# and behind them for each share whether any of its rows has one.

KINDS = ("float32", "bfloat16", "float16", "float64")
