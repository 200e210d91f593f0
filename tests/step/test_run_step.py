"""The four phases of a step: measure, add up over the ranks, settle, update."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from tam.sharding.exchange import Exchange
from tam.sharding.sums import FOUND_INF
from tam.step import run_step


class Phases:
    """A backend, and an exchange, that note what they are asked for."""

    def __init__(self, skips_on_device: bool = False, found_elsewhere: float = 0.0) -> None:
        self.skips_on_device, self.found_elsewhere = skips_on_device, found_elsewhere
        self.calls: list[str] = []
        self.sums = torch.zeros(3, 4, dtype=torch.float64)

    def measure(self) -> Tensor:
        self.calls.append("measure")
        return self.sums

    def settle(self, sums: Tensor) -> None:
        assert sums is self.sums
        self.calls.append("settle")

    def update(self) -> None:
        self.calls.append("update")

    def all_reduce_sums(self, sums: Tensor, found_inf: Tensor | None = None) -> None:
        assert sums is self.sums
        self.calls.append("add up")
        sums[-1, FOUND_INF] = self.found_elsewhere + (0.0 if found_inf is None else float(found_inf))


def run_with_other_ranks(phases: Phases, found_inf: Tensor | None) -> bool:
    return run_step(phases, cast(Exchange, phases), found_inf)


def test_a_rank_alone_adds_nothing_up() -> None:
    phases = Phases()
    assert run_step(phases)
    assert phases.calls == ["measure", "settle", "update"]


def test_with_other_ranks_sums_are_added_up_before_they_are_settled() -> None:
    phases = Phases()
    assert run_with_other_ranks(phases, torch.tensor(0.0))
    assert phases.calls == ["measure", "add up", "settle", "update"]


@pytest.mark.parametrize("found_inf", [None, torch.tensor(0.0), torch.tensor(1.0)])
def test_a_verdict_of_any_rank_skips_the_step(found_inf: Tensor | None) -> None:
    phases = Phases(found_elsewhere=1.0)
    assert not run_with_other_ranks(phases, found_inf)
    assert phases.calls == ["measure", "add up"]


def test_a_backend_that_reads_the_verdict_on_the_device_is_not_skipped() -> None:
    phases = Phases(skips_on_device=True, found_elsewhere=1.0)
    assert run_with_other_ranks(phases, torch.tensor(0.0))
    assert phases.calls == ["measure", "add up", "settle", "update"]


def test_without_a_grad_scaler_the_host_does_not_read_a_device() -> None:
    phases = Phases(found_elsewhere=1.0)
    phases.sums = phases.sums.to("meta")  # a value cannot be read there
    assert run_with_other_ranks(phases, None)
