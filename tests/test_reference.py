"""The oracle itself, against figures worked out by hand and against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tam.reference import Group, Reference, angular_grad, paper

# Two parameters, three steps of TAM, worked out by hand.
#
# theta_0 = (1, 2), beta = 0.5, gamma = 0.5, epsilon = 0, eta = 0.1, gradients
# g_1 = (3, 4), g_2 = (4, 3), g_3 = (-3, -4).
#
# t = 1:  m_0 = 0, so S = 0, s = 0, d = 1/2.
#         m_1 = 1/2 (3, 4) = (1.5, 2).  theta_1 = (1 - 0.15, 2 - 0.2) = (0.85, 1.8).
# t = 2:  S = (1.5 * 4 + 2 * 3) / (2.5 * 5) = 12 / 12.5 = 0.96.  s = 0.5 * 0 + 0.5 * 0.96 = 0.48.
#         d = 0.74.  m_2 = (0.75, 1) + 0.74 (4, 3) = (3.71, 3.22).
#         theta_2 = (0.85 - 0.371, 1.8 - 0.322) = (0.479, 1.478).
# t = 3:  <m_2, g_3> = -3 * 3.71 - 4 * 3.22 = -24.01.  |m_2|^2 = 13.7641 + 10.3684 = 24.1325,
#         |m_2| = 4.912484096666...,  |g_3| = 5.  S = -24.01 / 24.562420483... = -0.977509525834...
#         s = 0.24 - 0.488754762917... = -0.248754762917...  d = 0.375622618541...
#         m_3 = (1.855, 1.61) - d (3, 4) = (0.728132144375..., 0.107509525834...).
#         theta_3 = (0.479 - 0.0728132144375..., 1.478 - 0.0107509525834...).
THETA_0 = (1.0, 2.0)
GRADIENTS = [(3.0, 4.0), (4.0, 3.0), (-3.0, -4.0)]
THETA = [(0.85, 1.8), (0.479, 1.478), (0.406186785562441, 1.467249047416588)]
S = [0.0, 0.48, -0.248754762917060]

# The same stream for AdaTAM with beta1 = 0.5, beta2 = 0.75, c = 0, eta = 0.1: m as above,
# v_1 = (9, 16) / 4 = (2.25, 4);             step (1.5 / 1.5, 2 / 2) = (1, 1)
# v_2 = (1.6875, 3) + (16, 9) / 4 = (5.6875, 5.25);
#       step (3.71 / 2.384848003542..., 3.22 / 2.291287847478...) = (1.555654697695..., 1.405323213119...)
# v_3 = (4.265625, 3.9375) + (9, 16) / 4 = (6.515625, 7.9375);
#       step (0.728132144375... / 2.552572232082..., 0.107509525834... / 2.817356917396...)
#          = (0.285254276146..., 0.038159711029...)
ADA_STEPS = [(1.0, 1.0), (1.555654697695, 1.405323213120), (0.285254276147, 0.038159711029)]


def run(rule: str, steps: int, split: bool) -> tuple[Reference, Tensor]:
    """The stream above on one tensor of two numbers, or on two tensors of one."""
    start = torch.tensor(THETA_0, dtype=torch.float64)
    theta = list(start.split(1)) if split else [start]
    group = Group(theta, lr=0.1, momentum=0.5, beta2=0.75, eps=0.0, floor=0.0)
    reference = Reference([group], rule=rule, smoothing=0.5)
    for g in GRADIENTS[:steps]:
        grad = torch.tensor(g, dtype=torch.float64)
        reference.step([list(grad.split(1)) if split else [grad]])
    return reference, torch.cat(reference.groups[0].theta)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_tam_gives_the_figures_worked_out_by_hand(steps: int, split: bool) -> None:
    reference, theta = run("tam", steps, split)
    assert reference.s[()] == pytest.approx(S[steps - 1], abs=1e-12)
    assert theta.tolist() == pytest.approx(THETA[steps - 1], abs=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_adatam_gives_the_figures_worked_out_by_hand(steps: int) -> None:
    _, theta = run("adatam", steps, split=False)
    expected = [start - 0.1 * sum(step[k] for step in ADA_STEPS[:steps]) for k, start in enumerate(THETA_0)]
    assert theta.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_papers_loop_gives_them_too() -> None:
    stream = iter(GRADIENTS)
    theta = paper(
        torch.tensor(THETA_0, dtype=torch.float64),
        lambda _: torch.tensor(next(stream), dtype=torch.float64),
        steps=3, lr=0.1, momentum=0.5, smoothing=0.5, floor=0.0,
    )  # fmt: skip
    assert theta.tolist() == pytest.approx(THETA[2], abs=1e-12)


def test_scopes_differ_as_the_segments_do() -> None:
    # Per tensor, each number is its own segment: S is +1 or -1. Worked for g_2: s = 0.5, d = 0.75,
    # m_2 = (0.75 + 0.75 * 4, 1 + 0.75 * 3) = (3.75, 3.25).
    start = torch.tensor(THETA_0, dtype=torch.float64)
    group = Group(list(start.split(1)), lr=0.1, momentum=0.5, floor=0.0)
    reference = Reference([group], scope="tensor", smoothing=0.5)
    for g in GRADIENTS[:2]:
        reference.step([list(torch.tensor(g, dtype=torch.float64).split(1))])
    assert reference.s == {(0, 0): 0.5, (0, 1): 0.5}
    assert torch.cat(reference.m[0]).tolist() == [3.75, 3.25]


def stream(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("floor, factor", [(0.5, 1.0), (0.0, 0.5)])
def test_at_fixed_damping_it_is_torch_sgd_exactly(floor: float, factor: float, weight_decay: float) -> None:
    start = torch.linspace(-1, 1, 6, dtype=torch.float64)
    group = Group([start], lr=0.1, momentum=0.9, floor=floor, weight_decay=weight_decay)
    reference = Reference([group], smoothing=1.0)
    p = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([p], lr=0.1 * factor, momentum=0.9, weight_decay=weight_decay)
    for g in stream(20):
        p.grad = g.clone()
        sgd.step()
        reference.step([[g]])
    assert torch.equal(reference.groups[0].theta[0], p.detach())


def test_with_the_papers_floor_it_is_sgd_at_half_the_lr() -> None:
    start = torch.linspace(-1, 1, 6, dtype=torch.float64)
    reference = Reference([Group([start], lr=0.1)], smoothing=1.0)
    p = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([p], lr=0.05, momentum=0.9)
    for g in stream(20):
        p.grad = g.clone()
        sgd.step()
        reference.step([[g]])
    # The floor of 1e-8 is the only difference.
    assert torch.allclose(reference.groups[0].theta[0], p.detach(), rtol=0, atol=1e-7)


def test_clipping_decay_and_options_one_by_one() -> None:
    start = torch.tensor([2.0], dtype=torch.float64)
    grad = [[torch.tensor([4.0], dtype=torch.float64)]]

    def after(rule: str = "tam", **options: object) -> tuple[float, Reference]:
        names = ("max_grad_norm", "ema", "bias_correction", "smoothing")
        shared = {k: options.pop(k) for k in names if k in options}
        defaults = {"lr": 0.1, "floor": 0.0, "eps": 0.0}
        reference = Reference([Group([start], **defaults | options)], rule=rule, **shared)  # type: ignore[arg-type]
        reference.step(grad)
        return float(reference.groups[0].theta[0]), reference

    assert after()[0] == pytest.approx(2 - 0.1 * 2)
    assert after(maximize=True)[0] == pytest.approx(2 + 0.1 * 2)
    assert after(max_grad_norm=1.0)[0] == pytest.approx(2 - 0.1 * 0.5 * 4 / (4 + 1e-6))
    assert after(max_grad_norm=1.0)[1].grad_norm == 4
    assert after(weight_decay=0.5)[0] == pytest.approx(2 - 0.1 * 0.5 * (4 + 0.5 * 2))
    # Adam's family: v = 0.001 * 16, or 16 with bias correction
    assert after("adatam")[0] == pytest.approx(2 - 0.1 * 2 / math.sqrt(0.016))
    assert after("adatam", bias_correction=True)[0] == pytest.approx(2 - 0.1 * 2 / 4)
    assert after("adatam", eps=1.0)[0] == pytest.approx(2 - 0.1 * 2 / (math.sqrt(0.016) + 1))
    assert after("adatamw", weight_decay=0.5, bias_correction=True)[0] == pytest.approx(
        2 * (1 - 0.1 * 0.5) - 0.1 * 2 / 4
    )
    # ema: m_1 = 1/2 g as before, m_2 = (1 - w) m_1 + w g with s = 0.1, w = 0.55
    _, reference = after("adatam", ema=True, bias_correction=True)
    reference.step(grad)
    assert float(reference.m[0][0]) == pytest.approx(0.45 * 2 + 0.55 * 4)


def test_non_finite_sums_leave_s_as_it_was() -> None:
    reference, _ = run("tam", 2, split=False)
    reference.step([[torch.tensor([math.inf, 1.0], dtype=torch.float64)]])
    assert reference.s[()] == pytest.approx(0.48)
    assert math.isinf(float(reference.m[0][0][0]))


# AngularGrad by hand: theta = 1, g_1 = 1, g_2 = 3, lr = 0.1, betas = (0.5, 0.5), eps = 0.
# t = 1: tan A = |(0 - 1) / (1 + 0)| = 1, A = pi/4; phi = tanh(cos pi/4)/2 + 1/2;
#        m_hat = 1, v_hat = 1: the step is 0.1 phi.
# t = 2: tan A = |(1 - 3) / (1 + 3)| = 1/2; A_min = atan(1/2), cos = 2/sqrt(5), tan = 1/2.
#        m = 0.25 + 1.5 = 1.75, m_hat = 1.75 / 0.75 = 7/3; v = 0.25 + 4.5 = 4.75, v_hat = 19/3.
@pytest.mark.parametrize("method", ["cos", "tan"])
def test_angulargrad_gives_the_figures_worked_out_by_hand(method: str) -> None:
    first, second = {"cos": (math.sqrt(0.5), 2 / math.sqrt(5)), "tan": (1.0, 0.5)}[method]
    phi = [math.tanh(c) / 2 + 0.5 for c in (first, second)]
    expected = 1 - 0.1 * phi[0] - 0.1 * phi[1] * (7 / 3) / math.sqrt(19 / 3)
    grads = [torch.tensor([g], dtype=torch.float64) for g in (1.0, 3.0)]
    theta = torch.ones(1, dtype=torch.float64)
    out = angular_grad(theta, grads, 0.1, (0.5, 0.5), 0.0, method=method)
    assert float(out) == pytest.approx(expected, abs=1e-12)


def test_angulargrad_with_vote_is_adam_at_half_the_lr_on_noise() -> None:
    start = torch.linspace(-1, 1, 6, dtype=torch.float64)
    grads = stream(20)
    out = angular_grad(start, grads, lr=1e-2, vote=True)
    p = torch.nn.Parameter(start.clone())
    adam = torch.optim.Adam([p], lr=5e-3)
    for g in grads:
        p.grad = g.clone()
        adam.step()
    assert torch.allclose(out, p.detach(), rtol=1e-10, atol=1e-12)


def test_angulargrad_vote_replaces_when_few_angles_exceed() -> None:
    # Equal gradients turn by 0: from the second step no angle exceeds the stored 0, so cos 0 = 1.
    grads = [torch.ones(3, dtype=torch.float64)] * 2
    out = angular_grad(torch.zeros(3, dtype=torch.float64), grads, lr=1.0, vote=True, eps=0.0)
    expected = -(0.5 + math.tanh(1.0) / 2 + 0.5)
    assert out.tolist() == pytest.approx([expected] * 3, abs=1e-9)
