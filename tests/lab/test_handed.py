"""A function in a thread, as an iterator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tam.lab.handed import handed


def test_it_gives_one_value_after_the_other_and_waits_in_between() -> None:
    seen = []

    def work(give: Callable[[Any], None]) -> None:
        for i in range(3):
            seen.append(i)
            give(i)

    found = []
    for value in handed(work):
        found.append(value)
        assert seen == found  # the function has not gone on
    assert found == [0, 1, 2]


def test_what_it_raises_is_raised_here() -> None:
    def work(give: Callable[[Any], None]) -> None:
        give(1)
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        list(handed(work))


def test_one_that_is_left_ends() -> None:
    ended = threading.Event()

    def work(give: Callable[[Any], None]) -> None:
        try:
            while True:
                give(None)
        finally:
            ended.set()

    before = threading.active_count()
    steps = handed(work)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert ended.is_set() and threading.active_count() == before


def test_it_has_as_many_threads_as_its_caller() -> None:
    found = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    list(handed(lambda give: found.append(torch.get_num_threads())))
    torch.set_num_threads(before)
    assert found == [1]


def test_what_is_set_here_is_set_there() -> None:
    """The compiler's settings, too, which are a context's."""
    before = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = 1234
    try:
        assert list(handed(lambda give: give(torch._dynamo.config.recompile_limit))) == [1234]
    finally:
        torch._dynamo.config.recompile_limit = before
