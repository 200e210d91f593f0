"""Image classification: the paper's Table 1, and its appendix's table of other networks.

The paper's grids are decades. Those of `fair` are half decades in one range of effective lr for all variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from tam.lab.core import controls, presets
from tam.lab.core.registry import Experiment, ReportExtras
from tam.lab.core.study import Metric, Study, Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.images import trial
from tam.lab.report import damping_charts
from tam.lab.training.factory import CHECKPOINT_OPTION
from tam.registry import OPTIMIZERS

NOTES = read_toml(Path(__file__).with_name("notes.toml"))
CHOICES, TITLES = NOTES["choices"], NOTES["titles"]
METRICS = (Metric("loss", ".3f", False), Metric("validation", ".2f", True), Metric("alignment", "+.3f"))

NAMES = ("sgd", "sgdm", "tam", "adam", "angulargrad", "adatam")
VIT_LRS = (0.01, 0.03, 0.1, 0.3)
DECAY: dict[str, Any] = {"weight_decay": 1e-4}
RESNET18: dict[str, Any] = {"data": "cifar10", "model": "resnet18", "epochs": 200, "batch": 128}
SEEDS: dict[str, Any] = {"seeds": (0, 1, 2)}  # the paper does not say how many
TUNED: dict[str, Any] = {**SEEDS, "tuning_seeds": presets.TUNING_SEEDS}
PAPER_GRIDS = {name: OPTIMIZERS[name].lr_grid for name in NAMES}
TWO_LRS = {"sgdm": (0.1,), "tam": (0.2,)}
SMOKE_LRS = {"sgdm": (0.1,), "tam": (0.02, 0.2)}


def image_experiment(**declared: Any) -> Experiment:
    """Return an experiment whose trials are those of image classification."""
    common: dict[str, Any] = {
        "run": trial.run, "config": trial.Config, "check": trial.check, "choices": CHOICES,
        "curves": presets.CURVES, "metrics": METRICS, "data_fields": ("data",),
        "extras": ReportExtras(figures=damping_charts.distribution),
    }  # fmt: skip
    return Experiment(**{**common, **declared})


def variants(weight_decay: float, lrs: Mapping[str, tuple[float, ...]]) -> tuple[Variant, ...]:
    """Return the paper's optimizers for which there are lrs, and TAM's controls."""
    names, options = [name for name in NAMES if name in lrs], {"weight_decay": weight_decay}
    compared = [Variant(OPTIMIZERS[name].title, name, lrs[name], options) for name in names]
    return (*compared, *controls.controls(compared[names.index("tam")]))


def image_study(name: str, title: str, variants: Iterable[Variant], **more: Any) -> Study:
    """Return a study; `more` are fields of it and of its workload, by default ResNet18 on CIFAR-10.

    The first variant is the baseline, unless another one is named.
    """
    compared, names = tuple(variants), {field.name for field in fields(Study)}
    study_fields = {key: value for key, value in more.items() if key in names}
    workload = {**RESNET18, **{key: value for key, value in more.items() if key not in names}}
    return Study(name, title, workload, compared, **{"baseline": compared[0].name, **SEEDS, **study_fields})


def study(data: str, model: str, weight_decay: float, variants: tuple[Variant, ...], **more: Any) -> Study:
    """Return a study of one network on one data set; `more` are fields of the study or its workload."""
    name, title = f"{data}-{model}", f"{TITLES[model]} on {TITLES[data]}, weight decay {weight_decay:g}"
    suffix = "" if weight_decay == 1e-4 else f"-wd{weight_decay:g}"
    notes = {"paper": NOTES["paper"].get(name, {}), "choices": NOTES.get(model, {})}
    more = {"baseline": "SGDM", **notes, **more}
    return image_study(f"{name}{suffix}", title, variants, data=data, model=model, **more)


def paper() -> tuple[Study, ...]:
    """Return the paper's networks, grids and epochs."""
    models = ("resnet18", "resnet34", "mobilenet")
    settings = [*product(("cifar10", "cifar100"), models, (1e-4,)), ("cifar10", "resnet18", 5e-4)]
    return tuple(study(*setting, variants(setting[2], PAPER_GRIDS), **TUNED) for setting in settings)


