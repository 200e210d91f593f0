"""When does torque help SGD? Image classifiers with momentum 0.99, at every learning rate.

The hypotheses H5 and H7 and the rules that decide them are in registered.md.
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
# A pilot of SGDM on a CPU, seeds 900 to 902: the best lr is 0.002 with clipping and 0.001 without, the upper
# knees are near 0.0037 and 0.0016.
LOWEST_LR_MLP = 0.00035
# Its pilot, seed 900, on a GPU: the upper knee of SGDM without clipping is 0.0021.
LOWEST_LR_RESNET = 0.00053
# With momentum 0.9, the settled step is 10 times shorter than with 0.99.
LOWEST_LR_DEFAULT = 10 * LOWEST_LR_MLP
NO_CLIPPING = {"clip": 0.0}
ALL = "S1 S1n S2 S2n S3 S3n S4 S5 S5c"
DECIDING = "S1n S2n S3n S4 S5 S5c"  # what H5 and H7 compare


def variants(lrs: tuple[float, ...]) -> dict[str, Variant]:
    """Return the variants of the registration, by their number there, at these lrs of SGDM. beta is 0.99."""
    own = tuple(2 * lr for lr in lrs)  # a gradient's weight is 1/2 at s = 0
    beta: dict[str, Any] = {"momentum": 0.99}
    short, long = {**beta, "smoothing": 0.9}, {**beta, "smoothing": 0.99}
    soft = Variant("soft restart", "tam-variant", own, {**long, "soft_restart": True})
    return {
        "S1": Variant("SGDM", "sgdm", lrs, beta),
        "S1n": Variant("SGDM, no clipping", "sgdm", lrs, beta, NO_CLIPPING),
        "S2": Variant("TAM, smoothing 0.9", "tam", own, short),
        "S2n": Variant("TAM, smoothing 0.9, no clipping", "tam", own, short, NO_CLIPPING),
        "S3": Variant("TAM, smoothing 0.99", "tam", own, long),
        "S3n": Variant("TAM, smoothing 0.99, no clipping", "tam", own, long, NO_CLIPPING),
        "S4": Variant("TAM, gain 5, no clipping", "tam", own, {**short, "gain": 5.0}, NO_CLIPPING),
        "S5": soft,
        "S5c": replace(soft, name="soft restart, constant momentum and damping", lrs=(),
                       control_of=soft.name, damping="mean"),
    }  # fmt: skip


def default_variants(lrs: tuple[float, ...]) -> tuple[Variant, ...]:
    """Return SGDM and TAM with their default options, momentum 0.9, at these lrs of SGDM."""
    own = tuple(2 * lr for lr in lrs)
    return (
        Variant("SGDM", "sgdm", lrs), Variant("SGDM, no clipping", "sgdm", lrs, {}, NO_CLIPPING),
        Variant("TAM", "tam", own), Variant("TAM, no clipping", "tam", own, {}, NO_CLIPPING),
    )  # fmt: skip


def ladder(
    name: str, title: str, compared: tuple[Variant, ...], seeds: range, choices: str, **workload: Any
) -> Ladder:
    """Return a ladder of these variants. The first one is the baseline."""
    common: dict[str, Any] = {"data": "cifar10", "epochs": 5, "batch": 128}
    return Ladder(
        name=name, title=title, workload={**common, **workload}, variants=compared,
        baseline=compared[0].name, seeds=tuple(seeds), label="validation loss (nats)", cap=trial.CHANCE,
        controls=False, choices=NOTES[choices],
    )  # fmt: skip


def registered_ladder(
    name: str, title: str, lrs: tuple[float, ...], seeds: range, keys: str = ALL, **workload: Any
) -> Ladder:
    """Return a ladder of the variants with these numbers."""
    compared = tuple(variants(lrs)[key] for key in keys.split())
    return ladder(name, title, compared, seeds, "registered", **workload)


RESNET = registered_ladder(
    "resnet", "ResNet18 on CIFAR-10", rungs(LOWEST_LR_RESNET, 8), range(4), DECIDING, model="resnet18",
    epochs=3,
)  # fmt: skip
MLP = registered_ladder("mlp", "An MLP on CIFAR-10", rungs(LOWEST_LR_MLP, 10), range(4), model="mlp")
# Exploratory.
MLP_DEFAULT = ladder(
    "mlp-0.9", "An MLP on CIFAR-10, momentum 0.9", default_variants(rungs(LOWEST_LR_DEFAULT, 10)),
    range(10, 14), "default_momentum", model="mlp",
)  # fmt: skip


def pilot() -> Ladder:
    """Return SGDM with and without clipping over a wide range, with its own seed, to choose the rungs."""
    return registered_ladder(
        "pilot", "SGDM: ResNet18 on CIFAR-10", rungs(0.00025, 9, 2.0), range(900, 901), "S1 S1n",
        model="resnet18", epochs=3,
    )  # fmt: skip


def quick() -> Ladder:
    """Return the MLP at half as many rungs, twice as far apart, with seeds that are not registered."""
    lrs = rungs(LOWEST_LR_MLP, 5, 2.0)
    return registered_ladder("quick", "An MLP on CIFAR-10", lrs, range(900, 902), model="mlp")


def smoke() -> Ladder:
    """Return a tiny MLP on digits: less than a minute on two CPU cores."""
    small: dict[str, Any] = {"data": "digits", "model": "tiny-mlp", "epochs": 3, "batch": 64, "held_out": 300}
    study = registered_ladder("smoke", "A small MLP on digits", rungs(0.02, 5, 2.0), range(2), **small)
    return replace(study, small=True, choices=NOTES["smoke"])


EXPERIMENT = Experiment(
    name="sgd_ladder",
    title="SGD with momentum at every learning rate (beyond the paper)",
    config=trial.Config, run=trial.run, check=images.check,
    presets={
        "registered": (RESNET, MLP), "default-momentum": (MLP_DEFAULT,), "pilot": (pilot(),),
        "quick": (quick(),), "smoke": (smoke(),),
    },
    choices=NOTES["choices"],
    curves=(Curve("validation_loss", "Validation loss", "cross-entropy"), *presets.CURVES),
    metrics=(Metric("loss", ".3f", False), Metric("validation_loss", ".3f", False),
             Metric("alignment", "+.3f")),
    cpu_presets=("default-momentum", "quick", "smoke"), data_fields=("data",),
)  # fmt: skip
