"""The settling of s, where sums are extreme."""

from __future__ import annotations

import math

import pytest
import torch

from tam.step.rule import clip_factor, settle


def s_after(dot: float, mm: float, gg: float, s: float = 0.5, smoothing: float = 0.5) -> float:
    sums = torch.tensor([dot, mm, gg], dtype=torch.float64)
    return float(settle(sums, torch.tensor(s), smoothing))


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
    s = settle(sums, torch.tensor([0.0, 0.3, 0.4]), 0.5)
    assert s.tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert s.dtype == torch.float32


def test_smoothing_one_keeps_s() -> None:
    assert s_after(6.0, 9.0, 4.0, s=0.0, smoothing=1.0) == 0.0


def test_clip_factor_is_that_of_clip_grad_norm() -> None:
    norm = torch.tensor(4.0, dtype=torch.float64)
    assert float(clip_factor(norm, 1.0)) == 1.0 / (4.0 + 1e-6)
    assert float(clip_factor(norm, 5.0)) == 1.0
    assert clip_factor(norm, None) is None
    assert float(clip_factor(torch.tensor(math.inf), 1.0)) == 0.0
