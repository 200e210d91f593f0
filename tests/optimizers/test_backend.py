"""Which backend takes the step, and that `optimizer.backend` names it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import tam
from tests.helpers import TORQUE, parameters, params_of, train

SHAPES = [(3, 5), (7,), (2, 2)]


def backend_after_a_step(optimizer: Any) -> str | None:
    for p in params_of(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.backend  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize(
    "options, backend",
    [
        ({}, "c"),
        ({"fused": True}, "c"),
        ({"fused": True, "foreach": False}, "c"),
        ({"fused": False}, "loop"),
        ({"foreach": False}, "loop"),
        ({"foreach": True}, "foreach"),
        ({"differentiable": True}, "pure"),
    ],
)
def test_the_options_choose(cls: type, options: dict[str, Any], backend: str) -> None:
    optimizer = cls([p.detach() for p in parameters(SHAPES)], **options)
    assert optimizer.backend is None
    optimizer.step()
    assert optimizer.backend is None  # without gradients there was no step
    assert backend_after_a_step(optimizer) == backend
    assert backend_after_a_step(optimizer) == backend


def test_without_options_the_parameters_choose() -> None:
    half = parameters(SHAPES, torch.float16)
    assert backend_after_a_step(tam.AdaTAMW(parameters(SHAPES, torch.bfloat16))) == "c"
    assert backend_after_a_step(tam.AdaTAM(parameters(SHAPES, torch.complex64))) == "c"
    assert backend_after_a_step(tam.TAM(half)) == "loop"
    assert backend_after_a_step(tam.TAM([*parameters(SHAPES), *half])) == "loop"
    assert backend_after_a_step(tam.TAM([torch.zeros(3, device="meta", requires_grad=True)])) == "foreach"


def test_angulargrad_has_no_kernel() -> None:
    assert tam.AngularGrad(parameters(SHAPES)).backend is None
    assert backend_after_a_step(tam.AngularGrad(parameters(SHAPES))) == "loop"
    assert backend_after_a_step(tam.AngularGrad(parameters(SHAPES), foreach=True)) == "foreach"


@pytest.mark.parametrize("cls", TORQUE)
def test_it_is_that_of_the_last_step(cls: type) -> None:
    optimizer = train(cls(parameters(SHAPES)), 1)
    found = [optimizer.backend]
    for step, fused in enumerate([False, None, True, False, True], start=1):
        optimizer.param_groups[0]["fused"] = fused
        train(optimizer, 1, start=step)
        found.append(optimizer.backend)
    assert found == ["c", "loop", "c", "c", "loop", "c"]


@pytest.mark.parametrize("cls", TORQUE)
def test_a_step_that_is_skipped_has_none(cls: type) -> None:
    optimizer = cls(parameters(SHAPES))
    optimizer.found_inf = torch.tensor(1.0)
    assert backend_after_a_step(optimizer) is None
    optimizer.found_inf = torch.tensor(0.0)
    assert backend_after_a_step(optimizer) == "c"


@pytest.mark.parametrize("cls", TORQUE)
def test_a_copy_has_taken_no_step(cls: type) -> None:
    optimizer = train(cls(parameters(SHAPES)), 1)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.backend is None
        assert backend_after_a_step(twin) == "c"


def test_it_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        tam.TAM(parameters(SHAPES)).backend = "c"
