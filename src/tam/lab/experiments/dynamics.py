"""What happens during training: how s evolves, and the gradient norm (the appendix's figures).

The paper shows curves without figures; the report draws the same curves from our runs. Of the gradient norms
it says that a jump comes later with TAM than with SGDM on SVHN, and that on CIFAR-100 TAM has none in the
first 100 epochs.
"""

from __future__ import annotations

from typing import Any

from tam.lab import figures, images, variants
from tam.lab.experiment import Arm, Experiment, Study
from tam.lab.experiments.images import CHOICES, TITLES

DECAY: dict[str, Any] = {"weight_decay": 1e-4}
SGDM, TAM = Arm("SGDM", "sgdm", (0.1,), DECAY), Arm("TAM", "tam", (0.2,), DECAY)


def study(name: str, data: str, arms: tuple[Arm, ...], baseline: str, **more: Any) -> Study:
    title = f"ResNet18 on {TITLES.get(data, data.upper())}: {' / '.join(arm.name for arm in arms)}"
    workload = {"data": data, "model": "resnet18", "epochs": 200, "batch": 128, **more}
    return Study(name, title, workload, arms, baseline=baseline, seeds=(0, 1, 2))


FIXED = {"schedule": "constant"}  # the paper's section on warm-up has a fixed learning rate
SWITCHED = Arm("SGDM sw=25", "sgdm", (0.1,), DECAY, {"halve_at": 25})
ADAPTIVE = (Arm("Adam", "adam", (0.001,), DECAY), Arm("AdaTAM", "adatam", (0.0001,), DECAY))

STUDIES = (
    study("alignment-cifar10", "cifar10", (SGDM, TAM), "SGDM"),
    study("alignment-cifar100", "cifar100", (SGDM, TAM), "SGDM"),
    study("norms-svhn", "svhn", (SGDM, TAM), "SGDM", **FIXED),
    study("norms-cifar100", "cifar100", (SGDM, TAM, SWITCHED), "SGDM", **FIXED),
    study("norms-cifar100-adaptive", "cifar100", ADAPTIVE, "Adam", **FIXED),
)

EXPERIMENT = Experiment(
    "dynamics",
    "The evolution of s and the gradient norm (the paper's appendix)",
    images.run,
    images.config_of,
    {**variants.presets(STUDIES), "smoke": (variants.tiny(STUDIES[0]), variants.tiny(STUDIES[3]))},
    {
        **CHOICES,
        "schedule": "cosine for the evolution of s, as in `images`; fixed for the gradient norms.",
        "sw": "25 epochs; the paper says steps, but draws epochs.",
        "augmentation": f"{CHOICES['augmentation']} Flips on SVHN, too, where digits are mirrored.",
    },
    variants.CURVES,
    figures.distribution,
    images.check,
)
