"""When the fused way is taken, and what makes its tables anew; on the CPU, where every machine has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tam
from tam.kernels import native, way_of
from tests.helpers import TORQUE, assert_close, gradients, parameters, params_of, train

SHAPES = [(3, 5), (7,), (2, 2)]


def test_none_means_fused_where_every_parameter_can() -> None:
    assert way_of(tam.TAM(parameters(SHAPES))) == "fused"
    assert way_of(tam.AdaTAMW(parameters(SHAPES, torch.bfloat16))) == "fused"
    assert way_of(tam.TAM(parameters(SHAPES, torch.float16))) == "loop"
    assert way_of(tam.TAM([*parameters(SHAPES), *parameters(SHAPES, torch.float16)])) == "loop"
    assert way_of(tam.TAM(parameters(SHAPES), fused=False)) == "loop"
    assert way_of(tam.TAM(parameters(SHAPES), foreach=True)) == "foreach"
    assert way_of(tam.TAM(parameters(SHAPES), foreach=False)) == "loop"
    assert way_of(tam.TAM(parameters(SHAPES), differentiable=True)) == "pure"
    assert way_of(tam.TAM([torch.zeros(3, device="meta", requires_grad=True)])) == "foreach"
    assert way_of(tam.AngularGrad(parameters(SHAPES))) == "loop"


class Wrapped(torch.Tensor):
    """A tensor subclass the kernels know nothing of."""


def test_tensor_subclasses_are_left_to_torch() -> None:
    p = torch.randn(3).as_subclass(Wrapped).requires_grad_()
    optimizer = tam.TAM([p])
    assert way_of(optimizer) == "loop"
    train(optimizer, 2)


REFUSED: list[tuple[Any, str]] = [
    (lambda: parameters(SHAPES, torch.float16), "torch.float16; on cpu the kernel takes float32"),
    (lambda: [torch.zeros(3, device="meta", requires_grad=True)], "no fused kernel for meta devices"),
    (lambda: [torch.randn(20)[::2].requires_grad_()], "has gaps in memory"),
    (lambda: [torch.randn(3, 1).expand(3, 4).requires_grad_()], "has gaps in memory"),
    (lambda: [torch.randn(3).as_subclass(Wrapped).requires_grad_()], "a parameter is a Wrapped"),
    (
        lambda: [torch.zeros(3, requires_grad=True), torch.zeros(3, device="meta", requires_grad=True)],
        "several devices: cpu, meta",
    ),
]


@pytest.mark.parametrize("make, why", REFUSED)
@pytest.mark.parametrize("cls", TORQUE)
def test_fused_true_where_it_cannot_be_done_says_why(cls: type, make: Any, why: str) -> None:
    optimizer = cls(make(), fused=True)
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match=f"fused=True cannot be done: .*{why}"):
        optimizer.step()
    assert len(optimizer.state) == 0


def test_without_the_kernel_torchs_operations_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: "the CPU kernel was not built")
    optimizer = train(tam.TAM(parameters(SHAPES)), 2)
    assert way_of(optimizer) == "loop"
    assert tam.kernels.available()["cpu"] == "the CPU kernel was not built"
    with pytest.raises(RuntimeError, match="was not built"):
        train(tam.TAM(parameters(SHAPES), fused=True), 1)


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_whatever_changes_between_steps_is_noticed(cls: type, scope: str) -> None:
    a = cls(parameters(SHAPES), scope=scope, fused=True)
    b = cls(parameters(SHAPES), scope=scope, foreach=False)
    key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
    for step in range(14):
        for optimizer in (a, b):
            params = params_of(optimizer)
            if step == 2:  # a state tensor is replaced
                optimizer.state[params[1]][key] = optimizer.state[params[1]][key] * 0.5
            if step == 3:  # the parameters move
                for p in params:
                    p.data = p.data.clone()
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 5:
                optimizer.add_param_group({"params": parameters([(9,)]), "lr": 0.3})
                params = params_of(optimizer)
            if step == 6:
                optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
            if step == 7:
                optimizer.param_groups[0]["lr"].fill_(0.03)  # in place
            if step == 8:
                for group in optimizer.param_groups:
                    group["smoothing"] = 0.5
            if step == 9:
                optimizer.param_groups[0]["maximize"] = True
            if step == 10:  # all of a parameter's state
                optimizer.state[params[0]] = {k: v.clone() for k, v in optimizer.state[params[0]].items()}
                s = optimizer.state[params[1]]["alignment"]
                optimizer.state[params[0]]["alignment"] = s if scope != "tensor" else s.clone()
            if step == 11:  # the parameters become float64
                for p in params:
                    p.data = p.data.double()
            for j, (p, g) in enumerate(zip(params, gradients(params, step), strict=True)):
                p.grad = None if (j + step) % 4 == 0 else g
            optimizer.step()
        assert_close(a.alignment, b.alignment, 1e-5, scale=1.0)
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert p.dtype == q.dtype == torch.float64
        assert_close(p, q, 2e-5)


@pytest.mark.parametrize("cls", TORQUE)
def test_gradients_of_other_strides_and_dtypes(cls: type) -> None:
    a = cls(parameters([(6, 4)]), fused=True)
    b = cls(parameters([(6, 4)]), foreach=False)
    for step in range(4):
        g = gradients(params_of(b), step)[0]
        params_of(a)[0].grad = g.t().contiguous().t()  # the same gradient, laid out otherwise
        params_of(b)[0].grad = g
        a.step()
        b.step()
    assert_close(params_of(a)[0], params_of(b)[0], 2e-5)


def test_shared_options_that_come_to_differ_are_refused() -> None:
    groups = [{"params": parameters(SHAPES)}, {"params": parameters([(4,)])}]
    optimizer = train(tam.TAM(groups), 2)
    optimizer.param_groups[1]["smoothing"] = 0.5
    with pytest.raises(ValueError, match="smoothing must be the same"):
        train(optimizer, 1)


def test_eager_and_compiled_steps_may_alternate() -> None:
    torch._dynamo.reset()
    a, b = tam.TAM(parameters(SHAPES), lr=0.01), tam.TAM(parameters(SHAPES), lr=0.01)
    compiled = torch.compile(b.step, backend="aot_eager")
    for step in range(4):
        for optimizer in (a, b):
            for p, g in zip(params_of(optimizer), gradients(params_of(a), step), strict=True):
                p.grad = g.clone()
        a.step()
        compiled() if step % 2 else b.step()
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert_close(p, q, 2e-5)


def test_a_dead_optimizer_leaves_nothing_behind() -> None:
    import gc
    import weakref

    p = parameters([(5,)])[0]
    optimizer = train(tam.TAM([p]), 2)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("cls", TORQUE)
def test_copies_have_tables_of_their_own(cls: type) -> None:
    optimizer = train(cls(parameters(SHAPES)), 2)
    twin = copy.deepcopy(optimizer)
    before = [p.detach().clone() for p in params_of(twin)]
    train(optimizer, 2, start=2)
    assert all(torch.equal(p, q) for p, q in zip(params_of(twin), before, strict=True))
    train(twin, 2, start=2)
    assert all(torch.equal(p, q) for p, q in zip(params_of(twin), params_of(optimizer), strict=True))
