"""Bad input is refused by name, before anything has changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers import ALL, PAIRS, TORQUE, WAYS, options_for, parameters, params_of, train

BAD: list[tuple[str, Any]] = [
    *[("lr", value) for value in (-1.0, math.nan, math.inf, "0.1", None, True)],
    ("lr", torch.tensor(-1.0)),
    ("lr", torch.tensor([0.1, 0.2])),
    *[("weight_decay", value) for value in (-1e-4, math.nan, math.inf)],
    *[("momentum", value) for value in (-0.1, 1.0, 1.5, math.nan)],
    *[("betas", value) for value in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), 0.9, (0.9,))],
    ("eps", -1e-8),
    *[("smoothing", value) for value in (-0.1, 1.1, math.nan)],
    *[("floor", value) for value in (-1e-8, math.nan)],
    *[("max_grad_norm", value) for value in (-1.0, math.nan, "1")],
    *[("scope", value) for value in ("layer", None, "Global")],
    ("method", "sin"),
    ("fused", "yes"),
    *[(name, 1) for name in ("ema", "bias_correction", "vote")],
    *[(name, 1) for name in ("maximize", "foreach", "capturable", "differentiable")],
]
CASES = [(cls, name, value) for cls in ALL for name, value in BAD if options_for(cls, **{name: value})]


@pytest.mark.parametrize("cls, name, value", CASES)
def test_a_bad_value_is_refused_by_name(cls: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        cls(parameters([(3,)]), **{name: value})
    message = str(error.value)
    assert message.startswith(name) and "must be" in message
    assert str(value) in message or isinstance(value, tuple | torch.Tensor)


@pytest.mark.parametrize("cls, name, value", CASES)
def test_a_bad_value_in_a_group_is_refused_and_changes_nothing(cls: type, name: str, value: Any) -> None:
    optimizer = train(cls(parameters([(3,)])), 1)
    with pytest.raises(ValueError, match=name.split("[")[0]):
        optimizer.add_param_group({"params": parameters([(4,)]), name: value})
    assert len(optimizer.param_groups) == 1
    train(optimizer, 1)


@pytest.mark.parametrize("cls", ALL)
def test_a_misspelt_option_is_a_type_error(cls: type) -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        cls(parameters([(3,)]), learning_rate=0.1)


@pytest.mark.parametrize("cls", ALL)
def test_an_empty_parameter_list_is_refused(cls: type) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        cls([])
    with pytest.raises(TypeError):
        cls(torch.zeros(3, requires_grad=True))


@pytest.mark.parametrize("cls", TORQUE)
def test_fused_goes_with_neither_differentiable_nor_foreach(cls: type) -> None:
    for other in ("differentiable", "foreach"):
        with pytest.raises(ValueError, match=rf"fused=True.*{other}=True"):
            cls(parameters([(3,)]), fused=True, **{other: True})


@pytest.mark.parametrize("cls", TORQUE)
def test_shared_options_must_not_differ(cls: type) -> None:
    optimizer = train(cls(parameters([(3,)])), 1)
    with pytest.raises(ValueError, match=r"smoothing=0\.5"):
        optimizer.add_param_group({"params": parameters([(4,)]), "smoothing": 0.5})
    optimizer.add_param_group({"params": parameters([(4,)])})
    optimizer.param_groups[1]["scope"] = "tensor"
    before = [p.detach().clone() for p in params_of(optimizer)]
    with pytest.raises(ValueError, match="scope must be the same"):
        train(optimizer, 1)
    assert all(torch.equal(p, q) for p, q in zip(params_of(optimizer), before, strict=True))


@pytest.mark.parametrize("cls, way", PAIRS)
def test_sparse_gradients_are_refused_before_anything_has_changed(cls: type, way: str) -> None:
    model = torch.nn.ModuleDict(
        {"dense": torch.nn.Linear(3, 3), "table": torch.nn.Embedding(5, 3, sparse=True)}
    )
    optimizer = cls(model.named_parameters(), **WAYS[way])
    model["dense"](model["table"](torch.tensor([1, 2]))).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"'table.weight'.*sparse"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("options", [{}, {"scope": "group"}, {"scope": "tensor", "max_grad_norm": 1.0}])
def test_one_sum_over_cpu_and_another_device_is_refused(cls: type, options: dict[str, Any]) -> None:
    here, there = torch.zeros(3, requires_grad=True), torch.zeros(3, device="meta", requires_grad=True)
    optimizer = cls([here, there], **options)
    for p in (here, there):
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"\['cpu', 'meta'\]"):
        optimizer.step()
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("cls", TORQUE)
def test_per_tensor_steps_on_several_devices_are_fine(cls: type) -> None:
    here, there = torch.zeros(3, requires_grad=True), torch.zeros(3, device="meta", requires_grad=True)
    optimizer = cls([here, there], scope="tensor")
    for p in (here, there):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[there]["alignment"].device.type == "meta"
    assert optimizer.grad_norm.isnan()  # one sum over both would make the host wait
