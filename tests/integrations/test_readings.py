"""The readings that the callbacks of all frameworks log."""

from __future__ import annotations

import doctest

import pytest
import torch

import tam
import tam.integrations
from tam.integrations import readings
from tests.helpers import parameters, train

SHAPES = [(5, 4), (7,), ()]


def test_the_examples_of_the_docstrings_run() -> None:
    results = doctest.testmod(tam.integrations)
    assert results.attempted > 0 and results.failed == 0


def test_several_segments_have_a_range() -> None:
    optimizer = tam.TAM(parameters(SHAPES), lr=0.1, scope="tensor")
    train(optimizer, 3)
    s = optimizer.alignment
    values = readings(optimizer)
    assert float(values["tam/alignment"]) == pytest.approx(float(s.sum()) / 3)
    assert values["tam/alignment_min"] == s.min() < s.max() == values["tam/alignment_max"]
    assert values["tam/grad_norm"] == optimizer.grad_norm


def test_a_warmup_has_readings_while_its_optimizer_has_an_alignment() -> None:
    warmup = tam.Warmup(tam.TAM(parameters(SHAPES), lr=0.1), torch.optim.SGD, 2)
    train(warmup, 1)
    assert readings(warmup)["tam/alignment"] == warmup.alignment
    train(warmup, 1, start=1)
    assert readings(warmup) == {}
    with pytest.raises(TypeError, match=r"got SGD$"):
        readings(torch.optim.SGD(parameters(SHAPES), lr=0.1))
