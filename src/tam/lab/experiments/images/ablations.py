"""The appendix's ablations: the smoothing gamma, and AdaTAM with an exponential moving average (AdaTAM2)."""

from __future__ import annotations

from tam.lab.core import presets
from tam.lab.core.study import Study, Variant
from tam.lab.experiments.images.studies import DECAY, TITLES, TUNED, image_experiment, image_study
from tam.registry import OPTIMIZERS

# The appendix's tables: mean and spread.
PAPER_GAMMA = {
    "cifar10": {0.9: (94.2, 0.2), 0.99: (93.9, 0.1), 0.8: (94.1, 0.2), 0.5: (93.9, 0.1), 0.0: (94.1, 0.1)},
    "cifar100": {0.9: (73.8, 0.1), 0.99: (74.0, 0.1), 0.8: (74.1, 0.3), 0.5: (73.7, 0.4), 0.0: (74.1, 0.3)},
}
PAPER_EMA = {
    ("cifar10", "resnet18"): {"AdaTAM": (93.3, 0.3), "AdaTAM2": (93.3, 0.1)},
    ("cifar10", "resnet34"): {"AdaTAM": (93.3, 0.1), "AdaTAM2": (93.6, 0.2)},
    ("cifar100", "resnet18"): {"AdaTAM": (72.7, 0.3), "AdaTAM2": (71.9, 0.2)},
    ("cifar100", "resnet34"): {"AdaTAM": (72.9, 0.1), "AdaTAM2": (72.6, 0.1)},
}


def gamma_study(data: str) -> Study:
    names = {gamma: f"TAM, gamma {gamma:g}" for gamma in PAPER_GAMMA[data]}
    variants = (Variant(names[gamma], "tam", (0.2,), {**DECAY, "smoothing": gamma}) for gamma in names)
    paper = {names[gamma]: figures for gamma, figures in PAPER_GAMMA[data].items()}
    title = f"Smoothing gamma: ResNet18 on {TITLES[data]}"
    return image_study(f"gamma-{data}", title, variants, data=data, paper=paper)


def ema_study(data: str, model: str) -> Study:
    # AdaTAM2's momentum is an average, not a sum, so its step is about a tenth. Both have the paper's grid.
    lrs, averaged = OPTIMIZERS["adatam"].lr_grid, {**DECAY, "ema": True}
    variants = (Variant("AdaTAM", "adatam", lrs, DECAY), Variant("AdaTAM2", "adatam", lrs, averaged))
    title = f"AdaTAM with an exponential moving average: {TITLES[model]} on {TITLES[data]}"
    paper = PAPER_EMA[data, model]
    return image_study(f"ema-{data}-{model}", title, variants, data=data, model=model, paper=paper, **TUNED)


STUDIES = (*map(gamma_study, PAPER_GAMMA), *(ema_study(data, model) for data, model in PAPER_EMA))

EXPERIMENT = image_experiment(
    name="ablations",
    title="The smoothing gamma, and AdaTAM2 (the paper's appendix)",
    presets={**presets.presets(STUDIES), "smoke": (presets.tiny(STUDIES[0]), presets.tiny(STUDIES[2]))},
    claims=(8, 9),
)
