"""The paper's illustrations, against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tam.lab.experiments.toy import trial as toy


def test_size_against_the_angle() -> None:
    angles = [0.0, 60.0, 90.0, 180.0]
    # |0.9 m + g| with m and g of length 1: sqrt(0.81 + 1 + 1.8 cos).
    expected = [math.sqrt(1.81 + 1.8 * math.cos(math.radians(a))) for a in angles]
    assert toy.size_by_angle("sgdm", angles) == pytest.approx(expected)
    # TAM's weight is (1 + cos) / 2: 1, 0.75, 0.5 and 0.
    weights = [(1 + math.cos(math.radians(a))) / 2 for a in angles]
    expected = [
        math.hypot(0.9 + w * math.cos(math.radians(a)), w * math.sin(math.radians(a)))
        for w, a in zip(weights, angles, strict=True)
    ]
    assert toy.size_by_angle("tam", angles) == pytest.approx(expected, rel=1e-6)


def test_momenta_along_a_trajectory_are_the_rules() -> None:
    found = toy.momenta_along_trajectory("ravine", steps=5)
    gradients = [
        g for _, g, *_ in toy.walk(toy.Config(surface="ravine", optimizer="sgd", lr=0.5, seed=0, epochs=5))
    ]
    m, tam, s = torch.zeros(2).double(), torch.zeros(2).double(), 0.0
    for i, g in enumerate(gradients):
        m = 0.9 * m + g
        size = float(tam.norm() * g.norm())
        s = 0.9 * s + 0.1 * (float(tam @ g) / size if size else 0.0)
        tam = 0.9 * tam + (1e-8 + (1 + s) / 2) * g
        torch.testing.assert_close(found["sgdm"][i], m)
        torch.testing.assert_close(found["tam"][i], 2 * tam, rtol=1e-6, atol=1e-8)
    assert toy.turning_angles([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])]) == [pytest.approx(90.0)]


def test_all_optimizers_of_a_seed_meet_the_same_noise() -> None:
    first = []
    for name in ("sgdm", "tam"):
        _, gradient, *_ = next(
            toy.walk(toy.Config(surface="banana", optimizer=name, lr=0.01, seed=3, epochs=1))
        )
        first.append(gradient)
    assert torch.equal(first[0], first[1])
    with pytest.raises(ValueError, match="surface='hill': must be one of ravine, banana"):
        toy.Config(surface="hill", optimizer="tam", lr=0.1, seed=0, epochs=1)
