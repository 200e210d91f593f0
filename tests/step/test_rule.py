"""The settling of s where sums are extreme, the damping, and clipping."""

from __future__ import annotations

import math

import pytest
import torch

import tam
from tam.step.rule import damping_of, smooth_cosine
from tests.helpers import gradients, parameters


def s_after(dot: float, mm: float, gg: float, s: float = 0.5, smoothing: float = 0.5) -> float:
    sums = torch.tensor([dot, mm, gg], dtype=torch.float64)
    return float(smooth_cosine(sums, torch.tensor(s), smoothing))


@pytest.mark.parametrize(
    "sums, cosine",
    [
        ((6.0, 9.0, 4.0), 1.0),
        ((-6.0, 9.0, 4.0), -1.0),
        ((3.0, 9.0, 4.0), 0.5),
        ((0.0, 0.0, 4.0), 0.0),
        ((0.0, 9.0, 0.0), 0.0),
        ((0.0, 0.0, 0.0), 0.0),
        ((6.000001, 9.0, 4.0), 1.0),  # rounding must not push d out of [0, 1]
        ((1e300, 1e300, 1e300), 1.0),  # mm gg overflows, the product of the roots does not
        ((1e-300, 1e-300, 1e-300), 1.0),
    ],
)
def test_cosine(sums: tuple[float, float, float], cosine: float) -> None:
    assert s_after(*sums) == pytest.approx(0.25 + 0.5 * cosine, abs=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_non_finite_sums_leave_s_as_it_was(bad: float, where: int) -> None:
    sums = [1.0, 1.0, 1.0]
    sums[where] = bad
    assert s_after(*sums) == 0.5


def test_segments_settle_side_by_side() -> None:
    sums = torch.tensor([[6.0, 9.0, 4.0], [math.nan, 1.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    s = smooth_cosine(sums, torch.tensor([0.0, 0.3, 0.4]), 0.5)
    assert s.tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert s.dtype == torch.float32


def test_smoothing_one_keeps_s() -> None:
    assert s_after(6.0, 9.0, 4.0, s=0.0, smoothing=1.0) == 0.0


@pytest.mark.parametrize(
    "s, gain, d", [(0.0, 1.0, 0.5), (-1.0, 1.0, 0.0), (0.5, 2.0, 1.0), (0.75, 2.0, 1.0), (-0.75, 2.0, 0.0)]
)
def test_damping_of_a_number_and_of_a_tensor(s: float, gain: float, d: float) -> None:
    assert damping_of(s, gain) == d
    assert float(damping_of(torch.tensor(s), gain)) == d
    assert float(damping_of(torch.tensor(s), torch.tensor(gain))) == d


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("limit, expected", [(1.0, 1.0 / (4.0 + 1e-6)), (5.0, 1.0), (math.inf, 1.0)])
def test_the_clip_factor_is_that_of_clip_grad_norm(limit: float, expected: float, fused: bool) -> None:
    (p,) = params = parameters([(4,)], torch.float64)
    optimizer = tam.TAM(params, floor=0.0, max_grad_norm=limit, fused=fused)
    p.grad = torch.full_like(p, 2.0)  # |g| = 4
    optimizer.step()
    m = optimizer.state[p]["momentum_buffer"]  # g/2 after the first step
    torch.testing.assert_close(m, torch.full_like(p, expected), rtol=1e-15, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_an_infinite_norm_clips_finite_gradients_to_zero(fused: bool) -> None:
    first, second = params = parameters([(4,), (3,)])
    optimizer = tam.TAM(params, max_grad_norm=1.0, fused=fused)
    first.grad, second.grad = (g.clone() for g in gradients(params, 0))
    first.grad[0] = math.inf
    optimizer.step()
    assert not optimizer.state[second]["momentum_buffer"].any()
    assert optimizer.grad_norm.isinf()
