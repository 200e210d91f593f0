"""The hand-over to another optimizer on the same parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import tam
from tests.helpers import assert_same, code_in, gradients, parameters, params_of, train

SHAPES = [(5, 4), (7,), ()]


def make(cls: type[Optimizer], dtype: torch.dtype = torch.float64, **options: Any) -> Optimizer:
    if cls is SGD:
        options = {"momentum": 0.9, **options}
    return cls(parameters(SHAPES, dtype), **{"lr": 0.01, **options})


def copy_of(optimizer: Optimizer, cls: type[Optimizer], **options: Any) -> Optimizer:
    """An optimizer on copies of the parameters, so that both can go on."""
    return cls([torch.nn.Parameter(p.detach().clone()) for p in params_of(optimizer)], **options)


def step_of(optimizer: Optimizer, grads: list[Tensor]) -> list[Tensor]:
    before = [p.detach().clone() for p in params_of(optimizer)]
    for p, g in zip(params_of(optimizer), grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    return [b - p.detach() for b, p in zip(before, params_of(optimizer), strict=True)]


def assert_close(a: list[Tensor], b: list[Tensor], rel: float = 1e-12) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rel, atol=0.0)


# ---------------------------------------------------------------------- SGD and TAM


def test_from_tam_to_sgd_keeps_the_momentum_and_halves_lr() -> None:
    first = train(make(tam.TAM, weight_decay=1e-4), 5)
    m = [first.state[p]["momentum_buffer"].clone() for p in params_of(first)]
    new = tam.handover(first, SGD)
    assert type(new) is SGD
    group = new.param_groups[0]
    assert group["lr"] == 0.005 and group["momentum"] == 0.9 and group["weight_decay"] == 1e-4
    assert [id(p) for p in params_of(new)] == [id(p) for p in params_of(first)]
    for p, old in zip(params_of(new), m, strict=True):
        assert set(new.state[p]) == {"momentum_buffer"}
        assert torch.equal(new.state[p]["momentum_buffer"], old)


def test_the_first_optimizer_is_left_as_it_was() -> None:
    first, twin = train(make(tam.TAM), 5), train(make(tam.TAM), 5)
    new = tam.handover(first, SGD, buffers="rescale")
    train(tam.handover(new, tam.TAM), 1)
    for p, q in zip(params_of(first), params_of(twin), strict=True):
        assert torch.equal(first.state[p]["momentum_buffer"], twin.state[q]["momentum_buffer"])
    assert first.param_groups[0]["lr"] == 0.01


def test_the_kept_momentum_makes_the_step_dip() -> None:
    """A steady gradient: the settled momentum is 5 g for TAM, and the next step 0.5 (4.5 g + g)."""
    (p,) = parameters([(3,)], torch.float64)
    first = tam.TAM([p], lr=0.01, smoothing=1.0)
    g = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)]
    for _ in range(500):
        before = step_of(first, g)
    assert_close(step_of(tam.handover(first, SGD), g), [0.55 * x for x in before], rel=1e-6)


@pytest.mark.parametrize("s", [0.0, 0.5, -0.3])
def test_rescaled_the_run_goes_on_as_if_s_were_constant(s: float) -> None:
    """TAM with s held at s* is SGD at lr (1 + s*) / 2, before the switch and after it."""
    first = make(tam.TAM, floor=0.0, smoothing=1.0)
    twin = copy_of(first, SGD, lr=0.01 * (1 + s) / 2, momentum=0.9)
    grads = [gradients(params_of(first), i) for i in range(20)]
    step_of(first, [torch.zeros_like(g) for g in grads[0]])  # makes the state
    for p in params_of(first):
        first.state[p]["alignment"].fill_(s)
    for g in grads[:10]:
        step_of(first, g)
        step_of(twin, g)
    second = tam.handover(first, SGD, buffers="rescale", alignment=s)
    for g in grads[10:15]:
        assert_close(step_of(second, g), step_of(twin, g), rel=1e-9)
    third = tam.handover(second, tam.TAM, buffers="rescale", alignment=s, smoothing=1.0, floor=0.0)
    assert isinstance(third, tam.TAM) and float(third.alignment) == pytest.approx(s)
    assert third.param_groups[0]["lr"] == pytest.approx(0.01)
    for g in grads[15:]:
        assert_close(step_of(third, g), step_of(twin, g), rel=1e-9)


def test_from_sgd_doubles_lr_and_starts_at_the_given_alignment() -> None:
    first = train(make(SGD), 3)
    new = tam.TAM.from_sgd(first)
    assert type(new) is tam.TAM and new.param_groups[0]["lr"] == 0.02 and float(new.alignment) == 0
    assert float(tam.TAM.from_sgd(first, alignment=0.25).alignment) == 0.25
    with pytest.raises(TypeError, match="from_sgd takes torch's SGD, not TAM"):
        tam.TAM.from_sgd(new)
    with pytest.raises(TypeError, match=r"not Adam: use tam\.AdaTAM\.from_adam, or tam\.handover"):
        tam.TAM.from_sgd(make(Adam))
    with pytest.raises(TypeError, match=r"not SGD: use tam\.TAM\.from_sgd, or tam\.handover"):
        tam.AdaTAM.from_adam(first)


def test_floor_half_and_smoothing_one_change_nothing() -> None:
    """TAM is then SGD itself, so that SGD -> TAM -> SGD is SGD."""
    first, twin = train(make(SGD), 4), train(make(SGD), 4)
    middle = train(tam.handover(first, tam.TAM, smoothing=1.0, floor=0.5, foreach=False), 4, start=4)
    assert middle.param_groups[0]["lr"] == 0.01
    last = train(tam.handover(middle, SGD), 4, start=8)
    assert_same(last, train(twin, 8, start=4))


def test_other_momenta() -> None:
    first = train(make(SGD, momentum=0.9), 3)
    new = tam.handover(first, tam.TAM, momentum=0.8, buffers="rescale", alignment=0.6)
    # 2 (1 - 0.8) / ((1 + 0.6) (1 - 0.9)) = 2.5; the momentum goes the other way
    assert new.param_groups[0]["lr"] == pytest.approx(0.025)
    for p in params_of(first):
        m, old = new.state[p]["momentum_buffer"], first.state[p]["momentum_buffer"]
        torch.testing.assert_close(m, old / 2.5, rtol=1e-12, atol=0.0)


def test_plain_sgd_has_no_buffers_to_carry() -> None:
    first = train(make(SGD, momentum=0.0), 2)
    new = tam.TAM.from_sgd(first)
    assert not new.state and new.param_groups[0]["momentum"] == 0.0 and new.param_groups[0]["lr"] == 0.02
    assert not tam.handover(train(new, 2), SGD).state


# ---------------------------------------------------------------------- Adam and AdaTAM


def test_from_adamw_transfers_lr_and_weight_decay() -> None:
    first = train(make(AdamW, lr=1e-3, weight_decay=0.01, betas=(0.8, 0.99), eps=1e-6), 3)
    new = tam.AdaTAMW.from_adam(first)
    group = new.param_groups[0]
    # 2 (1 - 0.8) / (1 + 0)
    assert group["lr"] == pytest.approx(4e-4) and group["weight_decay"] == pytest.approx(0.025)
    assert group["betas"] == (0.8, 0.99) and group["eps"] == 1e-6 and not group["bias_correction"]
    back = tam.handover(new, AdamW).param_groups[0]
    assert back["lr"] == pytest.approx(1e-3) and back["weight_decay"] == pytest.approx(0.01)
    same = tam.AdaTAMW.from_adam(first, ema=True).param_groups[0]
    assert same["lr"] == 1e-3 and same["weight_decay"] == 0.01
    quarter = tam.AdaTAMW.from_adam(first, alignment=0.25).param_groups[0]
    assert quarter["lr"] == pytest.approx(3.2e-4) and quarter["weight_decay"] == pytest.approx(0.03125)
    given = tam.AdaTAMW.from_adam(first, lr=0.5, weight_decay=0.125).param_groups[0]
    assert given["lr"] == 0.5 and given["weight_decay"] == 0.125


def test_coupled_decay_is_part_of_the_gradient_and_stays() -> None:
    assert tam.AdaTAM.from_adam(make(Adam, weight_decay=0.1)).param_groups[0]["weight_decay"] == 0.1
    assert tam.TAM.from_sgd(make(SGD, weight_decay=0.1)).param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("options", [{}, {"bias_correction": True}, {"ema": True}], ids=str)
@pytest.mark.parametrize("steps", [1, 7, 200])
def test_adams_buffers_and_step_count(options: dict[str, Any], steps: int) -> None:
    """m by (1 + s*) / (2 (1 - beta1)), or as it is with ema, and the corrections folded in."""
    first = train(make(Adam, lr=1e-3, betas=(0.9, 0.99)), steps)
    new = tam.AdaTAM.from_adam(first, alignment=0.2, **options)
    factor = 1.0 if options.get("ema") else 1.2 / (2 * (1 - 0.9))
    for p in params_of(first):
        old, state = first.state[p], new.state[p]
        assert int(state["step"]) == steps
        m_hat = old["exp_avg"] / (1 - 0.9**steps)
        torch.testing.assert_close(state["exp_avg"], factor * m_hat, rtol=1e-12, atol=0.0)
        v = old["exp_avg_sq"] / (1 if options.get("bias_correction") else 1 - 0.99**steps)
        torch.testing.assert_close(state["exp_avg_sq"], v, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("options", [{}, {"bias_correction": True}, {"ema": True}], ids=str)
@pytest.mark.parametrize("steps", [1, 7, 200])
@pytest.mark.parametrize("there", [True, False])
def test_rescaled_buffers_give_the_step_before(options: dict[str, Any], steps: int, there: bool) -> None:
    """lr m / (sqrt(v) + eps), as each rule corrects m and v, is the same before and after."""
    adam = {"lr": 1e-3, "betas": (0.9, 0.99)}
    if there:
        first = train(make(Adam, **adam), steps)
        new: Optimizer = tam.AdaTAM.from_adam(first, **options)
    else:
        first = train(make(tam.AdaTAM, **adam, **options), steps)
        new = tam.handover(first, Adam)
    assert_close(_direction(new), _direction(first), rel=1e-12)


def _direction(optimizer: Optimizer) -> list[Tensor]:
    group, found = optimizer.param_groups[0], []
    for p in params_of(optimizer):
        state = optimizer.state[p]
        t, plain = float(state["step"]), isinstance(optimizer, Adam)
        m = state["exp_avg"] / (1 - group["betas"][0] ** t) if plain else state["exp_avg"]
        corrected = plain or group["bias_correction"]
        v = state["exp_avg_sq"] / (1 - group["betas"][1] ** t) if corrected else state["exp_avg_sq"]
        found.append(group["lr"] * m / (v.sqrt() + group["eps"]))
    return found


def test_a_steady_gradient_notices_nothing() -> None:
    """From the first step on Adam's step on a steady gradient is lr; so is AdaTAM's after the hand-over."""
    (p,) = parameters([(3,)], torch.float64)
    g = [torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)]
    first: Optimizer = Adam([p], lr=1e-3)
    for _ in range(3):
        before = step_of(first, g)
    second = tam.AdaTAM.from_adam(first, smoothing=1.0)
    for _ in range(5):
        after = step_of(second, g)
        assert_close(after, before, rel=1e-6)
    third = tam.handover(second, AdamW)
    for _ in range(5):
        assert_close(step_of(third, g), before, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"bias_correction": True}, {"ema": True}], ids=str)
@pytest.mark.parametrize("there", [True, False])
def test_the_next_step_has_the_size_of_the_one_before(options: dict[str, Any], there: bool) -> None:
    """Real steps on a steady gradient, once v has settled; to AdaTAM at any time."""
    held = {"smoothing": 1.0, "floor": 0.0, **options}
    for steps in (1, 3, 300) if there else (300,):
        (p,) = parameters([(3,)], torch.float64)
        g = [torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)]
        adam = {"lr": 1e-3, "betas": (0.9, 0.95)}
        first: Optimizer = Adam([p], **adam) if there else tam.AdaTAM([p], **adam, **held)
        for _ in range(steps):
            before = step_of(first, g)
        second = tam.handover(first, tam.AdaTAM, **held) if there else tam.handover(first, Adam)
        for _ in range(4):
            assert_close(step_of(second, g), before, rel=1e-6)


def test_a_given_lr_keeps_the_decay_of_a_step() -> None:
    first = make(AdamW, lr=1e-3, weight_decay=0.1)
    for lr, decay in ((1e-3, 0.1), (2e-4, 0.5), (torch.tensor(2e-3), 0.05)):
        group = tam.handover(first, tam.AdaTAMW, lr=lr, foreach=False).param_groups[0]
        assert group["weight_decay"] == pytest.approx(decay)
    meta = torch.tensor(1e-3, device="meta")
    with pytest.raises(ValueError, match=r"neither weight_decay nor .*: give weight_decay="):
        tam.handover(first, tam.AdaTAMW, lr=meta)


def test_an_adam_whose_buffers_are_left_behind_gets_a_bias_correction() -> None:
    first = train(make(Adam), 3)
    assert tam.AdaTAM.from_adam(first, buffers="fresh").param_groups[0]["bias_correction"]
    assert not tam.AdaTAM.from_adam(first).param_groups[0]["bias_correction"]


def test_an_adam_that_has_not_stepped_gets_a_bias_correction() -> None:
    """Else the first steps would be seven times Adam's."""
    fresh = make(AdamW, lr=1e-3)
    assert tam.AdaTAMW.from_adam(fresh).param_groups[0]["bias_correction"]
    assert not tam.AdaTAMW.from_adam(fresh, bias_correction=False).param_groups[0]["bias_correction"]