def vit(data: str) -> Study:
    """Return the fine-tuning of ViT-B/32, pretrained on ImageNet, with the paper's grids. It has no Adam."""
    lrs = {"sgd": VIT_LRS, "sgdm": VIT_LRS, "tam": tuple(2 * lr for lr in VIT_LRS)}
    workload = {"data": data, "model": "vit", "epochs": 10, "resize": 224}
    name, title = f"{data}-vit", f"ViT-B/32 fine-tuned on {TITLES[data]}"
    return image_study(
        name, title, variants(0.0, lrs), **workload, checkpoint="timm:vit_base_patch32_224",
        baseline="SGDM", paper=NOTES["paper"][name], choices=NOTES["vit"], **TUNED,
    )  # fmt: skip


def at_paper_lrs(weight_decay: float) -> Study:
    """Return ResNet18 on CIFAR-10 at the lrs the paper found best, without a search."""
    lrs = {name: (OPTIMIZERS[name].lr or 0.0,) for name in NAMES}
    tensor = Variant("TAM, tensor", "tam", lrs["tam"], {"weight_decay": weight_decay, "scope": "tensor"})
    compared = (*variants(weight_decay, lrs), tensor)
    return study("cifar10", "resnet18", weight_decay, compared, seeds=tuple(range(10)))


def registered(with_controls: bool = False) -> Study:
    """Return the study of claim 1 in registered.md, with or without its control."""
    sgdm, tam = variants(1e-4, TWO_LRS)[:2]
    compared = (sgdm, tam, *([controls.another_seeds_damping(tam)] if with_controls else []))
    seeds = tuple(range(3, 13))  # stored trials have 0 to 2
    return study("cifar10", "resnet18", 1e-4, compared, seeds=seeds, margin=0.3)


def registered_adaptive() -> Study:
    """Return the study of claim 4 in registered.md. Adam at 5e-4 has AdaTAM's effective lr."""
    lrs = {"AdaTAM": 1e-4, "Adam at 0.0005": 5e-4, "Adam": 1e-3, "AngularGrad": 1e-3}
    compared = [Variant(name, name.split()[0].lower(), (lr,), DECAY) for name, lr in lrs.items()]
    compared[0] = replace(compared[0], versus="Adam at 0.0005", against=("AngularGrad",))
    title, seeds = "Adaptive optimizers: ResNet18 on CIFAR-10, weight decay 0.0001", tuple(range(3, 16))
    return image_study(
        "cifar10-adaptive", title, compared, baseline="Adam at 0.0005", seeds=seeds, margin=0.3
    )


def smoke() -> Study:
    """Return a network of 5,000 parameters on digits: less than a minute on two CPU cores."""
    compared, workload = variants(1e-4, SMOKE_LRS), {"epochs": 2, "batch": 64, "held_out": 300}
    more = {"seeds": (0, 1), "tuning_seeds": (100,), "choices": presets.SMALL, "small": True}
    return study("digits", "tiny", 1e-4, compared, **workload, **more)


EXPERIMENT = image_experiment(
    name="images",
    title="Image classification (the paper's section 4.1 and appendix)",
    presets={
        "paper": paper(),
        "vit": (vit("cifar10"), vit("cifar100")),
        "fair": tuple(map(presets.fair, paper())),
        "lr": (at_paper_lrs(1e-4), at_paper_lrs(5e-4)),
        "registered": (registered(),), "registered-controls": (registered(with_controls=True),),
        "registered-adaptive": (registered_adaptive(),),
        # Minutes on one GPU. The paper's figures are of 200 epochs.
        "quick": (study("cifar10", "resnet18", 5e-4, variants(5e-4, TWO_LRS), epochs=20, paper={}),),
        "smoke": (smoke(),),
    },
    options=(CHECKPOINT_OPTION,), claims=(1, 2, 3, 4, 5),
)  # fmt: skip
