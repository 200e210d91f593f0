"""The appendix's ablations: the smoothing gamma, and AdaTAM with an exponential moving average (AdaTAM2)."""

from __future__ import annotations

from typing import Any

from tam.lab import figures, images, variants
from tam.lab.experiment import Arm, Experiment, Study
from tam.lab.experiments.images import CHOICES, TITLES
from tam.registry import OPTIMIZERS

GAMMAS = (0.9, 0.99, 0.8, 0.5, 0.0)
DECAY: dict[str, Any] = {"weight_decay": 1e-4}

# The appendix's tables: mean and spread.
PAPER_GAMMA = {
    "cifar10": {0.99: (93.9, 0.1), 0.9: (94.2, 0.2), 0.8: (94.1, 0.2), 0.5: (93.9, 0.1), 0.0: (94.1, 0.1)},
    "cifar100": {0.99: (74.0, 0.1), 0.9: (73.8, 0.1), 0.8: (74.1, 0.3), 0.5: (73.7, 0.4), 0.0: (74.1, 0.3)},
}
PAPER_EMA = {
    ("cifar10", "resnet18"): ((93.3, 0.3), (93.3, 0.1)),
    ("cifar10", "resnet34"): ((93.3, 0.1), (93.6, 0.2)),
    ("cifar100", "resnet18"): ((72.7, 0.3), (71.9, 0.2)),
    ("cifar100", "resnet34"): ((72.9, 0.1), (72.6, 0.1)),
}


def gamma(data: str) -> Study:
    arms = tuple(Arm(f"TAM, gamma {g:g}", "tam", (0.2,), {**DECAY, "smoothing": g}) for g in GAMMAS)
    return Study(
        f"gamma-{data}",
        f"Smoothing gamma: ResNet18 on {TITLES[data]}",
        {"data": data, "model": "resnet18", "epochs": 200, "batch": 128},
        arms,
        baseline="TAM, gamma 0.9",
        seeds=(0, 1, 2),
        paper={f"TAM, gamma {g:g}": PAPER_GAMMA[data][g] for g in GAMMAS},
    )


def ema(data: str, model: str) -> Study:
    arms = (
        # AdaTAM2's momentum is an average, not a sum, and its step about a tenth: both have the paper's grid.
        Arm("AdaTAM", "adatam", OPTIMIZERS["adatam"].lr_grid, DECAY),
        Arm("AdaTAM2", "adatam", OPTIMIZERS["adatam"].lr_grid, {**DECAY, "ema": True}),
    )
    return Study(
        f"ema-{data}-{model}",
        f"AdaTAM with an exponential moving average: {TITLES[model]} on {TITLES[data]}",
        {"data": data, "model": model, "epochs": 200, "batch": 128},
        arms,
        baseline="AdaTAM",
        seeds=(0, 1, 2),
        tuning_seeds=(100,),
        paper=dict(zip(("AdaTAM", "AdaTAM2"), PAPER_EMA[data, model], strict=True)),
    )


STUDIES = (*map(gamma, PAPER_GAMMA), *(ema(data, model) for data, model in PAPER_EMA))

EXPERIMENT = Experiment(
    "ablations",
    "The smoothing gamma, and AdaTAM2 (the paper's appendix)",
    images.run,
    images.config_of,
    {**variants.presets(STUDIES), "smoke": (variants.tiny(STUDIES[0]), variants.tiny(STUDIES[2]))},
    CHOICES,
    variants.CURVES,
    figures.distribution,
    images.check,
)