def test_a_count_of_zero_leaves_the_buffers_at_zero() -> None:
    """Fused Adam under GradScaler has state and a count of 0 after a first step that was skipped."""
    first = train(make(Adam), 1)
    for p in params_of(first):
        for value in first.state[p].values():
            value.zero_()
    new = tam.AdaTAM.from_adam(first)
    for p in params_of(new):
        assert not new.state[p]["exp_avg"].any() and not new.state[p]["exp_avg_sq"].any()
    back = tam.handover(new, Adam)
    assert all(torch.isfinite(x).all() for s in back.state.values() for x in s.values())


def test_keep_takes_adams_buffers_as_they_are() -> None:
    first = train(make(Adam), 5)
    new = tam.AdaTAM.from_adam(first, buffers="keep")
    for p in params_of(first):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(new.state[p][key], first.state[p][key])


# ---------------------------------------------------------------------- groups, pairs, plans


def test_groups_are_carried_with_their_names_and_what_schedulers_and_users_put_there() -> None:
    a, b = parameters([(3,), (2,)])
    groups = [
        {"params": [("a", a)], "lr": 0.1, "name": "body"},
        {"params": [("b", b)], "lr": 0.4, "momentum": 0.5, "maximize": True},
    ]
    first = SGD(groups, momentum=0.9, weight_decay=1e-3, foreach=False)
    torch.optim.lr_scheduler.StepLR(first, 1)
    new = tam.TAM.from_sgd(first, scheduler=[])
    left, right = new.param_groups
    assert (left["lr"], left["initial_lr"], left["momentum"], left["name"]) == (0.2, 0.2, 0.9, "body")
    assert (right["lr"], right["initial_lr"], right["momentum"], right["maximize"]) == (0.8, 0.8, 0.5, True)
    assert left["param_names"] == ["a"] and right["param_names"] == ["b"]
    assert left["foreach"] is False and left["weight_decay"] == 1e-3
    new.add_param_group({"params": [("c", parameters([(2,)])[0])]})
    assert new.param_groups[2]["weight_decay"] == 1e-3 and new.param_groups[2]["foreach"] is False


