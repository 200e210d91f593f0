"""Warmup: one optimizer for some steps, then another."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, LRScheduler, OneCycleLR

import tam
from tests.helpers import code_in, gradients, parameters, params_of, tensors, train

SHAPES = [(6, 5), (4,), ()]
SWITCH = 5


def tam_to_sgd(**options: Any) -> tam.Warmup:
    return tam.Warmup(tam.TAM(parameters(SHAPES), lr=0.02, weight_decay=1e-3), SGD, SWITCH, **options)


def adamw_to_adatamw() -> tam.Warmup:
    return tam.Warmup(AdamW(parameters(SHAPES), lr=1e-3), tam.AdaTAMW, SWITCH)


def adatam_to_adam() -> tam.Warmup:
    return tam.Warmup(tam.AdaTAM(parameters(SHAPES), lr=1e-3, scope="tensor"), Adam, SWITCH)


def tam_to_adam() -> tam.Warmup:
    return tam.Warmup(tam.TAM(parameters(SHAPES), lr=0.02), lambda groups: Adam(groups, lr=1e-3), SWITCH)


PAIRS: list[Callable[[], tam.Warmup]] = [tam_to_sgd, adamw_to_adatamw, adatam_to_adam, tam_to_adam]


def assert_same(a: Optimizer, b: Optimizer) -> None:
    left, right = tensors(a), tensors(b)
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("buffers", [None, "keep", "rescale", "fresh"])
def test_it_is_a_hand_over_after_so_many_steps(buffers: str | None) -> None:
    warmup = train(tam_to_sgd(buffers=buffers), SWITCH)
    assert isinstance(warmup, tam.Warmup) and isinstance(warmup, Optimizer)
    assert warmup.switched and isinstance(warmup.optimizer, SGD)
    first = train(tam.TAM(parameters(SHAPES), lr=0.02, weight_decay=1e-3), SWITCH)
    second = train(tam.handover(first, SGD, buffers=buffers), 7, start=SWITCH)
    assert_same(train(warmup, 7, start=SWITCH), second)


def test_a_function_may_make_the_second_optimizer() -> None:
    warmup = train(tam_to_adam(), SWITCH + 6)
    first = train(tam.TAM(parameters(SHAPES), lr=0.02), SWITCH)
    assert_same(warmup, train(tam.handover(first, Adam, lr=1e-3), 6, start=SWITCH))


def test_buffers_are_carried_into_what_a_function_makes() -> None:
    then = lambda groups: SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-3)  # noqa: E731
    first = tam.TAM(parameters(SHAPES), lr=0.02, weight_decay=1e-3)
    assert_same(train(tam.Warmup(first, then, SWITCH), 9), train(tam_to_sgd(), 9))


@pytest.mark.parametrize("pair", PAIRS)
def test_schedulers_hold_on_to_one_list_of_groups(pair: Callable[[], tam.Warmup]) -> None:
    warmup = pair()
    base = warmup.param_groups[0]["lr"]
    scheduler = LambdaLR(warmup, lambda t: 1 / (t + 1))
    groups, group = warmup.param_groups, warmup.param_groups[0]
    ratio = group["warmup_ratio"]
    for t in range(SWITCH + 4):
        train(warmup, 1, start=t)
        used = warmup.optimizer.param_groups[0]["lr"]
        if t >= SWITCH:
            assert used == pytest.approx(base / (t + 1) * ratio)
        scheduler.step()
        assert warmup.param_groups is groups and groups[0] is group
        assert group["lr"] == pytest.approx(base / (t + 2))
    expected = {"tam_to_sgd": 0.5, "adamw_to_adatamw": 0.2, "adatam_to_adam": 5.0, "tam_to_adam": 0.05}
    assert ratio == pytest.approx(expected[pair.__name__])


@pytest.mark.parametrize("scheduler_of", [
    lambda o: LambdaLR(o, lambda t: 0.9**t),
    lambda o: OneCycleLR(o, 0.1, total_steps=20),
    lambda o: CosineAnnealingLR(o, 20),
])  # fmt: skip
@pytest.mark.parametrize("saved_at", [SWITCH - 2, SWITCH, SWITCH + 3])
@pytest.mark.parametrize("pair", PAIRS[:3])
def test_it_resumes_to_the_bit(
    pair: Callable[[], tam.Warmup], saved_at: int, scheduler_of: Callable[[Optimizer], LRScheduler]
) -> None:
    def go(warmup: tam.Warmup, scheduler: LRScheduler, start: int, stop: int) -> None:
        for t in range(start, stop):
            train(warmup, 1, start=t)
            scheduler.step()

    whole = pair()
    go(whole, scheduler_of(whole), 0, SWITCH + 8)
    part = pair()
    scheduler = scheduler_of(part)
    go(part, scheduler, 0, saved_at)
    file = io.BytesIO()
    torch.save([part.state_dict(), scheduler.state_dict(), params_of(part)], file)
    file.seek(0)
    state, scheduler_state, params = torch.load(file, weights_only=False)
    again = pair()
    again_scheduler = scheduler_of(again)
    with torch.no_grad():
        for p, q in zip(params_of(again), params, strict=True):
            p.copy_(q)
    again.load_state_dict(state)
    again_scheduler.load_state_dict(scheduler_state)
    assert again.switched == (saved_at >= SWITCH)
    go(again, again_scheduler, saved_at, SWITCH + 8)
    assert_same(again, whole)
    assert again.param_groups[0]["lr"] == whole.param_groups[0]["lr"]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_lr_in_use_is_shown_after_a_step_of_the_scheduler_and_after_a_load(
    pair: Callable[[], tam.Warmup],
) -> None:
    ratio = {"tam_to_sgd": 0.5, "adamw_to_adatamw": 0.2, "adatam_to_adam": 5.0, "tam_to_adam": 0.05}
    warmup = pair()
    base = warmup.param_groups[0]["lr"]
    scheduler = LambdaLR(warmup, lambda t: 1 / (t + 1))
    for t in range(SWITCH + 2):
        train(warmup, 1, start=t)
        scheduler.step()
        used = base / (t + 2) * (ratio[pair.__name__] if warmup.switched else 1.0)
        assert warmup.optimizer.param_groups[0]["lr"] == pytest.approx(used)
    loaded = pair()
    loaded.load_state_dict(warmup.state_dict())
    assert loaded.optimizer.param_groups[0]["lr"] == pytest.approx(used)
    assert loaded.optimizer.param_groups[0]["initial_lr"] == pytest.approx(base * ratio[pair.__name__])
    assert loaded.param_groups[0]["lr"] == pytest.approx(base / (SWITCH + 3))
    assert loaded.param_groups[0]["initial_lr"] == base


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)])
def test_a_loaded_warmup_is_handed_over_like_the_one_that_was_saved(lr: float | Tensor) -> None:
    """Back at AdamW, lr and weight decay are those it began with, times what the scheduler did to lr."""

    def make() -> tam.Warmup:
        first = AdamW(parameters(SHAPES), lr=copy.copy(lr), weight_decay=0.1, foreach=False)
        return tam.Warmup(first, tam.AdaTAMW, SWITCH)

    warmup = make()
    scheduler = LambdaLR(warmup, lambda t: 0.5**t)
    train(warmup, SWITCH + 1)
    scheduler.step()
    loaded = make()
    loaded.load_state_dict(copy.deepcopy(warmup.state_dict()))
    for each in (warmup, loaded):
        group = tam.handover(each.optimizer, AdamW, scheduler=[]).param_groups[0]
        assert float(group["lr"]) == pytest.approx(5e-4)
        assert float(group["initial_lr"]) == pytest.approx(1e-3)
        assert float(group["weight_decay"]) == pytest.approx(0.1)


def test_a_checkpoint_can_be_read_without_pickle() -> None:
    file = io.BytesIO()
    torch.save(train(tam_to_sgd(), SWITCH + 1).state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][0]["warmup_step"] == SWITCH + 1


def test_it_goes_back_to_a_checkpoint_from_before_the_switch() -> None:
    warmup = train(tam_to_sgd(), 2)
    saved = copy.deepcopy((warmup.state_dict(), [p.detach() for p in params_of(warmup)]))
    train(warmup, 6, start=2)
    assert warmup.switched
    expected = [x.clone() for x in tensors(warmup)]
    warmup.load_state_dict(saved[0])
    assert not warmup.switched and isinstance(warmup.optimizer, tam.TAM)
    with torch.no_grad():
        for p, q in zip(params_of(warmup), saved[1], strict=True):
            p.copy_(q)
    train(warmup, 6, start=2)
    assert all(torch.equal(x, y) for x, y in zip(tensors(warmup), expected, strict=True))


def test_the_ratio_and_the_number_of_steps_are_the_checkpoints() -> None:
    warmup = train(tam_to_sgd(), 2)
    other = tam.Warmup(tam.TAM(parameters(SHAPES), lr=0.5, momentum=0.5), SGD, 99)
    other.load_state_dict(state_dict=warmup.state_dict())
    assert other.param_groups[0]["warmup_steps"] == SWITCH and other.param_groups[0]["lr"] == 0.02
    with pytest.raises(ValueError, match="no checkpoint of a Warmup"):
        other.load_state_dict(tam.TAM(parameters(SHAPES)).state_dict())


def test_a_bad_checkpoint_changes_nothing() -> None:
    warmup = train(tam_to_sgd(), 2)
    before = [x.clone() for x in tensors(warmup)]
    state = copy.deepcopy(warmup.state_dict())
    state["state"][0]["momentum_buffer"] = torch.zeros(2)
    with pytest.raises(ValueError, match="shape"):
        warmup.load_state_dict(state)
    assert all(torch.equal(x, y) for x, y in zip(tensors(warmup), before, strict=True))
    train(warmup, 1)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda w: torch.load(_saved(w), weights_only=False)])
@pytest.mark.parametrize("at", [2, SWITCH + 2])
def test_copies_go_on_by_themselves(copier: Callable[[tam.Warmup], tam.Warmup], at: int) -> None:
    warmup = train(tam_to_sgd(), at)
    twin = copier(warmup)
    assert_same(train(twin, 7, start=at), train(warmup, 7, start=at))
    assert params_of(twin)[0] is not params_of(warmup)[0]


def _saved(warmup: tam.Warmup) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(warmup, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("pair", PAIRS)
def test_under_grad_scaler(pair: Callable[[], tam.Warmup]) -> None:
    """As without a scaler on the same gradients; a step with an infinite gradient is skipped."""
    plain, scaled = pair(), pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(SWITCH + 4):
        train(plain, 1, start=t)
        factor = scaler.scale(torch.ones(()))
        for p, g in zip(params_of(scaled), gradients(params_of(scaled), t), strict=True):
            p.grad = g * factor
        scaler.step(scaled)
        scaler.update()
        if t == 2:
            before = [x.clone() for x in tensors(scaled)]
            for p in params_of(scaled):
                p.grad = torch.full_like(p, float("inf"))
            scaler.step(scaled)
            scaler.update()
            assert all(torch.equal(x, y) for x, y in zip(tensors(scaled), before, strict=True))
            if scaled.param_groups[0]["warmup_step"] == 4:  # a skip inside the step counts
                plain.param_groups[0]["warmup_step"] += 1
    assert not hasattr(scaled.optimizer, "found_inf")
    assert_same(scaled, plain)


def test_closures_and_hooks() -> None:
    warmup = tam_to_sgd()
    calls: list[str] = []
    warmup.register_step_pre_hook(lambda *_: calls.append("before"))
    warmup.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        calls.append("closure")
        for p, g in zip(params_of(warmup), gradients(params_of(warmup), len(calls) // 3), strict=True):
            p.grad = g
        return 2.5

    for _ in range(SWITCH + 2):
        assert warmup.step(closure) == 2.5
    assert calls == ["before", "closure", "after"] * (SWITCH + 2)
    assert_same(warmup, train(tam_to_sgd(), SWITCH + 2))
    warmup.zero_grad()
    assert all(p.grad is None for p in params_of(warmup))


@pytest.mark.parametrize("pair", [tam_to_sgd, adamw_to_adatamw])
def test_torch_compile(pair: Callable[[], tam.Warmup]) -> None:
    torch._dynamo.reset()
    warmup, plain = pair(), train(pair(), SWITCH + 3)
    compiled = torch.compile(warmup.step, backend="eager")
    params = params_of(warmup)
    for t in range(SWITCH + 3):
        for p, g in zip(params, gradients(params, t), strict=True):
            p.grad = g
        compiled()
    for x, y in zip(tensors(warmup), tensors(plain), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


def test_lr_may_be_a_tensor() -> None:
    lr = torch.tensor(0.02)
    warmup = tam.Warmup(tam.TAM(parameters(SHAPES), lr=lr, weight_decay=1e-3), SGD, SWITCH)
    plain = train(tam_to_sgd(), SWITCH)
    train(warmup, SWITCH)
    lr.mul_(0.5)
    plain.param_groups[0]["lr"] *= 0.5
    train(warmup, 2, start=SWITCH)
    inner = warmup.optimizer.param_groups[0]["lr"]
    lr.mul_(0.5)
    plain.param_groups[0]["lr"] *= 0.5
    train(plain, 1, start=SWITCH + 2), train(warmup, 1, start=SWITCH + 2)
    assert warmup.param_groups[0]["lr"] is lr and float(inner) == float(lr) / 2
    assert warmup.optimizer.param_groups[0]["lr"] is inner  # one tensor, written to


def test_options_are_those_of_the_optimizer_at_work_and_can_be_changed() -> None:
    warmup = train(tam_to_sgd(), SWITCH)
    group = warmup.param_groups[0]
    assert "smoothing" not in group and group["nesterov"] is False and group["weight_decay"] == 1e-3
    assert group["lr"] == 0.02
    group["momentum"], group["weight_decay"] = 0.5, 0.0
    train(warmup, 1, start=SWITCH)
    inner = warmup.optimizer.param_groups[0]
    assert inner["momentum"] == 0.5 and inner["weight_decay"] == 0.0 and inner["lr"] == 0.01


@pytest.mark.parametrize("at", [2, SWITCH + 2])
def test_a_group_can_be_added(at: int) -> None:
    warmup = train(tam_to_sgd(), at)
    (q,) = parameters([(3,)], seed=9)
    start = q.detach().clone()
    warmup.add_param_group({"params": [q], "lr": 0.04})
    train(warmup, 9 - at, start=at)
    assert warmup.switched and len(warmup.optimizer.param_groups) == len(warmup.param_groups) == 2
    assert warmup.param_groups[1]["lr"] == 0.04 and warmup.optimizer.param_groups[1]["lr"] == 0.02
    assert not torch.equal(q, start) and q in warmup.state
    with pytest.raises(ValueError):
        warmup.add_param_group({"params": [q]})
    again = tam.Warmup(tam.TAM([{"params": params_of(warmup)[:3]}, {"params": [q]}]), SGD, SWITCH)
    again.load_state_dict(warmup.state_dict())
    assert again.switched


def sgd_to_tam() -> tam.Warmup:
    return tam.Warmup(SGD(parameters(SHAPES), lr=0.02, momentum=0.9), tam.TAM, SWITCH)


def tam_to_adam_in_float64() -> tam.Warmup:
    first = tam.TAM(parameters(SHAPES, torch.float64), lr=0.02)
    return tam.Warmup(first, lambda groups: Adam(groups, lr=1e-3), SWITCH)


@pytest.mark.parametrize("pair, at, options, message", [
    (sgd_to_tam, 2, {"nesterov": True}, "nesterov=True"),
    (sgd_to_tam, SWITCH + 2, {"lr": -1.0}, "lr must be"),
    (tam_to_adam, 2, {"lr": 0.0}, "lr is 0"),
    (tam_to_adam_in_float64, 2, {"lr": 0.0}, "lr is 0"),  # with float32 parameters, s would be float32
    (adamw_to_adatamw, 2, {"eps": -1.0}, "eps must be"),  # AdamW has taken it
])  # fmt: skip
def test_a_group_that_is_refused_changes_nothing(
    pair: Callable[[], tam.Warmup], at: int, options: dict[str, Any], message: str
) -> None:
    warmup, twin = pair(), pair()
    train(warmup, at), train(twin, at)
    added = parameters([(3,)], seed=9)
    before = tensors(warmup)
    with pytest.raises(ValueError, match=message):
        warmup.add_param_group({"params": added, **options})
    assert {len(each.param_groups) for each in (warmup, warmup.first, warmup.optimizer)} == {1}
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(tensors(warmup), before, strict=True))
    assert_same(warmup, twin)
    assert_same(train(warmup, 7, start=at), train(twin, 7, start=at))
    warmup.add_param_group({"params": added})
    train(warmup, 1)


@pytest.mark.parametrize("scheduler", [
    lambda o: OneCycleLR(o, 0.1, total_steps=20), lambda o: CyclicLR(o, 0.01, 0.1),
])  # fmt: skip
def test_a_momentum_that_is_cycled_into_betas_is_refused(
    scheduler: Callable[[Optimizer], LRScheduler],
) -> None:
    warmup = tam_to_adam()
    scheduler(warmup)
    with pytest.raises(
        RuntimeError, match=r"cycles the momentum, .*'momentum'.*'betas'.*cycle_momentum=False"
    ):
        train(warmup, 1)


def test_one_that_leaves_the_momentum_alone_is_not() -> None:
    warmup = tam_to_adam()
    scheduler = OneCycleLR(warmup, 0.1, total_steps=20, cycle_momentum=False)
    for t in range(SWITCH + 3):
        train(warmup, 1, start=t)
        scheduler.step()
    warmup.param_groups[0]["momentum"] = 0.9  # as a scheduler of one's own might
    with pytest.raises(RuntimeError, match="cycles the momentum"):
        train(warmup, 1)


def test_a_scheduler_may_cycle_a_momentum_both_have() -> None:
    warmup = tam_to_sgd()
    scheduler = OneCycleLR(warmup, 0.1, total_steps=20)
    seen = []
    for t in range(SWITCH + 3):
        train(warmup, 1, start=t)
        seen.append(warmup.optimizer.param_groups[0]["momentum"])
        scheduler.step()
    assert len(set(seen)) == SWITCH + 3


@pytest.mark.parametrize("buffers", [None, "keep", "fresh"])
@pytest.mark.parametrize("cls, to, decay", [(AdamW, tam.AdaTAMW, 0.1), (tam.AdaTAMW, AdamW, 0.5)])
def test_it_switches_with_the_beta1_of_the_scheduler(
    cls: type[Optimizer], to: type[Optimizer], decay: float, buffers: str | None
) -> None:
    """Like a hand-over at the same step: lr, weight decay and buffers go by one beta1."""

    def make() -> Optimizer:
        return cls(parameters(SHAPES), lr=1e-3, weight_decay=decay)

    def go(optimizer: Optimizer, scheduler: LRScheduler, start: int, stop: int) -> None:
        for t in range(start, stop):
            train(optimizer, 1, start=t)
            scheduler.step()

    warmup = tam.Warmup(make(), to, SWITCH, buffers=buffers)
    go(warmup, OneCycleLR(warmup, 0.01, total_steps=40), 0, SWITCH + 2)
    first = make()
    scheduler = OneCycleLR(first, 0.01, total_steps=40)
    go(first, scheduler, 0, SWITCH - 1)
    train(first, 1, start=SWITCH - 1)
    beta1, lr = first.param_groups[0]["betas"][0], first.param_groups[0]["lr"]
    assert 0.87 < beta1 < 0.94
    ratio = 2 * (1 - beta1) if cls is AdamW else 1 / (2 * (1 - beta1))
    second = tam.handover(first, to, buffers=buffers, scheduler=scheduler)
    assert second.param_groups[0]["lr"] == pytest.approx(lr * ratio)
    scheduler.step()
    go(second, scheduler, SWITCH, SWITCH + 2)
    assert warmup.param_groups[0]["warmup_ratio"] == pytest.approx(ratio)
    for name in ("lr", "weight_decay", "betas"):
        assert warmup.optimizer.param_groups[0][name] == pytest.approx(second.param_groups[0][name])
    for x, y in zip(tensors(warmup.optimizer), tensors(second), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


def test_parameters_without_gradients_and_first_gradients_after_the_switch() -> None:
    warmup = tam_to_sgd()
    params = params_of(warmup)
    for t in range(SWITCH + 2):
        grads = gradients(params, t)
        params[0].grad = grads[0]
        params[1].grad = grads[1] if t > SWITCH else None
        warmup.step()
    assert set(warmup.state) >= {params[0], params[1]} and not warmup.state.get(params[2])


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"steps": 0}, ValueError, "steps must be a whole number above 0, got 0"),
        ({"steps": -3}, ValueError, "steps .* got -3"),
        ({"steps": 2.5}, ValueError, "steps .* got 2.5"),
        ({"steps": True}, ValueError, "steps .* got True"),
        ({"first": SGD}, TypeError, "first must be an optimizer"),
        ({"then": 3}, TypeError, "then must be an optimizer class or a function"),
        ({"then": Adam}, ValueError, r"no rule gives the lr of Adam.*lambda groups: Adam\(groups, lr=...\)"),
        ({"then": lambda groups: 3}, TypeError, "then must make an optimizer, got a int"),
        (
            {"then": lambda groups: SGD(groups[0]["params"][:1], lr=1)},
            ValueError,
            "must have the parameters it is given",
        ),
        ({"buffers": "kept"}, ValueError, 'buffers must be .* got "kept"'),
        (
            {"then": lambda groups: Adam(groups), "buffers": "keep"},
            ValueError,
            'buffers must be "fresh" from TAM to Adam',
        ),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tam.Warmup(**{"first": tam.TAM(parameters(SHAPES)), "then": SGD, "steps": 3, **change})


def test_a_checkpoint_of_another_pair() -> None:
    saved = train(tam_to_sgd(), SWITCH + 1).state_dict()
    other = tam_to_adam()
    with pytest.raises(ValueError, match="of another optimizer than Adam: its groups have no 'betas'"):
        other.load_state_dict(saved)
    assert not other.switched


def test_s_may_be_given() -> None:
    first = tam.TAM(parameters(SHAPES), lr=0.02)
    warmup = train(tam.Warmup(first, SGD, SWITCH, buffers="rescale", alignment=0.5), SWITCH)
    assert warmup.param_groups[0]["warmup_ratio"] == 0.75
    first = train(tam.TAM(parameters(SHAPES), lr=0.02), SWITCH)
    second = train(tam.handover(first, SGD, buffers="rescale", alignment=0.5), 3, start=SWITCH)
    assert_same(train(warmup, 3, start=SWITCH), second)


@pytest.mark.parametrize(
    "first, then, name",
    [
        (lambda ps: tam.AdaTAM(ps), lambda g: Adam(g, lr=1e-3, amsgrad=True), "amsgrad"),
        (lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True), lambda g: tam.TAM(g, lr=0.2), "nesterov"),
        (lambda ps: SGD(ps, lr=0.1, momentum=0.9, dampening=0.5), lambda g: tam.TAM(g, lr=0.2), "dampening"),
    ],
)
def test_a_function_does_not_get_around_what_is_refused(first: Any, then: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        tam.Warmup(first(parameters(SHAPES)), then, 2)
    train(tam.Warmup(first(parameters(SHAPES)), then, 2, buffers="fresh"), 4)


@pytest.mark.parametrize("then", [tam.TAM, lambda groups: tam.TAM(groups, lr=0.2)])
def test_a_sparse_momentum_is_refused_at_the_switch(then: Any) -> None:
    def go(buffers: str | None) -> tam.Warmup:
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        first = SGD(embedding.parameters(), lr=0.1, momentum=0.9)
        warmup = tam.Warmup(first, then, 1, buffers=buffers)
        embedding(torch.tensor([1, 2])).sum().backward()
        try:
            warmup.step()
        except ValueError:
            assert not warmup.switched and first.state[embedding.weight]["momentum_buffer"].is_sparse
            raise
        return warmup

    with pytest.raises(ValueError, match=r"parameter 0 of group 0 .* has a sparse momentum_buffer"):
        go(None)
    assert go("fresh").switched


def test_a_group_from_a_generator() -> None:
    for at in (1, SWITCH + 1):
        warmup = train(tam_to_sgd(), at)
        warmup.add_param_group({"params": (p for p in parameters([(2,), (3,)]))})
        assert [len(group["params"]) for group in warmup.param_groups] == [3, 2]


def test_a_switch_that_fails_can_be_saved_and_tried_again() -> None:
    calls = []

    def then(groups: Any) -> Optimizer:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not now")
        return SGD(groups, lr=0.01, momentum=0.9)

    warmup = train(tam.Warmup(tam.TAM(parameters(SHAPES), lr=0.02), then, 3), 2)
    with pytest.raises(RuntimeError, match="not now"):
        train(warmup, 1, start=2)
    again = tam.Warmup(tam.TAM(parameters(SHAPES), lr=0.02), then, 3)
    again.load_state_dict(warmup.state_dict())
    assert not again.switched
    train(again, 1, start=3)
    assert again.switched


def test_memory_and_defaults_follow_the_optimizer_at_work() -> None:
    warmup = train(tam_to_sgd(), SWITCH)
    assert not warmup.first.state and "smoothing" not in warmup.defaults and warmup.defaults["lr"] == 0.02
    fresh = train(tam_to_sgd(), 2)
    fresh.load_state_dict(warmup.state_dict())
    assert not fresh.first.state and fresh.switched


def test_it_is_not_handed_over_as_a_whole() -> None:
    warmup = train(tam_to_sgd(), 2)
    with pytest.raises(TypeError, match=r"Warmup wraps another optimizer: hand over its `\.optimizer`"):
        tam.handover(warmup, SGD)
    assert "warmup_steps" not in tam.handover(warmup.optimizer, SGD).param_groups[0]


def test_a_first_lr_of_zero_has_no_multiples() -> None:
    with pytest.raises(ValueError, match="lr is 0"):
        tam.Warmup(tam.TAM(parameters(SHAPES), lr=0.0), lambda groups: Adam(groups, lr=1e-3), 3)


def test_nesterov_is_refused_before_the_training_begins_and_the_ways_out_work() -> None:
    first = SGD(parameters(SHAPES), lr=0.1, momentum=0.9, nesterov=True)
    then = lambda groups: tam.TAM(groups, lr=0.2)  # noqa: E731
    with pytest.raises(ValueError, match=r'nesterov=True.*, or give .*function.*buffers="fresh"') as by_class:
        tam.Warmup(first, tam.TAM, 3)
    with pytest.raises(ValueError, match=r'nesterov=True.*, or give buffers="fresh"') as by_function:
        tam.Warmup(first, then, 3)
    assert train(tam.Warmup(first, then, 3, buffers="fresh"), 4)
    for error in (by_class, by_function):
        first = SGD(parameters(SHAPES), lr=0.1, momentum=0.9, nesterov=True)
        exec(code_in(error), {"first": first})
        assert train(tam.Warmup(first, tam.TAM, 3), 4)


# ---------------------------------------------------------------------- readings


@pytest.mark.parametrize("pair", [tam_to_sgd, adamw_to_adatamw, adatam_to_adam])
def test_the_readings_are_those_of_the_optimizer_at_work(pair: Callable[[], tam.Warmup]) -> None:
    warmup = pair()
    seen = []
    for t in range(SWITCH + 2):
        train(warmup, 1, start=t)
        active = warmup.optimizer
        seen.append(isinstance(active, (tam.TAM, tam.AdaTAM)))
        for name in ("alignment", "damping", "grad_norm"):
            assert hasattr(warmup, name) == seen[-1]
            if seen[-1]:
                assert torch.equal(getattr(warmup, name), getattr(active, name))
            else:
                with pytest.raises(
                    AttributeError, match=f"no {name} now: {type(active).__name__} is at work"
                ):
                    getattr(warmup, name)
    assert set(seen) == {True, False}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda w: torch.load(_saved(w), weights_only=False)])
def test_copies_keep_the_given_s(copier: Callable[[tam.Warmup], tam.Warmup]) -> None:
    warmup = train(tam_to_sgd(buffers="rescale", alignment=0.5), 2)
    twin = copier(warmup)
    assert torch.equal(twin.alignment, warmup.alignment)
    assert_same(train(twin, 7, start=2), train(warmup, 7, start=2))
    assert twin.optimizer.param_groups[0]["lr"] == pytest.approx(0.75 * 0.02)


def test_a_pickle_from_when_alignment_was_the_given_s() -> None:
    warmup = train(tam_to_sgd(buffers="rescale", alignment=0.5), 2)
    state = warmup.__getstate__()
    state["alignment"] = state.pop("settled_alignment")
    old = tam.Warmup.__new__(tam.Warmup)
    old.__setstate__(state)
    assert torch.equal(old.alignment, warmup.alignment)
    assert_same(train(copy.deepcopy(old), 7, start=2), train(copy.deepcopy(warmup), 7, start=2))


def test_a_pickle_from_when_the_class_was_in_another_module() -> None:
    warmup = train(tam_to_sgd(), SWITCH + 1)
    old = pickle.dumps(warmup, protocol=2).replace(b"ctam.switching.warmup\n", b"ctam.warmup\n")
    assert b"tam.switching" not in old
    assert_same(train(pickle.loads(old), 3), train(warmup, 3))


def test_repr_names_the_optimizer_at_work_and_the_steps_left() -> None:
    warmup = tam_to_sgd()
    for t in range(SWITCH):
        assert repr(warmup).startswith(f"Warmup (TAM at work, {SWITCH - t} of {SWITCH} warm-up steps left\n")
        train(warmup, 1, start=t)
    train(warmup, 2)
    assert repr(warmup).startswith(
        f"Warmup (SGD at work, 0 of {SWITCH} warm-up steps left\nParameter Group 0"
    )


# ---------------------------------------------------------------------- schedulers


@pytest.mark.parametrize("pair", PAIRS)
def test_its_own_switch_warns_of_no_scheduler(pair: Callable[[], tam.Warmup]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a scheduler sets")
        warmup = pair()
        scheduler = LambdaLR(warmup, lambda t: 0.9**t)
        for t in range(SWITCH + 2):
            train(warmup, 1, start=t)
            scheduler.step()


def test_a_scheduler_of_the_first_optimizer_is_warned_of() -> None:
    """It would go on with the first one after the switch."""
    first = tam.TAM(parameters(SHAPES))
    LambdaLR(first, lambda t: 0.9**t)
    with pytest.warns(UserWarning, match="make the scheduler on the Warmup"):
        tam.Warmup(first, SGD, 3)


def test_it_can_switch_before_its_time() -> None:
    first = tam.TAM(parameters(SHAPES), lr=0.02, weight_decay=1e-3)
    early, late = train(tam_to_sgd(), 2), train(tam.Warmup(first, SGD, 2), 2)
    early.switch()
    early.switch()  # it has
    assert early.switched and late.switched
    assert_same(early.optimizer, late.optimizer)
    again = tam_to_sgd()
    again.load_state_dict(early.state_dict())
    assert again.switched
