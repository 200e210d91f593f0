"""What is made from an experiment's studies: controls, and the presets fair, quick and smoke."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tam import registry
from tam.lab.experiment import HALF_DECADE, Arm, Curve, Study
from tam.switching import transfer

CURVES = (
    Curve("loss", "Training loss", "cross-entropy, epoch mean", log=True),
    Curve("validation", "Validation accuracy", "accuracy (%)"),
    Curve("alignment", "Alignment s", "s, epoch mean"),
    Curve("grad_norm", "Gradient norm", "|g|, epoch mean", log=True),
)


# ---------------------------------------------------------------------- steps of one size


def plain(optimizer: str) -> str:
    """What an optimizer is compared with at one effective lr: SGDM, Adam or AdamW."""
    if optimizer in ("adamw", "adatamw"):
        return "adamw"
    return "sgdm" if transfer.family(registry.get(optimizer).cls) == "sgd" else "adam"


def settled_step(optimizer: str, options: Mapping[str, Any]) -> float:
    """The effective lr of an lr of 1."""
    record = registry.get(optimizer)
    made = record.create([torch.zeros(1, requires_grad=True)], lr=1.0, **options)
    return float(f"{transfer.settled_step(record.cls, made.param_groups[0]):.6g}")


# ---------------------------------------------------------------------- controls


OF_TAM = ("grouped", "decay_in_cosine", "sgdm_from", "buffers")  # settings that mean nothing to others
NOT_A_CONTROLS = ("keep_at",)  # nobody begins from a run with a d that is not its own


def controls(arm: Arm) -> tuple[Arm, ...]:
    """What an arm of TAM or AdaTAM must beat to be said to help."""
    other = registry.get(plain(arm.optimizer))
    known = inspect.signature(other.cls).parameters
    options = {k: v for k, v in arm.options.items() if k in known}
    ratio = settled_step(arm.optimizer, arm.options) / settled_step(other.name, options)
    own = {k: v for k, v in arm.settings.items() if k not in NOT_A_CONTROLS}
    settings = {k: v for k, v in arm.settings.items() if k not in OF_TAM}
    found = [
        Arm(f"{other.title} at {arm.name}'s effective lr", other.name, (), options, settings,
            control_of=arm.name, lr_ratio=ratio)
    ]  # fmt: skip
    if arm.options.get("scope", "global") == "global":  # there is one d to replace
        for damping, name in (("shuffled", "d shuffled"), ("mean", "d its mean")):
            found.append(
                Arm(f"{arm.name}, {name}", arm.optimizer, (), arm.options, own,
                    control_of=arm.name, damping=damping)
            )  # fmt: skip
    return tuple(found)


def another_seeds_damping(arm: Arm) -> Arm:
    """Return the control with the d of another seed's run, step by step: the same schedule, no feedback."""
    own = {k: v for k, v in arm.settings.items() if k not in NOT_A_CONTROLS}
    return Arm(
        f"{arm.name}, another seed's damping", arm.optimizer, (), arm.options, own,
        control_of=arm.name, damping="another",
    )  # fmt: skip


def with_controls(study: Study) -> Study:
    """The study with the controls of every arm that can have them."""
    if not study.controls:
        return study
    known = {arm.name for arm in study.arms}
    torques = [arm for arm in study.arms if registry.get(arm.optimizer).has_alignment and not arm.control_of]
    found = [control for arm in torques for control in controls(arm) if control.name not in known]
    return replace(study, arms=(*study.arms, *found))


# ---------------------------------------------------------------------- presets


def presets(studies: Sequence[Study]) -> dict[str, tuple[Study, ...]]:
    """paper: as given; fair, quick and smoke: made from it."""
    return {
        "paper": tuple(studies),
        "fair": tuple(fair(study) for study in studies),
        "quick": (shorter(studies[0], epochs=20),),
        "smoke": (tiny(studies[0]),),
    }


def without(study: Study, *names: str) -> Study:
    """The study without these arms, and without comparisons with them."""
    arms = (
        replace(arm, against=tuple(other for other in arm.against if other not in names))
        for arm in study.arms
        if arm.name not in names
    )
    return replace(study, arms=tuple(arms))


def fair(study: Study, tuning_seeds: tuple[int, ...] = (100, 101), middle: float | None = None) -> Study:
    """Three lrs a half decade apart for every arm, around SGDM's (`middle`, or the paper's) or Adam's for
    steps of that size: one range of effective lr for all arms. All grids are extended alike until every
    winner is inside.
    """
    arms = tuple(arm if arm.control_of else replace(arm, lrs=_range(arm, middle)) for arm in study.arms)
    seeds = study.seeds if len(study.seeds) > 10 else tuple(range(10))
    choices = {**study.choices, "lr": RANGE}
    return replace(study, arms=arms, seeds=seeds, tuning_seeds=tuning_seeds, extend=True, choices=choices)


RANGE = (
    "for every arm half a decade apart in one range of effective lr, by the tuning seeds' mean; all grids "
    "are extended alike until every winner is inside."
)


def _range(arm: Arm, lr: float | None) -> tuple[float, ...]:
    reference = registry.get(plain(arm.optimizer))
    own = lr if lr is not None and (reference.name == "sgdm" or reference.lr is None) else reference.lr
    if own is None:
        raise ValueError(f"{reference.name}: the paper states no lr to take as the middle")
    middle = own * settled_step(reference.name, {}) / settled_step(arm.optimizer, arm.options)
    return tuple(float(f"{middle * HALF_DECADE**i:.6g}") for i in (-1, 0, 1))


def shorter(study: Study, epochs: int) -> Study:
    """Fewer epochs, no search, and not to be held beside the paper's figures."""
    return replace(_with(study, {"epochs": epochs}, seeds=(0, 1, 2)), paper={})


def tiny(study: Study) -> Study:
    """scikit-learn's digits and a network of 5,000 parameters: under a minute on two CPU cores."""
    workload = {"data": "digits", "model": "tiny", "epochs": 2, "batch": 64, "held_out": 300}
    small = _with(study, workload, seeds=(0, 1))
    return replace(small, paper={}, title=f"{study.name} on digits", choices=SMALL, small=True)


SMALL = {
    "data": "scikit-learn's 1,437 digits, 300 of them to validate on, and a network of 5,000 parameters: to "
    "show that everything runs.",
}


def _with(study: Study, workload: dict[str, Any], seeds: tuple[int, ...]) -> Study:
    """Each arm at the paper's lr where that is in its grid; what happens at an epoch happens as early."""
    share = workload["epochs"] / study.workload["epochs"]
    arms = []
    for arm in study.arms:
        lr = registry.get(arm.optimizer).lr
        lrs = () if arm.control_of else (lr,) if lr in arm.lrs else (max(arm.lrs),)
        settings = {k: max(1, int(v * share)) if k == "halve_at" else v for k, v in arm.settings.items()}
        arms.append(replace(arm, lrs=lrs, settings=settings))
    workload = {**study.workload, **workload}
    return replace(study, arms=tuple(arms), workload=workload, seeds=seeds, tuning_seeds=())