def test_a_fused_step_is_had_where_it_can_be() -> None:
    assert tam.AdaTAM.from_adam(make(Adam, fused=True)).param_groups[0]["fused"] is None
    assert tam.AdaTAM.from_adam(make(Adam, fused=False)).param_groups[0]["fused"] is False
    assert tam.handover(make(tam.AdaTAM, fused=False), Adam).param_groups[0]["fused"] is False


def test_lr_may_be_a_tensor() -> None:
    first = make(SGD, lr=torch.tensor(0.25), foreach=False)
    new = tam.TAM.from_sgd(first)
    assert torch.equal(new.param_groups[0]["lr"], torch.tensor(0.5))
    assert torch.equal(first.param_groups[0]["lr"], torch.tensor(0.25))


def test_scope_and_alignment_are_carried_between_torque_optimizers() -> None:
    first = train(make(tam.AdaTAM, scope="tensor"), 5)
    new = tam.handover(first, tam.AdaTAMW)
    assert torch.equal(new.alignment, first.alignment) and bool((new.alignment != 0).any())
    other = tam.handover(first, tam.AdaTAMW, scope="global", alignment=0.5)
    assert float(other.alignment) == 0.5
    for p in params_of(new):
        assert new.state[p]["alignment"] is not first.state[p]["alignment"]


