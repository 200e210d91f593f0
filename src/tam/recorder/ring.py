"""The buffer on the device that the host fetches a batch at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.step.eager import accumulator_dtype as accumulator

_STEP_OPTIONS = ("momentum", "betas", "floor", "gain", "ema")  # what d and a settled step depend on


@dataclass(frozen=True)
class Mark:
    """What the host knows of a step."""

    step: int
    rates: list[float]  # lr of each group; nan where it lies on the device, and in the row
    groups: list[tuple[int, dict[str, Any]]]  # the number of its parameters, and _STEP_OPTIONS


@dataclass
class Block:
    """Rows of measurements on the device, and their marks on the host.

    Behind the measurements a row has the lr of every group that keeps it on the device.
    """

    cls: type[Optimizer]  # of the optimizer whose steps they are
    width: int
    capacity: int
    device: torch.device
    groups: int = 0
    marks: list[Mark] = field(default_factory=list)
    sent: Tensor | None = None
    arrived: Any = None

    def __post_init__(self) -> None:
        shape = (self.capacity, self.width + self.groups)
        self.rows: Tensor | None = torch.zeros(shape, dtype=accumulator(self.device), device=self.device)
        # All views at once: cheaper than one at each step.
        self.views = self.rows[:, : self.width].unbind()

    def next_row(self) -> Tensor:
        return self.views[len(self.marks)]

    def mark(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Notes what the host knows of the row just written."""
        rates = []
        for i, group in enumerate(groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                assert self.rows is not None
                self.rows[len(self.marks), self.width + i].copy_(lr.detach().reshape(()))
                lr = float("nan")
            rates.append(float(lr))
        kept = [(len(g["params"]), {k: g[k] for k in _STEP_OPTIONS if k in g}) for g in groups]
        if self.marks and self.marks[-1].groups == kept:
            kept = self.marks[-1].groups  # one object for all steps between two changes
        self.marks.append(Mark(step, rates, kept))

    def send(self) -> None:
        """Starts the copy to the host."""
        if self.rows is None:
            return
        rows = self.rows[: len(self.marks)]
        if self.device.type == "cuda":
            self.sent = torch.empty_like(rows, device="cpu", pin_memory=True)
            self.sent.copy_(rows, non_blocking=True)
            self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.arrived.record(torch.cuda.current_stream(self.device))
        else:
            self.sent = rows.cpu().clone()
        self.rows, self.views = None, ()

    def values(self) -> Tensor:
        """The measurements; waits for the copy. A block that is still being filled is read as it is."""
        return self._all()[:, : self.width]

    def rates(self) -> list[list[float]]:
        """The lr of each group at each step."""
        there = self._all()[:, self.width :].tolist()
        rows = zip(self.marks, there, strict=True)
        return [[y if x != x else x for x, y in zip(m.rates, row, strict=True)] for m, row in rows]

    def _all(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None
            assert self.sent is not None
            self.sent = self.sent.clone()  # pinned memory is scarce
        if self.rows is not None:
            return self.rows[: len(self.marks)].cpu()
        assert self.sent is not None
        return self.sent
