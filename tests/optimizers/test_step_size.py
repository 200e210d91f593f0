"""The step sizes the README tells people to expect."""

from __future__ import annotations

import pytest
import torch

import tam


def test_adatams_steps_against_adams_at_the_same_lr() -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(5000)) for _ in range(3)]
    optimizers = [
        tam.AdaTAM([params[0]], lr=1.0),
        tam.AdaTAM([params[1]], lr=1.0, bias_correction=True),
        torch.optim.Adam([params[2]], lr=1.0),
    ]
    plain, corrected = {}, {}
    for step in range(1, 1001):
        g = torch.randn(5000, generator=generator)
        sizes = []
        for p, optimizer in zip(params, optimizers, strict=True):
            before = p.detach().clone()
            p.grad = g.clone()
            optimizer.step()
            sizes.append(float((p.detach() - before).norm()))
        plain[step], corrected[step] = sizes[0] / sizes[2], sizes[1] / sizes[2]
    assert [round(plain[step]) for step in (1, 10, 100, 1000)] == [16, 33, 16, 6]
    assert corrected[1000] == pytest.approx(5, rel=0.05)
    assert max(corrected.values()) < 5.5
