"""Measuring on CUDA, with one kernel per step.

Like the fused step, this keeps the addresses of all tensors in tables, and rebuilds the tables when
parameters or state are replaced. Torch's operations would take some milliseconds of host time per step.

A step of our optimizers is measured right after it. For other optimizers, the gradient must be measured
before the step. One launch does both: it completes the row of the last step and measures the gradient of the
next. The last row is completed when somebody reads it (`finish_row`). If parameters change in between, that
measurement is lost, and the row shows nan.
"""

from __future__ import annotations

import math
from array import array
from operator import attrgetter, is_

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.optimizers.torque import TorqueOptimizer
from tam.recorder.kernels import Column, observe
from tam.recorder.measure import NORMS, Backend, Measure, TorchObserver, momentum_of, params_of
from tam.step.fused.columns import KINDS
from tam.step.fused.launcher import Launcher, PinnedTable, upload
from tam.step.fused.support import can_walk_together, dtype_name, numel_as_real
from tam.step.fused.tables import Fingerprint, GradientTable

BLOCK, WARPS = 4096, 8

_version, _gradient = attrgetter("_version"), attrgetter("grad")


class KernelObserver:
    """Measures the steps of one optimizer whose parameters are all dense and on one GPU."""

    def __init__(self, optimizer: Optimizer, measures: set[Measure]) -> None:
        self.optimizer, self.measures = optimizer, measures
        self.copies: dict[int, Tensor] = {}  # of the parameters, by their id
        self.pending_row: Tensor | None = None  # of the last step, to be written by the next launch
        self.versions: list[int] = []  # of the parameters, after that step
        self.grads: list[Tensor | None] = []
        self.step_tables: object = None  # of the optimizer's fused step, when our tables were last right
        self.fallback: TorchObserver | None = None  # measures a step with a tensor of another layout
        self.sums = torch.zeros(3, dtype=torch.float64, device=params_of(optimizer)[0].device)
        self._build_tables()

    @property
    def backend(self) -> Backend:
        return "triton" if self.fallback is None else self.fallback.backend

    def measure_before(self) -> None:
        self.fallback = None
        has_moved = self._has_moved()
        if self._has_same_params() and not ("cosine" in self.measures or has_moved or self.needs_fallback):
            return
        if not self._tables_hold():
            self.finish_row()
            self._build_tables()
        if self.needs_fallback or ("cosine" in self.measures and not self._set_gradients()):
            self.finish_row()
            self.fallback = TorchObserver(self.optimizer, self.measures)
            self.fallback.measure_before()
        else:
            self._launch("cosine" in self.measures, getattr(self.optimizer, "grad_scale", None), has_moved)

    def measure_after(self, row: Tensor) -> None:
        self.grads = []
        if self.fallback is not None:
            self.fallback.measure_after(row)
            self.versions = []  # the kernel has not renewed its copies
            return
        if "cosine" in self.measures:
            if not self._has_same_momenta():  # the step has made some
                self._build_tables()
        else:
            # A fused step has just checked its tables, which hold as long as ours.
            tables = getattr(self.optimizer, "tables", None)
            if (tables is None or tables is not self.step_tables) and not self._tables_hold():
                self._build_tables()
            self.step_tables = tables
        self.pending_row = row
        if "update" in self.measures:
            self.versions = [*map(_version, self.params)]
        if "cosine" not in self.measures:
            self._launch(False, None)

    def finish_row(self) -> None:
        if self.pending_row is None:
            return
        # The tables keep replaced state alive, but not the old memory of a parameter.
        has_moved = self._has_moved()
        if not self.fingerprint.matches(self.tensors):
            self._build_tables()
        self._launch(False, None, has_moved)

    def _launch(self, has_cosine: bool, scale: Tensor | None, has_moved: bool = False) -> None:
        row, self.pending_row = self.pending_row, None
        tensors = (
            self.launcher.chunks, self.rows, self.gradients.on_device, self.sources, self.sums, self.partial,
            self.counter, self.sums if row is None else row,
            self.sums if scale is None else scale.to(self.device, torch.float32),
        )  # fmt: skip
        aligned = self.aligned if has_cosine else self.aligned_state
        numbers = (
            *self.sizes, self.dtypes, aligned, scale is not None, row is not None, "update" in self.measures,
            "momentum" in self.measures, has_cosine,
        )  # fmt: skip
        with self.launcher.device_guard():
            self.launcher.launch(observe, (BLOCK, WARPS), tensors, numbers)
        if row is not None and has_moved:
            row[-2:] = math.nan

    def _has_moved(self) -> bool:
        """Return True if something besides the step has moved the parameters since they were copied."""
        return "update" in self.measures and self.versions != [*map(_version, self.params)]

    def _has_same_params(self) -> bool:
        params = params_of(self.optimizer)
        return len(params) == len(self.params) and all(map(is_, params, self.params))

    def _has_same_momenta(self) -> bool:
        return all(map(is_, self._find_momenta(), self.momenta))

    def _find_momenta(self) -> list[Tensor | None]:
        return [momentum_of(self.optimizer, p) for p in self.params]

    def _find_signs(self) -> list[int]:
        return [-1 if group.get("maximize") else 1 for group in self.optimizer.param_groups]

    def _find_norm(self) -> Tensor | None:
        """Return the tensor in which the step of our optimizers writes |g|."""
        return self.optimizer.segments.grad_norm if isinstance(self.optimizer, TorqueOptimizer) else None

    def _tables_hold(self) -> bool:
        """Return True if parameters and state are still those in the tables."""
        return (
            self._has_same_params()
            and self._has_same_momenta()
            and self.fingerprint.matches(self.tensors)
            and self._find_signs() == self.signs
            and self._find_norm() is self.norm
        )

    def _build_tables(self) -> None:
        """Fill the tables with the optimizer's tensors of now."""
        self.params = params_of(self.optimizer)
        self.device = self.params[0].device
        self.momenta, self.norm, self.signs = self._find_momenta(), self._find_norm(), self._find_signs()
        pairs = zip(self.momenta, self.params, strict=True)
        self.needs_fallback = not all(m is None or can_walk_together(m, p) for m, p in pairs)
        if "update" in self.measures:
            copies = [(p, self.copies.get(id(p))) for p in self.params]
            # A new copy equals its parameter, so the row of the step before shows no update of it.
            self.copies = {
                id(p): p.detach().clone() if x is None or not can_walk_together(x, p) else x
                for p, x in copies
            }
        row_signs = zip(self.signs, self.optimizer.param_groups, strict=True)
        columns: dict[Column, list[int]] = {
            Column.THETA: [*map(Tensor.data_ptr, self.params)],
            Column.COPY: [self.copies[id(p)].data_ptr() if self.copies else 0 for p in self.params],
            Column.MOMENTUM: [0 if m is None else m.data_ptr() for m in self.momenta],
            Column.NUMEL: [*map(numel_as_real, self.params)],
            Column.KIND: [KINDS.index(dtype_name(p)) for p in self.params],
            Column.SIGN: [sign for sign, group in row_signs for _ in group["params"]],
        }
        rows = torch.tensor([columns[key] for key in Column], dtype=torch.int64, device="cpu")
        self.aligned_state = self.aligned = not (rows[: Column.NUMEL] % 16).any()
        self.dtypes = sum(1 << kind for kind in set(columns[Column.KIND]))
        self.launcher = Launcher(columns[Column.NUMEL], self.device)
        self.rows = upload(rows, self.device)
        readings: list[Tensor] = []  # s of each segment and |g|
        if isinstance(self.optimizer, TorqueOptimizer):
            norm = self.optimizer.grad_norm if self.norm is None else self.norm
            readings = [*self.optimizer.segments.alignments(), norm]
        addresses = torch.tensor([*map(Tensor.data_ptr, readings)], dtype=torch.int64, device="cpu")
        self.sources = upload(addresses, self.device)
        self.tensors = [*self.params, *(m for m in self.momenta if m is not None), *readings]
        self.fingerprint = Fingerprint(self.tensors)
        n_chunks = self.launcher.chunks.shape[1]
        self.width = (self.sources.numel() or 3) + NORMS
        self.sizes = (n_chunks, len(self.params), self.sources.numel())
        self.partial = torch.empty(6 * n_chunks, dtype=torch.float32, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.gradients, self.gradient_table = PinnedTable(self.device), GradientTable(self.params)

    def _set_gradients(self) -> bool:
        """Bring the table of gradients up to date; return False if the kernel cannot read one of them."""
        # Kept until the step is done: it would make all these Python objects a second time.
        self.grads = grads = [*map(_gradient, self.params)]
        present = grads
        try:
            addresses = [*map(Tensor.data_ptr, grads)]
        except (TypeError, RuntimeError):  # some are None or sparse
            present = [g for g in grads if g is not None]
            if any(g.layout is not torch.strided for g in present):
                return False
            addresses = [-1 if g is None else g.data_ptr() for g in grads]
        return self.gradient_table.update(grads, present, addresses, None, self._upload_gradients)

    def _upload_gradients(self, addresses: list[int]) -> None:
        self.aligned = self.aligned_state and not any(address % 16 for address in addresses)
        with self.launcher.device_guard():
            self.gradients.set(array("q", addresses))
