"""The appendix's ablations: the smoothing gamma, and AdaTAM with an exponential moving average (AdaTAM2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tam.lab.core import presets
from tam.lab.core.study import Study, Variant
from tam.lab.experiments.images.studies import DECAY, NOTES, TITLES, TUNED, image_experiment, image_study
from tam.registry import OPTIMIZERS

PAPER_GAMMA, PAPER_EMA = NOTES["paper_gamma"], NOTES["paper_ema"]


def gamma_study(data: str) -> Study:
    variants = (
        Variant(f"TAM, gamma {gamma}", "tam", (0.2,), {**DECAY, "smoothing": float(gamma)})
        for gamma in PAPER_GAMMA[data]
    )
    paper = {f"TAM, gamma {gamma}": figures for gamma, figures in PAPER_GAMMA[data].items()}
    title = f"Smoothing gamma: ResNet18 on {TITLES[data]}"
    return image_study(f"gamma-{data}", title, variants, data=data, paper=paper)


def ema_study(name: str) -> Study:
    # AdaTAM2's momentum is an average, not a sum, so its step is about a tenth. Both have the paper's grid.
    lrs, averaged = OPTIMIZERS["adatam"].lr_grid, {**DECAY, "ema": True}
    variants = (Variant("AdaTAM", "adatam", lrs, DECAY), Variant("AdaTAM2", "adatam", lrs, averaged))
    data, model = name.split("-")
    title = f"AdaTAM with an exponential moving average: {TITLES[model]} on {TITLES[data]}"
    return image_study(f"ema-{name}", title, variants, data=data, model=model, paper=PAPER_EMA[name], **TUNED)


def registered() -> tuple[Study, ...]:
    """Return the studies of claims 8 and 9 in registered.md, each at an equal effective lr."""
    tam, adatam = Variant("TAM", "tam", (0.2,), DECAY), Variant("AdaTAM", "adatam", (1e-4,), DECAY)
    without = replace(tam, name="TAM, smoothing 0", options={**DECAY, "smoothing": 0.0})
    averaged = Variant("AdaTAM2 at 0.0005", "adatam", (5e-4,), {**DECAY, "ema": True})
    more: dict[str, Any] = {"seeds": tuple(range(3, 12)), "margin": 0.3}
    return (
        image_study("smoothing", "Smoothing 0 and 0.9: ResNet18 on CIFAR-10", (tam, without), **more),
        image_study("ema", "AdaTAM2 and AdaTAM: ResNet18 on CIFAR-10", (adatam, averaged), **more),
    )


STUDIES = (*map(gamma_study, PAPER_GAMMA), *map(ema_study, PAPER_EMA))

EXPERIMENT = image_experiment(
    name="ablations",
    title="The smoothing gamma, and AdaTAM2 (the paper's appendix)",
    presets={
        **presets.presets(STUDIES),
        "registered": registered(),
        "smoke": (presets.tiny(STUDIES[0]), presets.tiny(STUDIES[2])),
    },
    claims=(8, 9),
)
