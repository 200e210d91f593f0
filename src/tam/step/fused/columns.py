"""The tables that the fused kernels read and write: what they hold, how long they are, who writes them.

The kernels (`cpu.c` in C, `kernels.py` in Triton) know parameters, state and gradients by address only. The
numbers of the columns are defined only here: `kernels.py` imports them, and `setup.py` writes
`columns.h`, the header of `cpu.c`, from them. It loads this file without the package, so nothing here imports
torch.

- A row is one parameter, or this rank's shard of it.
- A segment is the rows that share an alignment.
- A share is the rows of one segment whose shards the same ranks hold (see `tam.sharding.Exchange`). Without
  other ranks, every segment has one share. Rows are ordered by share, and shares by segment.
- A chunk is a part of a row with a fixed number of elements: the work of one thread or program.

`tables.py` writes these tables, the first two once:

- `rows`, int64 [`Row`, rows], and `segments`, int64 [`Segment`, segments].
- `gradients`, int64 [rows + shares], when gradients move: the address of each row's gradient, or 0 if it has
  none. Behind them, for each share, 1 if any of its rows has a gradient, else 0.
- `options`, float64 [groups, `Option`], when an option changes.

The kernels write `sums`, float64 [shares + 1, `Sum`], and the exchange adds those of other ranks. C writes
them at every step, CUDA only if there are other ranks.

CUDA has more tables, which are local variables in C. The host writes the first two once, the kernels write
the others at every step:

- `chunks`, int32 [2, chunks]: the row of each chunk, and which chunk of its row it is. They are ordered by
  row, so the chunks of a share follow each other. An empty row has one chunk, which counts its step.
- `shares`, int64 [`Share`, shares]: the chunks of each share.
- `partial`, float32 [3, chunks]: <m, g>, |m|^2 and |g|^2 of each chunk.
- `scalars`, float64 [2 segments + 1]: d of each segment, |g|^2 of each segment, and the clip factor.
- `counters`, int32 [shares + 1]: how many chunks of each share have been measured, and how many segments have
  settled. They are 0 between steps.
"""

from __future__ import annotations

import zlib
from enum import IntEnum, IntFlag

from tam.sharding.sums import FOUND_INF as FOUND_INF
from tam.sharding.sums import Sum as Sum


class Row(IntEnum):
    """What is known of a row (int64)."""

    THETA = 0  # addresses
    MOMENTUM = 1
    SECOND = 2  # 0 if the optimizer is not adaptive
    STEP = 3  # of the step count, 0 if there is none
    NUMEL = 4  # of real numbers: a complex one counts as two
    SHARE = 5
    SEGMENT = 6
    GROUP = 7
    KIND = 8  # a `Kind`


class Segment(IntEnum):
    """What is known of a segment (int64)."""

    FIRST = 0  # its first share, and how many there are
    COUNT = 1
    ALIGNMENT = 2  # address of s
    WIDE = 3  # 1 if s is float64


class Share(IntEnum):
    """What the CUDA kernels know of a share (int64). It has no chunks if this rank has none of its rows."""

    FIRST_CHUNK = 0
    CHUNK_COUNT = 1


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


class Kind(IntEnum):
    """The kinds of numbers that tensors consist of. CUDA has no float64, C no float16."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT64 = 3


class Flag(IntFlag):
    """The rule of the whole optimizer, for C. In Triton each is an argument that is known at compile time."""

    ADAPTIVE = 1
    DECOUPLED = 2
    EMA = 4
    CORRECT = 8
    CLIP = 16


KINDS = tuple(kind.name.lower() for kind in Kind)

# The arguments of the C functions, in one struct: name and type.
ARGUMENTS = (
    *((name, "const int64_t *") for name in ("rows", "gradients", "segments")),
    ("options", "const double *"), ("sums", "double *"),
    *((name, "int64_t") for name in ("n", "n_shares", "n_segments")),  # n: rows
    ("scale", "double"),  # 1 / grad_scale
    *((name, "int") for name in ("flags", "instruction_set", "threads")),  # flags: a `Flag`
)  # fmt: skip
# The C functions and what they return. Each takes a pointer to that struct.
FUNCTIONS = {"tam_measure": "int", "tam_update": "double", "tam_step_per_tensor": "double"}


def _c_declarations() -> str:
    """Return the enums, the struct of the arguments and the functions in C."""
    lines = [
        f"enum {{ {', '.join(f'{member.name} = {int(member)}' for member in columns)} }};"
        for columns in (Row, Segment, Sum, Option, Kind, Flag)
    ]
    lines.append(f"enum {{ SUMS = {len(Sum)}, OPTIONS = {len(Option)}, KINDS = {len(Kind)} }};")
    lines += ["typedef struct {", *[f"    {kind} {name};" for name, kind in ARGUMENTS], "} tables;"]
    lines += [f"{kind} {name}(const tables *t);" for name, kind in FUNCTIONS.items()]
    return "\n".join(lines) + "\n"


# A kernel that was built from other declarations is refused.
LAYOUT = zlib.crc32(_c_declarations().encode()) >> 1  # a positive int in C


def c_header() -> str:
    """Return `columns.h`."""
    comment = "/* Written by setup.py from columns.py. */"
    return f"{comment}\n#include <stdint.h>\n#define LAYOUT {LAYOUT}\n{_c_declarations()}"
