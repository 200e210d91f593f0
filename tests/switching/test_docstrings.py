"""The examples in docstrings run: those of the package, and of the short forms of a hand-over."""

from __future__ import annotations

import doctest
import importlib

import pytest

PUBLIC = ("transfer", "handover", "rules", "warmup")


@pytest.mark.parametrize(
    "name", [*(f"tam.switching.{name}" for name in PUBLIC), "tam.optimizers.tam", "tam.optimizers.adatam"]
)
def test_the_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0 and results.failed == 0
