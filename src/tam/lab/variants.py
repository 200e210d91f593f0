"""The presets of an experiment on images, made from the studies that have the paper's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tam.lab.experiment import HALF_DECADE, Arm, Curve, Study

CURVES = (
    Curve("loss", "Training loss", "cross-entropy, epoch mean", log=True),
    Curve("validation", "Validation accuracy", "accuracy (%)"),
    Curve("alignment", "Alignment s", "s, epoch mean"),
    Curve("grad_norm", "Gradient norm", "|g|, epoch mean", log=True),
)


def presets(studies: Sequence[Study]) -> dict[str, tuple[Study, ...]]:
    """paper: as given; fair, quick and smoke: made from it."""
    return {
        "paper": tuple(studies),
        "fair": tuple(fair(study) for study in studies),
        "quick": (shorter(studies[0], epochs=20),),
        "smoke": (tiny(studies[0]),),
    }


def fair(study: Study) -> Study:
    """Grids of half decades around the middle of each arm's, extended alike until every winner is inside."""
    arms = tuple(arm if arm.control_of else replace(arm, lrs=_around(arm)) for arm in study.arms)
    return replace(study, arms=arms, seeds=tuple(range(10)), tuning_seeds=(100, 101), extend=True)


def _around(arm: Arm) -> tuple[float, ...]:
    middle = sorted(arm.lrs)[len(arm.lrs) // 2]
    return (middle / HALF_DECADE, middle, middle * HALF_DECADE)


def shorter(study: Study, epochs: int) -> Study:
    """Fewer epochs, each arm at the largest lr of its grid."""
    return _with(study, {"epochs": epochs}, seeds=(0, 1, 2))


def tiny(study: Study) -> Study:
    """scikit-learn's digits and a network of 5,000 parameters: under a minute on two CPU cores."""
    workload = {"data": "digits", "model": "tiny", "epochs": 2, "batch": 64, "held_out": 300}
    return replace(_with(study, workload, seeds=(0, 1)), paper={}, title=f"{study.name}, in small: digits")


def _with(study: Study, workload: dict[str, Any], seeds: tuple[int, ...]) -> Study:
    arms = tuple(replace(arm, lrs=arm.lrs if arm.control_of else (max(arm.lrs),)) for arm in study.arms)
    return replace(study, arms=arms, workload={**study.workload, **workload}, seeds=seeds, tuning_seeds=())
