"""The appendix's ablations: the smoothing gamma, and AdaTAM with an exponential moving average (AdaTAM2)."""

from __future__ import annotations

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


STUDIES = (*map(gamma_study, PAPER_GAMMA), *map(ema_study, PAPER_EMA))

EXPERIMENT = image_experiment(
    name="ablations",
    title="The smoothing gamma, and AdaTAM2 (the paper's appendix)",
    presets={**presets.presets(STUDIES), "smoke": (presets.tiny(STUDIES[0]), presets.tiny(STUDIES[2]))},
    claims=(8, 9),
)
