"""The presets `fair`, `quick` and `smoke`, made from the studies of the preset `paper`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tam.lab import optimizers
from tam.lab.core.controls import plain, settled_step
from tam.lab.core.study import HALF_DECADE, Curve, Study, Variant
from tam.lab.core.toml import read_toml

TEXTS = read_toml(Path(__file__).with_name("presets.toml"))
CURVES = tuple(Curve(**curve) for curve in TEXTS["curves"])
SMALL = TEXTS["small"]
TUNING_SEEDS = (100, 101, 102)


def presets(studies: Sequence[Study]) -> dict[str, tuple[Study, ...]]:
    """paper: as given; fair, quick and smoke: made from it."""
    return {
        "paper": tuple(studies),
        "fair": tuple(map(fair, studies)),
        # Fewer epochs, no search, not comparable with the paper's figures.
        "quick": (_with(studies[0], {"epochs": 20}, seeds=(0, 1, 2)),),
        "smoke": (tiny(studies[0]),),
    }


def without(study: Study, *names: str) -> Study:
    """The study without these variants, and without comparisons with them."""
    variants = (
        replace(variant, against=tuple(other for other in variant.against if other not in names))
        for variant in study.variants
        if variant.name not in names
    )
    return replace(study, variants=tuple(variants))


def fair(study: Study, tuning_seeds: tuple[int, ...] = TUNING_SEEDS, middle: float | None = None) -> Study:
    """Three lrs a half decade apart for every variant, around SGDM's (`middle`, or the paper's) or Adam's for
    steps of that size: one range of effective lr for all variants. All grids are extended by the same
    steps until every winner is inside.
    """
    variants = tuple(
        variant if variant.control_of else replace(variant, lrs=_range(variant, middle))
        for variant in study.variants
    )
    return replace(
        study, variants=variants, seeds=study.seeds if len(study.seeds) > 10 else tuple(range(10)),
        tuning_seeds=tuning_seeds, former_tuning_seeds=2, extend=True,
        choices={**study.choices, "lr": TEXTS["lr_range"]},
    )  # fmt: skip


def _range(variant: Variant, lr: float | None) -> tuple[float, ...]:
    reference = optimizers.get(plain(variant.optimizer))
    own = lr if lr is not None and (reference.name == "sgdm" or reference.lr is None) else reference.lr
    if own is None:
        raise ValueError(f"{reference.name}: the paper states no lr to take as the middle")
    middle = own * settled_step(reference.name, {}) / settled_step(variant.optimizer, variant.options)
    return tuple(float(f"{middle * HALF_DECADE**i:.6g}") for i in (-1, 0, 1))


def tiny(study: Study) -> Study:
    """scikit-learn's digits and a network of 5,000 parameters: under a minute on two CPU cores."""
    workload = {"data": "digits", "model": "tiny", "epochs": 2, "batch": 64, "held_out": 300}
    small = _with(study, workload, seeds=(0, 1))
    return replace(small, title=f"{study.name} on digits", choices=SMALL, small=True)


def _with(study: Study, workload: dict[str, Any], seeds: tuple[int, ...]) -> Study:
    """Each variant at the paper's lr where that is in its grid; what happens at an epoch happens as early."""
    share = workload["epochs"] / study.workload["epochs"]
    variants = []
    for variant in study.variants:
        lr = optimizers.get(variant.optimizer).lr
        lrs = () if variant.control_of else (lr,) if lr in variant.lrs else (max(variant.lrs),)
        settings = {k: max(1, int(v * share)) if k == "halve_at" else v for k, v in variant.settings.items()}
        variants.append(replace(variant, lrs=lrs, settings=settings))
    workload = {**study.workload, **workload}
    return replace(study, variants=tuple(variants), workload=workload, seeds=seeds, tuning_seeds=(), paper={})
