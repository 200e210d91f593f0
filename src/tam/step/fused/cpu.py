"""The fused step on the CPU: cpu.c, which is built when the package is installed with a C compiler."""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tam.step.fused.columns import ARGUMENTS, FUNCTIONS, LAYOUT, Flag, Option, Row, Segment, Sum
from tam.step.rule import Rule

DTYPES = ("float32", "bfloat16", "float64")
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
    """Return the compiled kernel, or why there is none."""
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


def why_missing() -> str | None:
    """Return why the kernel cannot be used; None if it can."""
    found = library()
    return found if isinstance(found, str) else None


@cache
def instruction_set() -> int:
    """Return the index of the best of INSTRUCTION_SETS that this processor has."""
    found = library()
    return 0 if isinstance(found, str) else int(found.tam_instruction_set())


_forked = False


def _after_fork() -> None:
    """Step with one thread from now on: OpenMP's threads do not survive a fork, and waiting never ends."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_after_fork)


def _check(result: float) -> float:
    if result < 0:
        raise MemoryError("no memory for the partial sums of the step")
    return result


def rows_are_segments(rows: Tensor, segments: Tensor) -> bool:
    """Return True if row k is segment k and share k, as `tam_step_per_tensor` assumes."""
    order = torch.arange(rows.shape[1], device=rows.device)
    shares = segments[[Segment.FIRST, Segment.COUNT]]
    return (
        segments.shape[1] == len(order)
        and bool((rows[[Row.SHARE, Row.SEGMENT]] == order).all())
        and torch.equal(shares, torch.stack([order, torch.ones_like(order)]))
    )


class CpuBackend:
    """The tables in memory, and the C kernel that reads them."""

    name: ClassVar[Literal["c", "triton"]] = "c"
    skips_on_device: ClassVar[bool] = False

    def __init__(self, rows: Tensor, segments: Tensor, rule: Rule, exchanges: bool) -> None:
        self.rows, self.segments = rows, segments
        # Of all shares, also those of which there is nothing here, and of the whole.
        shares = int(segments[Segment.COUNT].sum())
        self.sums = torch.zeros(shares + 1, len(Sum), dtype=torch.float64, device="cpu")
        self.steps_per_tensor = (
            rule.max_grad_norm is None and not exchanges and rows_are_segments(rows, segments)
        )
        self.gradients = self.options = torch.empty(0, device="cpu")
        self.flags = (
            Flag.ADAPTIVE * rule.adaptive
            | Flag.DECOUPLED * rule.decoupled
            | Flag.EMA * rule.ema
            | Flag.CORRECT * rule.bias_correction
            | Flag.CLIP * (rule.max_grad_norm is not None)
        )

    def set_gradients(self, addresses: list[int]) -> None:
        self.gradients = torch.tensor(addresses, dtype=torch.int64, device="cpu")

    def set_options(self, options: list[list[float]]) -> None:
        self.options = torch.tensor(options, dtype=torch.float64, device="cpu")

    def set_lr(self, group: int, lr: Tensor) -> None:
        self.options[group, Option.LR] = lr

    def begin(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self.norm = norm
        columns = (self.rows, self.gradients, self.segments, self.options, self.sums)
        self.tables = Tables(
            *[table.data_ptr() for table in columns],
            *(self.rows.shape[1], len(self.sums) - 1, self.segments.shape[1]),
            1.0 if grad_scale is None else 1.0 / float(grad_scale),
            *(self.flags, instruction_set(), 1 if _forked else torch.get_num_threads()),
        )
        kernel = library()
        assert not isinstance(kernel, str)
        self.kernel = kernel

    def step_alone(self) -> None:
        if self.steps_per_tensor:
            self.norm.fill_(_check(self.kernel.tam_step_per_tensor(self.tables)))
        else:
            _check(self.kernel.tam_measure(self.tables))
            self.norm.fill_(_check(self.kernel.tam_update(self.tables)))

    def measure(self) -> Tensor:
        _check(self.kernel.tam_measure(self.tables))
        return self.sums

    def settle(self, sums: Tensor) -> None:
        """Leave it to `update`: in C the two are one call."""

    def update(self) -> None:
        self.norm.fill_(_check(self.kernel.tam_update(self.tables)))

    def is_capturing(self) -> bool:
        return False

    def tables_of_graph(self) -> AbstractContextManager[None]:
        return nullcontext()
