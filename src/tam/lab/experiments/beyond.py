"""Beyond the paper: the scope of the cosine, weight decay inside it, and larger batches."""

from __future__ import annotations

from typing import Any

from tam.lab import figures, images, variants
from tam.lab.experiment import Arm, Experiment, Study
from tam.lab.experiments.images import CHOICES, arms

DECAY: dict[str, Any] = {"weight_decay": 5e-4}
WORKLOAD: dict[str, Any] = {"data": "cifar10", "model": "resnet18", "epochs": 200, "batch": 128}

SCOPE = Study(
    "scope",
    "What one cosine is taken over: ResNet18 on CIFAR-10, weight decay 5e-4",
    WORKLOAD,
    (
        Arm("SGDM", "sgdm", (0.1,), DECAY),
        Arm("TAM, global", "tam", (0.2,), {**DECAY, "scope": "global"}),
        Arm("TAM, group", "tam", (0.2,), {**DECAY, "scope": "group"}, {"grouped": True}),
        Arm("TAM, tensor", "tam", (0.2,), {**DECAY, "scope": "tensor"}),
        # Decay is part of the gradient the cosine is taken of, as in code that adds it before the rule.
        Arm("TAM, decay inside", "tam", (0.2,), DECAY, {"decay_in_cosine": True}),
    ),
    baseline="TAM, global",
    seeds=(0, 1, 2),
)


def batch(size: int) -> Study:
    """With larger batches gradients are less noisy and the cosine is larger; lr is searched anew."""
    grid = tuple(0.1 * 10 ** (i / 2) for i in range(-1, 3))
    lrs = {"sgdm": grid, "tam": tuple(2 * lr for lr in grid)}
    return Study(
        f"batch{size}",
        f"Batches of {size}: ResNet18 on CIFAR-10, weight decay 5e-4",
        {**WORKLOAD, "batch": size},
        arms(5e-4, lrs),
        baseline="SGDM",
        seeds=(0, 1, 2),
        tuning_seeds=(100,),
    )


STUDIES = (SCOPE, *map(batch, (512, 2048, 8192)))

EXPERIMENT = Experiment(
    "beyond",
    "Beyond the paper: scopes, weight decay in the cosine, batch sizes",
    images.run,
    images.config_of,
    variants.presets(STUDIES),
    {
        **CHOICES,
        "batch size": "128 for the scopes, as in `images`; else the study's.",
        "weight decay": "5e-4, coupled: the stronger baseline of those in `images`.",
        "groups": "one for each child of the network's parts: the stem's layers, the blocks, the head.",
    },
    variants.CURVES,
    figures.distribution,
    images.check,
)
