"""When does torque help SGD? Image classifiers with momentum 0.99, at every learning rate.

The hypotheses H5 and H7 and the rules that decide them are in docs/registered.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tam.lab.core import presets
from tam.lab.core.registry import Experiment
from tam.lab.core.study import Curve, Ladder, Metric, Variant, rungs
from tam.lab.core.toml import read_toml
from tam.lab.experiments.images import trial as images
from tam.lab.experiments.sgd_ladder import trial

NOTES = read_toml(Path(__file__).with_name("notes.toml"))
RUNGS = 10  # a factor of sqrt 2 apart, in SGDM's lr
# A pilot of SGDM on a CPU, seeds 900 to 902: the best lr is 0.002 with clipping and 0.001 without, the upper
# knees are near 0.0037 and 0.0016.
LOWEST_LR_MLP = 0.00035
LOWEST_LR_RESNET = 0.001  # a guess: fix it by `--preset pilot` on a GPU, before the first registered run
NO_CLIPPING = {"clip": 0.0}


def variants(lrs: tuple[float, ...]) -> tuple[Variant, ...]:
    """Return the variants of the registration, S1 to S5c in this order, at these lrs of SGDM."""
    own = tuple(2 * lr for lr in lrs)  # a gradient's weight is 1/2 at s = 0
    beta: dict[str, Any] = {"momentum": 0.99}
    short, long = {**beta, "smoothing": 0.9}, {**beta, "smoothing": 0.99}
    soft = Variant("soft restart", "tam-variant", own, {**long, "soft_restart": True})
    return (
        Variant("SGDM", "sgdm", lrs, beta),
        Variant("SGDM, no clipping", "sgdm", lrs, beta, NO_CLIPPING),
        Variant("TAM, smoothing 0.9", "tam", own, short),
        Variant("TAM, smoothing 0.9, no clipping", "tam", own, short, NO_CLIPPING),
        Variant("TAM, smoothing 0.99", "tam", own, long),
        Variant("TAM, smoothing 0.99, no clipping", "tam", own, long, NO_CLIPPING),
        Variant("TAM, gain 5, no clipping", "tam", own, {**short, "gain": 5.0}, NO_CLIPPING),
        soft,
        replace(soft, name="soft restart, constant momentum and damping", lrs=(), control_of=soft.name,
                damping="mean"),
    )  # fmt: skip


def ladder(name: str, title: str, lrs: tuple[float, ...], seeds: range, **workload: Any) -> Ladder:
    """Return a ladder of all variants."""
    common: dict[str, Any] = {"data": "cifar10", "epochs": 5, "batch": 128}
    return Ladder(
        name=name, title=title, workload={**common, **workload}, variants=variants(lrs), baseline="SGDM",
        seeds=tuple(seeds), label="validation loss (nats)", cap=trial.CHANCE, controls=False,
    )  # fmt: skip


RESNET = ladder("resnet", "ResNet18 on CIFAR-10", rungs(LOWEST_LR_RESNET, RUNGS), range(4), model="resnet18")
MLP = ladder("mlp", "An MLP on CIFAR-10", rungs(LOWEST_LR_MLP, RUNGS), range(4), model="mlp")


def pilot() -> Ladder:
    """Return SGDM with and without clipping over a wide range, with seeds of its own, to choose the rungs."""
    study = ladder(
        "pilot", "SGDM: ResNet18 on CIFAR-10", rungs(0.00025, 9, 2.0), range(900, 902), model="resnet18"
    )
    return replace(study, variants=study.variants[:2])


def quick() -> Ladder:
    """Return the MLP at half as many rungs, twice as far apart, with seeds that are not registered."""
    return ladder("quick", "An MLP on CIFAR-10", rungs(LOWEST_LR_MLP, 5, 2.0), range(900, 902), model="mlp")


def smoke() -> Ladder:
    """Return a tiny MLP on digits: less than a minute on two CPU cores."""
    small = {"data": "digits", "model": "tiny-mlp", "epochs": 3, "batch": 64, "held_out": 300}
    study = ladder("smoke", "A small MLP on digits", rungs(0.02, 5, 2.0), range(2), **small)
    return replace(study, small=True, choices=NOTES["smoke"])


EXPERIMENT = Experiment(
    name="sgd_ladder",
    title="SGD with momentum 0.99 at every learning rate (beyond the paper)",
    config=trial.Config, run=trial.run, check=images.check,
    presets={"registered": (RESNET, MLP), "pilot": (pilot(),), "quick": (quick(),), "smoke": (smoke(),)},
    choices=NOTES["choices"],
    curves=(Curve("validation_loss", "Validation loss", "cross-entropy"), *presets.CURVES),
    metrics=(Metric("loss", ".3f", False), Metric("validation_loss", ".3f", False),
             Metric("alignment", "+.3f")),
    data_fields=("data",),
)  # fmt: skip
