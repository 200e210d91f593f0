"""What happens during training: how s evolves, and the gradient norm (the appendix's figures).

The paper shows curves without numbers. The report draws the same curves from our runs. The paper says: the
gradient norm jumps later with TAM than with SGDM on SVHN; on CIFAR-100 TAM has none in the first 100 epochs.
"""

from __future__ import annotations

from typing import Any

from tam.lab.core import presets
from tam.lab.core.study import Study, Variant
from tam.lab.experiments.images.studies import CHOICES, DECAY, NOTES, TITLES, image_experiment, image_study

SGDM, TAM = Variant("SGDM", "sgdm", (0.1,), DECAY), Variant("TAM", "tam", (0.2,), DECAY)
HALVED = Variant("SGDM sw=25", "sgdm", (0.1,), DECAY, {"halve_at": 25})
ADAM, ADATAM = Variant("Adam", "adam", (0.001,), DECAY), Variant("AdaTAM", "adatam", (0.0001,), DECAY)
FIXED_LR = {"schedule": "constant"}  # like the paper's section on warm-up


def study(name: str, data: str, *variants: Variant, **workload: Any) -> Study:
    title = f"ResNet18 on {TITLES[data]}: {' / '.join(variant.name for variant in variants)}"
    return image_study(name, title, variants, data=data, **workload)


STUDIES = (
    study("alignment-cifar10", "cifar10", SGDM, TAM),
    study("alignment-cifar100", "cifar100", SGDM, TAM),
    study("norms-svhn", "svhn", SGDM, TAM, **FIXED_LR),
    study("norms-cifar100", "cifar100", SGDM, TAM, HALVED, **FIXED_LR),
    study("norms-cifar100-adaptive", "cifar100", ADAM, ADATAM, **FIXED_LR),
)

EXPERIMENT = image_experiment(
    name="dynamics",
    title="The evolution of s and the gradient norm (the paper's appendix)",
    presets={**presets.presets(STUDIES), "smoke": (presets.tiny(STUDIES[0]), presets.tiny(STUDIES[3]))},
    choices={**CHOICES, **NOTES["dynamics"]},
    claims=(7, 16),
)
