"""Controls: what a variant of TAM or AdaTAM must beat before one can say that it helps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.optim import AdamW

from tam.lab import optimizers
from tam.lab.core.study import Study, Variant
from tam.optimizers import AdaTAMW
from tam.switching import transfer

OF_TAM = ("grouped", "decay_in_cosine", "sgdm_from", "buffers")  # settings that mean nothing to others
SHUFFLED, CONSTANT = "shuffled damping", "constant damping"
FORMER_NAMES = {"d shuffled": SHUFFLED, "d its mean": CONSTANT}  # in stored selections
NOT_A_CONTROLS = ("keep_at",)  # nobody begins from a run with a d that is not its own


def plain(optimizer: str) -> str:
    """Return what an optimizer is compared with at one effective lr: SGDM, Adam or AdamW."""
    cls = optimizers.get(optimizer).cls
    if issubclass(cls, AdamW | AdaTAMW):
        return "adamw"
    return "sgdm" if transfer.family(cls) == "sgd" else "adam"


def settled_step(optimizer: str, options: Mapping[str, Any]) -> float:
    """Return the effective lr of an lr of 1."""
    info = optimizers.get(optimizer)
    # The group of an optimizer would say the same, but the first one of a process takes over a second.
    defaults = {name: one.default for name, one in inspect.signature(info.cls).parameters.items()}
    return float(f"{transfer.settled_step(info.cls, {**defaults, **dict(info.options), **options}):.6g}")


def current_name(name: str) -> str:
    """Return what a variant with this stored name is called now."""
    source, _, kind = name.rpartition(", ")
    return f"{source}, {FORMER_NAMES[kind]}" if kind in FORMER_NAMES else name


def controls(variant: Variant) -> tuple[Variant, ...]:
    """Return what a variant of TAM or AdaTAM must beat to be said to help."""
    other = optimizers.get(plain(variant.optimizer))
    accepted = inspect.signature(other.cls).parameters
    options = {k: v for k, v in variant.options.items() if k in accepted}
    ratio = settled_step(variant.optimizer, variant.options) / settled_step(other.name, options)
    settings = {k: v for k, v in variant.settings.items() if k not in OF_TAM}
    at_effective_lr = Variant(
        f"{other.title} at {variant.name}'s effective lr", other.name, (), options, settings,
        control_of=variant.name, lr_ratio=ratio,
    )  # fmt: skip
    replaced = (_with_damping(variant, *control) for control in (("shuffled", SHUFFLED), ("mean", CONSTANT)))
    return at_effective_lr, *replaced, another_seeds_damping(variant)


def another_seeds_damping(variant: Variant) -> Variant:
    """Return the control with the d of another seed's run, step by step: the same schedule, no feedback."""
    return _with_damping(variant, "another", "another seed's damping")


def _with_damping(variant: Variant, damping: str, name: str) -> Variant:
    own = {k: v for k, v in variant.settings.items() if k not in NOT_A_CONTROLS}
    return replace(
        variant, name=f"{variant.name}, {name}", lrs=(), settings=own, versus=None, against=(),
        control_of=variant.name, damping=damping,
    )  # fmt: skip


def with_controls(study: Study) -> Study:
    """Return the study with the controls of every variant that can have them."""
    variants = {variant.name: variant for variant in study.variants}
    for variant in study.variants if study.controls else ():
        if optimizers.get(variant.optimizer).has_alignment and not variant.control_of:
            variants |= {one.name: one for one in controls(variant) if one.name not in variants}
    return replace(study, variants=tuple(variants.values()))
