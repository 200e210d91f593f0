"""Measuring on CUDA, with one kernel for each step.

As the fused step does, it keeps the addresses of all tensors in tables, and makes them anew when parameters
or state are others than before. Operations of torch's would take the host some milliseconds a step.

Of our optimizers a step is measured when it is done. Of others the gradient must be seen before the step:
a row is completed before the next step, or when it is asked for (`finish`), so that one launch serves both.
Whoever changes parameters in between spoils that measurement, and the row shows it.
"""

from __future__ import annotations

import math
from array import array
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.optimizers.torque import TorqueOptimizer
from tam.recorder import kernels as observe
from tam.recorder.kernels import Column
from tam.recorder.measure import NORMS, Operations, momentum_of, params_of
from tam.step.fused import support as fused
from tam.step.fused.columns import KINDS
from tam.step.fused.launcher import Launcher, upload
from tam.step.fused.launcher import PinnedTable as Mirror
from tam.step.fused.support import dtype_name as kind_of
from tam.step.fused.support import is_plain, is_within_storage
from tam.step.fused.tables import Fingerprint as Watch

BLOCK, WARPS = 4096, 8

_version, _gradient = attrgetter("_version"), attrgetter("grad")


class Kernels:
    """Measures the steps of one optimizer, all of whose parameters lie dense on one GPU."""

    def __init__(self, optimizer: Optimizer, wanted: set[str]) -> None:
        self.wanted = wanted
        self.moves, self.momenta = "update" in wanted, "momentum" in wanted
        self.torque = isinstance(optimizer, TorqueOptimizer)
        self.cosine = "cosine" in wanted and not self.torque
        self.copies: dict[int, Tensor] = {}  # by the id of the parameter
        self.pending: Tensor | None = None  # the row of the last step
        self.versions: list[int] = []  # of the parameters, after that step
        self.grads: list[Tensor | None] = []
        self.seen: Watch | None = None  # the gradients the table has
        self.tables: Any = None  # of the optimizer's fused step, when ours were found to fit
        self.elsewhere: Operations | None = None  # measures a step whose tensors are laid out unlike
        self.sums = torch.zeros(3, dtype=torch.float64, device=params_of(optimizer)[0].device)
        self._make(optimizer)

    def before(self, optimizer: Optimizer) -> None:
        self.elsewhere = None
        moved = self.moves and self.versions != [*map(_version, self.params)]  # since they were copied
        params = params_of(optimizer)
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        if same and not (self.cosine or moved or self.unlike):
            return
        if not self._fits(optimizer):
            self.finish(optimizer)
            self._make(optimizer)
        if self.unlike or (self.cosine and not self._set_gradients()):
            self.finish(optimizer)
            self.elsewhere = Operations(optimizer, self.wanted)
            self.elsewhere.before(optimizer)
        else:
            self._launch(self.cosine, getattr(optimizer, "grad_scale", None), moved)

    def after(self, optimizer: Optimizer, row: Tensor) -> None:
        self.grads = []
        if self.elsewhere is not None:
            self.elsewhere.after(optimizer, row)
            self.versions = []  # the copies were not made
            return
        if self.cosine:
            if not self._same_momenta(optimizer):  # the step has made some
                self._make(optimizer)
        else:
            # A fused step has just made sure of its tables, which last as long as ours.
            tables = getattr(optimizer, "tables", None)
            if (tables is None or tables is not self.tables) and not self._fits(optimizer):
                self._make(optimizer)
            self.tables = tables
        self.pending = row
        if self.moves:
            self.versions = [*map(_version, self.params)]
        if not self.cosine:
            self._launch(False, None)

    def finish(self, optimizer: Optimizer) -> None:
        if self.pending is None:
            return
        # State that was replaced since is still there, as the tables have it; parameters may not be.
        moved = self.moves and self.versions != [*map(_version, self.params)]
        if not self.watch.matches(self.watched):
            self._make(optimizer)
        self._launch(False, None, moved)

    def _launch(self, cosine: bool, scale: Any, moved: bool = False) -> None:
        pending, self.pending = self.pending, None
        tensors = (
            self.launcher.chunks, self.rows, self.gradients.on_device, self.sources, self.sums, self.partial,
            self.counter, self.sums if pending is None else pending,
            self.sums if scale is None else scale.to(self.device, torch.float32),
        )  # fmt: skip
        aligned = self.aligned if cosine else self.aligned_state
        numbers = (
            *self.sizes, self.dtypes, aligned, scale is not None, pending is not None, self.moves,
            self.momenta, cosine,
        )  # fmt: skip
        with self.launcher.device_guard():
            self.launcher.launch(observe.observe, (BLOCK, WARPS), tensors, numbers)
        if pending is not None and moved:
            pending[-2:] = math.nan  # not only the step has moved them

    def _fits(self, optimizer: Optimizer) -> bool:
        """Return True if parameters and state are still those the tables were made of."""
        params = params_of(optimizer)
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and self._same_momenta(optimizer)
            and self.watch.matches(self.watched)
            and [*map(_maximize, optimizer.param_groups)] == self.maximize
            and getattr(getattr(optimizer, "segments", None), "grad_norm", None) is self.norm
        )

    def _same_momenta(self, optimizer: Optimizer) -> bool:
        return all(
            momentum_of(optimizer, p) is m for p, m in zip(self.params, self.momenta_seen, strict=True)
        )

    def _make(self, optimizer: Optimizer) -> None:
        """The tables, as the optimizer stands now."""
        self.params = params_of(optimizer)
        self.device = self.params[0].device
        self.norm = getattr(getattr(optimizer, "segments", None), "grad_norm", None)
        self.momenta_seen = momenta = [momentum_of(optimizer, p) for p in self.params]
        self.unlike = not all(m is None or _same(m, p) for m, p in zip(momenta, self.params, strict=True))
        if self.moves:
            kept = self.copies
            found = [kept[id(p)] if id(p) in kept and _same(kept[id(p)], p) else None for p in self.params]
            # A new one is a copy at once: for the step before, the parameter has not moved.
            made = [p.detach().clone() if x is None else x for p, x in zip(self.params, found, strict=True)]
            self.copies = {id(p): x for p, x in zip(self.params, made, strict=True)}
        self.maximize = [*map(_maximize, optimizer.param_groups)]
        signs = [-1 if g.get("maximize") else 1 for g in optimizer.param_groups for _ in g["params"]]
        columns: dict[Column, list[int]] = {
            Column.THETA: [*map(Tensor.data_ptr, self.params)],
            Column.COPY: [self.copies[id(p)].data_ptr() if self.copies else 0 for p in self.params],
            Column.MOMENTUM: [0 if m is None else m.data_ptr() for m in momenta],
            Column.NUMEL: [p.numel() * (2 if p.is_complex() else 1) for p in self.params],
            Column.KIND: [KINDS.index(kind_of(p)) for p in self.params],
            Column.SIGN: signs,
        }
        rows = torch.tensor([columns[key] for key in Column], dtype=torch.int64)
        self.aligned_state = not (rows[: Column.NUMEL] % 16).any()
        self.dtypes = sum(1 << kind for kind in set(columns[Column.KIND]))
        self.launcher = Launcher(columns[Column.NUMEL], self.device)
        self.rows = upload(rows, self.device)
        self.sources = upload(torch.tensor(self._sources(optimizer), dtype=torch.int64), self.device)
        self.watched = [*self.params, *(m for m in momenta if m is not None), *self.read]
        self.watch = Watch(self.watched)
        n_chunks = self.launcher.chunks.shape[1]
        self.width = (self.sources.numel() or 3) + NORMS
        self.sizes = (n_chunks, len(self.params), self.sources.numel())
        self.partial = torch.empty(6 * n_chunks, dtype=torch.float32, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.gradients, self.seen = Mirror(self.device), None
        self.aligned = bool(self.aligned_state)

    def _sources(self, optimizer: Optimizer) -> list[int]:
        """The addresses of s of each segment and of |g|."""
        self.read: list[Tensor] = []
        if not isinstance(optimizer, TorqueOptimizer):
            return []
        alignments = optimizer.segments.alignments()
        norm = optimizer.grad_norm if self.norm is None else self.norm
        self.read = [*alignments, norm]  # kept alive: some of them may be new
        return [x.data_ptr() for x in self.read]

    def _set_gradients(self) -> bool:
        """Brings the table of gradients up to date; False where one is laid out unlike its parameter."""
        # Kept until the step is done, which would make all these Python objects anew.
        self.grads = grads = [*map(_gradient, self.params)]
        present = grads
        try:
            addresses = [*map(Tensor.data_ptr, grads)]
        except (TypeError, RuntimeError):  # some have none, or are sparse
            if any(g is not None and g.layout is not torch.strided for g in grads):
                return False
            present = [g for g in grads if g is not None]
            addresses = [0 if g is None else g.data_ptr() for g in grads]
        seen = self.seen
        same = seen is not None and seen.has_layouts_of(present)
        if seen is not None and same and addresses == seen.addresses:
            return True
        if (
            seen is None
            or not same
            or len(present) < len(grads)
            or not all(map(is_within_storage, present, seen.extents))
        ):
            pairs = [(g, p) for g, p in zip(grads, self.params, strict=True) if g is not None]
            if not all(_same(g, p) and is_plain(g) and is_within_storage(g) for g, p in pairs):
                return False
        self.seen = None
        self.aligned = bool(self.aligned_state and not any(a % 16 for a in addresses))
        with self.launcher.device_guard():
            self.gradients.set(array("q", addresses))
        self.seen = Watch(present, addresses) if seen is None or not same else seen
        self.seen.addresses = addresses
        return True


def _maximize(group: dict[str, Any]) -> bool:
    return bool(group.get("maximize"))


def _same(x: Tensor, p: Tensor) -> bool:
    """Whether a kernel can walk through both side by side."""
    return x.dtype == p.dtype and x.device == p.device and fused.same_layout(x, p)
