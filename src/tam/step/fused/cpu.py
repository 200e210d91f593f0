"""The fused step on the CPU: cpu.c, built when the package is installed where there is a compiler."""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from tam.sharding import FOUND_INF, Exchange
from tam.step.fused.columns import ARGUMENTS, FUNCTIONS, LAYOUT, Flag, Option, Row, Segment
from tam.step.rule import Rule

KINDS = ("float32", "bfloat16", "float64")
INSTRUCTION_SETS = ("base", "avx2", "avx512")
_C_TYPES: dict[str, type[ctypes.c_int64 | ctypes.c_double | ctypes.c_int | ctypes.c_void_p]] = {
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "int": ctypes.c_int,
    **dict.fromkeys(("const int64_t *", "const double *", "double *"), ctypes.c_void_p),
}


class Tables(ctypes.Structure):
    """The arguments of the C functions."""

    _fields_ = [(name, _C_TYPES[kind]) for name, kind in ARGUMENTS]


@cache
def library() -> ctypes.CDLL | str:
    """The compiled kernel, or why there is none."""
    here = Path(__file__).parent
    built = [path for suffix in EXTENSION_SUFFIXES if (path := here / f"_cpu{suffix}").exists()]
    if not built:
        return "the CPU kernel was not built: install the package where there is a C compiler"
    return load_library(built[0])


def load_library(path: Path) -> ctypes.CDLL | str:
    """Return the compiled kernel, or why it cannot be used."""
    try:
        found = ctypes.CDLL(str(path))
        layout = int(found.tam_layout())
    except (OSError, AttributeError) as error:
        return f"the CPU kernel cannot be loaded: {error}"
    if layout != LAYOUT:
        return "the CPU kernel was built from another version: install the package again"
    for name, kind in FUNCTIONS.items():
        getattr(found, name).argtypes = [ctypes.POINTER(Tables)]
        getattr(found, name).restype = _C_TYPES[kind]
    return found


def missing() -> str | None:
    """Why the kernel cannot be used; None where it can."""
    found = library()
    return found if isinstance(found, str) else None


@cache
def instruction_set() -> int:
    """The best of INSTRUCTION_SETS that this processor has."""
    found = library()
    return 0 if isinstance(found, str) else int(found.tam_instruction_set())


_forked = False


def _after_fork() -> None:
    """OpenMP's threads do not survive a fork, and waiting for them would be for ever."""
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _done(result: float) -> float:
    if result < 0:
        raise MemoryError("no memory for the partial sums of the step")
    return result


def rows_are_segments(rows: Tensor, segments: Tensor) -> bool:
    """Return True if row k is segment k and share k, as `tam_step_per_tensor` assumes."""
    order = torch.arange(rows.shape[1])
    shares = segments[[Segment.FIRST, Segment.COUNT]]
    return (
        segments.shape[1] == len(order)
        and bool((rows[[Row.SHARE, Row.SEGMENT]] == order).all())
        and torch.equal(shares, torch.stack([order, torch.ones_like(order)]))
    )


class Native:
    """The tables in memory."""

    def __init__(self, rows: Tensor, segments: Tensor, rule: Rule, exchange: Exchange | None) -> None:
        self.rows, self.segments, self.exchange = rows, segments, exchange
        # Of all shares, also those of which there is nothing here, and of the whole.
        shares = int(segments[Segment.COUNT].sum())
        self.sums = torch.zeros(shares + 1, 4, dtype=torch.float64)
        self.each = rule.max_grad_norm is None and exchange is None and rows_are_segments(rows, segments)
        self.gradients = self.options = torch.empty(0)
        self.flags = (
            Flag.ADAPTIVE * rule.adaptive
            | Flag.DECOUPLED * rule.decoupled
            | Flag.EMA * rule.ema
            | Flag.CORRECT * rule.bias_correction
            | Flag.CLIP * (rule.max_grad_norm is not None)
        )

    def new_gradients(self, gradients: list[int]) -> None:
        self.gradients = torch.tensor(gradients, dtype=torch.int64)

    def new_options(self, options: list[list[float]]) -> None:
        self.options = torch.tensor(options, dtype=torch.float64)

    def set_lr(self, group: int, lr: Tensor) -> None:
        self.options[group, Option.LR] = lr

    def run(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        if found_inf is not None and self.exchange is None and float(found_inf) != 0:
            return
        kernel = library()
        assert not isinstance(kernel, str)
        columns = (self.rows, self.gradients, self.segments, self.options, self.sums)
        tables = Tables(
            *[table.data_ptr() for table in columns],
            *(self.rows.shape[1], len(self.sums) - 1, self.segments.shape[1]),
            1.0 if grad_scale is None else 1.0 / float(grad_scale),
            *(self.flags, instruction_set(), 1 if _forked else torch.get_num_threads()),
        )
        if self.each:
            length = _done(kernel.tam_step_per_tensor(tables))
        else:
            _done(kernel.tam_measure(tables))
            if self.exchange is not None:
                self.exchange.all_reduce_sums(self.sums, found_inf)
                if float(self.sums[-1, FOUND_INF]) != 0:
                    return
            length = _done(kernel.tam_update(tables))
        norm.fill_(length)

    def capturing(self) -> bool:
        return False

    def own_tables(self) -> AbstractContextManager[None]:
        return nullcontext()