def test_pairs_that_share_nothing_start_fresh_and_need_lr() -> None:
    first = train(make(tam.TAM, weight_decay=0.0), 3)
    with pytest.raises(ValueError, match=r"no rule gives the lr of Adam from that of TAM: give lr="):
        tam.handover(first, Adam)
    new = tam.handover(first, Adam, lr=1e-3)
    assert not new.state and new.param_groups[0]["lr"] == 1e-3
    with pytest.raises(ValueError, match=r'buffers must be "fresh" from TAM to Adam, .*got "keep"'):
        tam.handover(first, Adam, lr=1e-3, buffers="keep")
    with pytest.raises(ValueError, match="no rule gives the lr of TAM from that of RMSprop"):
        tam.handover(make(RMSprop), tam.TAM)
    with pytest.raises(ValueError, match="no rule gives the lr of Adam from that of AngularGrad"):
        tam.handover(make(tam.AngularGrad), Adam)


@pytest.mark.parametrize(
    "build, to, name",
    [
        (lambda: make(SGD, nesterov=True), tam.TAM, "nesterov=True.*step is not the momentum"),
        (lambda: make(SGD, dampening=0.5), tam.TAM, "dampening=0.5.*weighs gradients differently"),
        (lambda: make(Adam, amsgrad=True), tam.AdaTAM, "amsgrad=True.*maximum over the run"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(
    build: Callable[[], Optimizer], to: type[Optimizer], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        tam.handover(build(), to)


@pytest.mark.parametrize(
    "cls, to, option",
    [
        (SGD, tam.TAM, {"nesterov": True}),
        (SGD, tam.TAM, {"dampening": 0.5}),
        (Adam, tam.AdaTAM, {"amsgrad": True}),
    ],
)
def test_the_ways_out_that_the_message_names_work(
    cls: type[Optimizer], to: type[Optimizer], option: dict[str, Any]
) -> None:
    ((name, _),) = option.items()
    first = train(make(cls, **option), 3)
    first.add_param_group({"params": parameters([(3,)])})
    with pytest.raises(ValueError, match=r'lr=\.\.\., buffers="fresh"') as error:
        tam.handover(first, to)
    fresh = tam.handover(first, to, lr=0.1, buffers="fresh")
    assert not fresh.state and fresh.param_groups[0]["lr"] == 0.1
    with pytest.raises(TypeError, match=f"got {name}=: turn it off first"):
        tam.handover(first, to, **{name: False})
    exec(code_in(error), {"optimizer": first})
    new = train(tam.handover(first, to), 1)
    assert len(new.state) == len(SHAPES) + 1 and type(new) is to


def sgd_on_an_embedding() -> tuple[torch.nn.Embedding, Optimizer]:
    """Sparse gradients give SGD a sparse momentum buffer."""
    torch.manual_seed(0)
    embedding, linear = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1)
    first = SGD([{"params": linear.parameters()}, {"params": embedding.parameters()}], lr=0.1, momentum=0.9)
    for _ in range(2):
        first.zero_grad()
        linear(embedding(torch.tensor([1, 2]))).sum().backward()
        first.step()
    assert first.state[embedding.weight]["momentum_buffer"].is_sparse
    return embedding, first


@pytest.mark.parametrize("buffers", [None, "keep", "rescale"])
def test_a_sparse_momentum_is_refused_before_anything_changes(buffers: Any) -> None:
    embedding, first = sgd_on_an_embedding()
    message = r"parameter 0 of group 1 \(shape \(5, 3\)\) has a sparse momentum_buffer.*TAM.*sparse=False"
    for hand_over in (tam.explain_handover, tam.handover):
        with pytest.raises(ValueError, match=message):
            hand_over(first, tam.TAM, buffers=buffers)
    with pytest.raises(ValueError, match=message):
        tam.TAM.from_sgd(first, buffers=buffers)
    assert first.state[embedding.weight]["momentum_buffer"].is_sparse


def test_the_ways_out_of_a_sparse_momentum_work() -> None:
    embedding, first = sgd_on_an_embedding()
    with pytest.raises(ValueError, match=r'leave them behind \(buffers="fresh"\)') as error:
        tam.TAM.from_sgd(first)
    assert not tam.TAM.from_sgd(first, buffers="fresh").state
    m = first.state[embedding.weight]["momentum_buffer"].to_dense()
    first.state[torch.nn.Parameter(torch.ones(1))] = {"note": "a user's own"}
    (code,) = re.findall(r"\((for .*?\})\)", str(error.value))
    exec(code, {"optimizer": first})
    new = tam.TAM.from_sgd(first, smoothing=1.0, floor=0.5)  # with these, TAM is SGD
    before, g = embedding.weight.detach().clone(), torch.randn(5, 3)
    embedding.weight.grad = g
    new.step()
    torch.testing.assert_close(embedding.weight.detach(), before - 0.1 * (0.9 * m + g))


def test_sgd_takes_a_sparse_momentum() -> None:
    embedding, first = sgd_on_an_embedding()
    new = tam.handover(first, SGD, buffers="rescale", momentum=0.8)
    m = new.state[embedding.weight]["momentum_buffer"]
    # The lr is 0.1 (1 - 0.8) / (1 - 0.9), and the momentum half of what it was.
    assert m.is_sparse and new.param_groups[0]["lr"] == pytest.approx(0.2)
    old = first.state[embedding.weight]["momentum_buffer"].to_dense()
    torch.testing.assert_close(m.to_dense(), 0.5 * old)


def test_the_alignment_of_a_hand_over_goes_by_the_gain() -> None:
    """d = (1 + clip(gain s*, -1, 1)) / 2 of the new gradient, which SGD's lr has to make up for."""
    first = make(tam.TAM)
    first.param_groups[0]["gain"] = 3.0
    assert tam.handover(first, SGD, alignment=0.2).param_groups[0]["lr"] == pytest.approx(0.008)
    assert tam.handover(first, SGD, alignment=0.5).param_groups[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(ValueError, match=r"alignment=-0.5 with gain=3 gives TAM d = 0.*above -1"):
        tam.handover(first, SGD, alignment=-0.5)
    assert tam.handover(first, SGD, alignment=-0.5, lr=0.1).param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="TAM d = 0"):  # known from the options, without any buffers
        tam.explain_handover(first, SGD, alignment=-0.5, lr=0.1, buffers="rescale")


def test_refused_in_the_new_optimizer_too() -> None:
    with pytest.raises(ValueError, match="nesterov=True"):
        tam.handover(make(tam.TAM), SGD, nesterov=True)
    with pytest.raises(ValueError, match="amsgrad=True"):
        tam.handover(make(tam.AdaTAM), Adam, amsgrad=True)


def test_coupled_and_decoupled_decay_do_not_become_each_other_silently() -> None:
    with pytest.raises(
        ValueError, match=r"weight_decay=0.1 is coupled .* and decoupled in AdaTAMW.*give weight_decay="
    ):
        tam.handover(make(Adam, weight_decay=0.1), tam.AdaTAMW)
    with pytest.raises(ValueError, match="is decoupled in AdamW and coupled"):
        tam.handover(make(AdamW), tam.AdaTAM)
    assert tam.handover(make(Adam), tam.AdaTAMW).param_groups[0]["weight_decay"] == 0
    assert tam.handover(make(AdamW), tam.AdaTAM, weight_decay=0.0).param_groups[0]["weight_decay"] == 0


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"buffers": "rescaled"}, ValueError, 'buffers must be "keep", "rescale" or "fresh", got "rescaled"'),
        ({"alignment": -1.0}, ValueError, r"alignment must be a number in \(-1, 1\]"),
        ({"to": "tam"}, TypeError, "to must be an optimizer class such as tam.TAM, got a str object"),
        ({"to": make(tam.TAM)}, TypeError, "got a TAM object$"),
        ({"optimizer": SGD}, TypeError, "optimizer must be"),
        ({"smoothness": 0.5}, TypeError, r"options must be those of TAM \(.*smoothing.*\), got smoothness="),
        ({"smoothing": 2.0}, ValueError, "smoothing.*2.0"),
        ({"lr": -1.0}, ValueError, "lr.*-1.0"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tam.handover(**{"optimizer": make(SGD), "to": tam.TAM, **change})


def test_the_plan_says_what_changes_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    first = train(make(tam.TAM, weight_decay=1e-4), 2)
    plan = repr(tam.explain_handover(first, SGD))
    assert capsys.readouterr().out == ""
    assert plan.startswith("TAM -> SGD\n")
    said = [
        "lr 0.01 -> 0.005: times 0.5",
        "5 x 0.01 before, 10 x 0.005 after",
        "momentum 0.9: carried",
        "smoothing 0.9: dropped",
        "kept as they are, for 3 parameters",
        "0.55 of the one before",
    ]
    assert [part for part in said if part not in plan] == []
    adamw = train(make(AdamW, lr=1e-3), 2)
    tam.handover(adamw, tam.AdaTAMW, verbose=True)
    plan = capsys.readouterr().out
    said = [
        "lr 0.001 -> 0.0002",
        "weight_decay 0.01 -> 0.05",
        "momentum times 5, bias corrections folded in",
        "alignment: starts at 0",
    ]
    assert [part for part in said if part not in plan] == []
    tam.handover(adamw, tam.AdaTAMW)
    assert capsys.readouterr().out == ""


def test_the_plan_has_each_groups_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = parameters([(3,), (2,)])
    first = AdamW([{"params": [a], "weight_decay": 0.1}, {"params": [b], "weight_decay": 0.0}], lr=1e-3)
    new = tam.handover(first, tam.AdaTAMW, verbose=True)
    one, two = capsys.readouterr().out.split("group 1")
    assert "weight_decay 0.1 -> 0.5" in one and "weight_decay 0: carried" in two
    assert [group["weight_decay"] for group in new.param_groups] == [pytest.approx(0.5), 0.0]


def test_the_plan_says_that_a_momentum_is_lacking() -> None:
    assert "momentum=0 is carried" in repr(tam.explain_handover(make(SGD, momentum=0.0), tam.TAM))


@pytest.mark.parametrize("buffers", [None, "keep", "rescale", "fresh"])
@pytest.mark.parametrize("cls, to", [(SGD, tam.TAM), (tam.TAM, SGD), (Adam, tam.AdaTAM), (tam.TAM, tam.TAM)])
def test_the_plan_without_buffers_says_nothing_of_a_first_step(
    cls: type[Optimizer], to: type[Optimizer], buffers: Any
) -> None:
    plan = repr(tam.explain_handover(make(cls), to, buffers=buffers, alignment=0.5))
    assert "buffers: none to carry" in plan and "first step" not in plan and "rescaled" not in plan
    if to is not SGD:  # no state, so s does not start at 0.5 either
        assert "alignment: starts at 0\n" in f"{plan}\n"
        assert float(tam.handover(make(cls), to, buffers=buffers, alignment=0.5).alignment) == 0


def test_the_plan_stays_as_it_was_made() -> None:
    first = train(make(SGD, weight_decay=1e-4), 2)
    plan = tam.explain_handover(first, tam.TAM, buffers="rescale")
    text, groups = repr(plan), [dict(group) for group in plan.arguments]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.lr = 0.5  # type: ignore[misc]
    one, other = plan.build(), plan.build()
    assert type(one) is tam.TAM and one.param_groups[0] is not other.param_groups[0]
    one.param_groups[0]["lr"] = first.param_groups[0]["lr"] = 7.0
    first.state.clear()
    assert repr(plan) == text and other.param_groups[0]["lr"] == 0.02
    assert [group["lr"] for group in plan.arguments] == [0.02] == [group["lr"] for group in groups]
    assert [list(group) for group in plan.arguments] == [list(group) for group in groups]


def test_a_given_lr_is_what_the_next_scheduler_starts_from() -> None:
    first = make(tam.TAM, lr=0.2)
    torch.optim.lr_scheduler.LambdaLR(first, lambda t: 0.5)
    new = tam.handover(first, Adam, lr=1e-3, scheduler=[])
    torch.optim.lr_scheduler.LambdaLR(new, lambda t: 1.0)
    assert new.param_groups[0]["lr"] == 1e-3


def test_subclasses_that_pass_their_options_on() -> None:
    class Mine(tam.TAM):
        def __init__(self, params: Any, note: str = "", **options: Any) -> None:
            super().__init__(params, **options)

    new = tam.handover(train(make(SGD), 2), Mine, smoothing=0.5)
    assert type(new) is Mine and new.param_groups[0]["lr"] == 0.02 and new.param_groups[0]["smoothing"] == 0.5


def test_capturable_is_dropped_where_torch_would_refuse_it() -> None:
    first = train(make(tam.AdaTAM, capturable=True), 2)
    new = train(tam.handover(first, Adam), 1)
    assert not new.param_groups[0]["capturable"] and int(new.state[params_of(new)[0]]["step"]) == 3
    assert tam.handover(first, tam.AdaTAMW).param_groups[0]["capturable"]  # ours take it anywhere
