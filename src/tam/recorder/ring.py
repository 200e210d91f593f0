"""The buffer on the device, from which the host fetches many steps at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.step.eager import accumulator_dtype

# d and the effective lr depend on them.
_STEP_OPTIONS = ("momentum", "dampening", "betas", "scope", "floor", "gain", "ema")


@dataclass(frozen=True)
class Mark:
    """What the host knows of a step."""

    step: int
    rates: list[float]  # lr of each group; nan if it lies on the device, and so in the row
    groups: list[tuple[int, dict[str, Any]]]  # per group: the number of its parameters, its _STEP_OPTIONS


@dataclass
class Block:
    """Rows of measurements on the device, and their marks on the host.

    Behind the measurements, a row holds the lr of every group that keeps it on the device.
    """

    cls: type[Optimizer]  # the class of the optimizer that took the steps
    width: int  # the numbers of a row that are measured
    groups: int  # the number of parameter groups
    capacity: int
    device: torch.device
    marks: list[Mark] = field(default_factory=list)
    host_rows: Tensor | None = None
    copy_event: torch.cuda.Event | None = None  # after the copy to `host_rows`

    def __post_init__(self) -> None:
        shape = (self.capacity, self.width + self.groups)
        dtype = accumulator_dtype(self.device)
        self.rows: Tensor | None = torch.zeros(shape, dtype=dtype, device=self.device)
        # All views at once: cheaper than one per step.
        self.views = self.rows[:, : self.width].unbind()

    def next_row(self) -> Tensor:
        return self.views[len(self.marks)]

    def mark(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Note what the host knows of the row just written."""
        rates = []
        for i, group in enumerate(groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                assert self.rows is not None
                self.rows[len(self.marks), self.width + i].copy_(lr.detach().reshape(()))
                lr = float("nan")
            rates.append(float(lr))
        sizes_and_options = [(len(g["params"]), {k: g[k] for k in _STEP_OPTIONS if k in g}) for g in groups]
        if self.marks and self.marks[-1].groups == sizes_and_options:
            sizes_and_options = self.marks[-1].groups  # one object for all steps between two changes
        self.marks.append(Mark(step, rates, sizes_and_options))

    def send(self) -> None:
        """Start the copy to the host."""
        if self.rows is None:
            return
        rows = self.rows[: len(self.marks)]
        if self.device.type == "cuda":
            self.host_rows = torch.empty_like(rows, device="cpu", pin_memory=True)
            self.host_rows.copy_(rows, non_blocking=True)
            self.copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copy_event.record(torch.cuda.current_stream(self.device))
        else:
            self.host_rows = rows.cpu().clone()
        self.rows, self.views = None, ()

    def read_values(self) -> Tensor:
        """Return the measurements. Waits for the copy; reads a block that is not full as it is."""
        return self._read()[:, : self.width]

    def read_rates(self) -> list[list[float]]:
        """Return the lr of each group at each step."""
        rows = zip(self.marks, self._read()[:, self.width :].tolist(), strict=True)
        return [[y if x != x else x for x, y in zip(m.rates, row, strict=True)] for m, row in rows]

    def _read(self) -> Tensor:
        if self.rows is not None:
            return self.rows[: len(self.marks)].cpu()
        assert self.host_rows is not None
        if self.copy_event is not None:
            self.copy_event.synchronize()
            self.copy_event = None
            self.host_rows = self.host_rows.clone()  # pinned memory is scarce
        return self.host_rows
