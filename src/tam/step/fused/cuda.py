"""The fused step on CUDA: its tables on the device, and its three kernels."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tam.sharding.sums import FOUND_INF
from tam.step.fused import kernels
from tam.step.fused.columns import Option, Row, Segment, Share, Sum
from tam.step.fused.launcher import Launcher, PinnedTable, upload
from tam.step.rule import Rule

MEASURE, SETTLE, UPDATE = (2048, 4), (1, 4), (1024, 4)  # elements of a block, warps


class CudaBackend(Launcher):
    """The tables on one GPU, and the Triton kernels that read them."""

    name: ClassVar[Literal["c", "triton"]] = "triton"
    skips_on_device: ClassVar[bool] = True

    def __init__(
        self, rows: Tensor, segments: Tensor, rule: Rule, exchanges: bool, device: torch.device
    ) -> None:
        numel = rows[Row.NUMEL].tolist()
        super().__init__(numel, device)
        self.rule, self.exchanges, n_chunks = rule, exchanges, self.chunks.shape[1]
        n_segments, n_shares = segments.shape[1], int(segments[Segment.COUNT].sum())
        counts = [0] * n_shares
        for share, count in zip(rows[Row.SHARE].tolist(), self.chunk_counts, strict=True):
            counts[share] += count
        columns = {Share.FIRST_CHUNK: [0, *accumulate(counts)][:-1], Share.CHUNK_COUNT: counts}
        shares = torch.tensor([columns[key] for key in Share], dtype=torch.int64, device="cpu")
        self.rows, self.segments, self.shares = (upload(x, device) for x in (rows, segments, shares))
        self.sums = torch.zeros(n_shares + 1, len(Sum), dtype=torch.float64, device=device)
        self.gradients, self.options = PinnedTable(device), PinnedTable(device)
        self.partial = torch.empty(3 * n_chunks, dtype=torch.float32, device=device)
        self.scalars = torch.empty(2 * n_segments + 1, dtype=torch.float64, device=device)
        self.counters = torch.zeros(n_shares + 1, dtype=torch.int32, device=device)
        self.sizes = (n_chunks, len(numel), n_shares, n_segments)
        self.dtypes = sum(1 << kind for kind in set(rows[Row.KIND].tolist()))
        self.state_is_aligned = not bool((rows[[Row.THETA, Row.MOMENTUM, Row.SECOND]] % 16).any())
        self.is_aligned = False
        self.graph_tables: list[PinnedTable] = []

    def set_gradients(self, addresses: list[int]) -> None:
        self.is_aligned = self.state_is_aligned and not any(x % 16 for x in addresses[: self.sizes[1]])
        with self.device_guard():
            self.gradients.set(array("q", addresses))

    def set_options(self, options: list[list[float]]) -> None:
        with self.device_guard():
            self.options.set(array("d", chain.from_iterable(options)))

    def set_lr(self, group: int, lr: Tensor) -> None:
        self.options.on_device[group * len(Option) + Option.LR].copy_(lr.reshape(()))

    def begin(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self.norm, self.scale = norm, norm if grad_scale is None else grad_scale
        self.found_inf = norm if found_inf is None else found_inf
        # With other ranks, a rank whose gradients are not finite measures all the same: they wait for it.
        self.skips = found_inf is not None and not self.exchanges
        self.common = (*self.sizes, self.dtypes, self.is_aligned, grad_scale is not None)

    def step_alone(self) -> None:
        with self.device_guard():
            self._measure()
            self._update()

    def measure(self) -> Tensor:
        with self.device_guard():
            self.sums.zero_()  # of shares that have nothing here
            self._measure()
        return self.sums

    def settle(self, sums: Tensor) -> None:
        rule, gradients, options = self.rule, self.gradients.on_device, self.options.on_device
        tensors = (self.rows, gradients, self.segments, options, sums, self.scalars, self.norm)
        with self.device_guard():
            self.launch(kernels.settle, SETTLE, tensors, (*self.sizes[1:], rule.adaptive), self.sizes[3])
        self.found_inf, self.skips = sums[-1, FOUND_INF], True

    def update(self) -> None:
        with self.device_guard():
            self._update()

    def _measure(self) -> None:
        """Launch the kernel that measures and, without other ranks, settles."""
        tensors = (
            self.chunks, self.rows, self.gradients.on_device, self.shares, self.segments,
            self.options.on_device, self.partial, self.sums, self.scalars, self.norm, self.counters,
            self.scale, self.found_inf,
        )  # fmt: skip
        numbers = (*self.common, self.skips, self.rule.adaptive, self.exchanges)
        self.launch(kernels.measure, MEASURE, tensors, numbers)

    def _update(self) -> None:
        rule = self.rule
        tensors = (
            self.chunks, self.rows, self.gradients.on_device, self.options.on_device, self.scalars,
            self.scale, self.found_inf,
        )  # fmt: skip
        flags = (
            rule.adaptive, rule.decoupled, rule.ema, rule.bias_correction, rule.max_grad_norm is not None,
        )  # fmt: skip
        self.launch(kernels.update, UPDATE, tensors, (*self.common, self.skips, *flags))

    def is_capturing(self) -> bool:
        if self.device.type != "cuda":
            return False
        with self.device_guard():
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def tables_of_graph(self) -> Iterator[None]:
        """Put gradients and options into tables of a captured graph's own.

        Every replay copies them there again, and eager steps in between do not touch them.
        """
        eager = self.gradients, self.options, self.is_aligned
        self.gradients, self.options = self.gradients.for_capture(), self.options.for_capture()
        self.graph_tables += [self.gradients, self.options]
        try:
            yield
        finally:
            self.gradients, self.options, self.is_aligned = eager
