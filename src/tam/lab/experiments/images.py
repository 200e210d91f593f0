"""Image classification: the paper's Table 1 and the appendix's table of other networks.

The paper's grids are decades; `fair` has half decades, and one range of effective lr for all arms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tam.lab import figures, images, variants
from tam.lab.experiment import Arm, Experiment, Study
from tam.registry import OPTIMIZERS

CHOICES = {
    "batch size": "128: the paper does not say; it is what most have used for ResNets on CIFAR.",
    "schedule": "cosine from the lr to 0, set once an epoch: the paper does not say.",
    "weight decay": "1e-4 unless the study says otherwise, coupled: the paper does not say. SGDM reaches the "
    "paper's 93.6 with 1e-4; 5e-4 is the stronger baseline, so that the main comparison is run at both.",
    "augmentation": "crops of the image padded by 4 pixels, and flips: the paper does not say.",
    "split": "40,000 images to train on and 10,000 to validate on, as the paper has it, drawn for each seed.",
    "outcome": "the last epoch's accuracy on the validation images, fixed beforehand: the paper's is a "
    "validation accuracy, of which epoch it does not say.",
    "precision": "bfloat16 autocast on GPUs, float32 on CPUs; parameters and state are float32.",
}

TEST = "test accuracies in this table of its appendix: beside them stands our column of test %."
CHOICES_VIT = {
    "network": "of the paper's 'ViT' the B/32, whose 87M parameters are the paper's, as timm has it unless "
    "--checkpoint says otherwise: the paper does not say.",
    "pixels": "normalised by CIFAR's own moments, as in the other studies.",
    "epochs": "10, with images of 224 x 224: the paper does not say.",
    "weight decay": "none, as is usual in fine-tuning: the paper does not say.",
    "the paper's figures": TEST,
}

# Table 1 and the appendix's table: mean and spread.
PAPER: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "cifar10-resnet18": {"SGD": (93.3, 0.1), "SGDM": (93.6, 0.3), "TAM": (94.2, 0.2),
                         "Adam": (93.4, 0.1), "AngularGrad": (93.3, 0.2), "AdaTAM": (93.3, 0.3)},
    "cifar10-resnet34": {"SGD": (93.8, 0.1), "SGDM": (93.9, 0.2), "TAM": (94.3, 0.2),
                         "Adam": (93.6, 0.2), "AngularGrad": (93.7, 0.2), "AdaTAM": (93.3, 0.1)},
    "cifar100-resnet18": {"SGD": (73.1, 0.3), "SGDM": (73.2, 0.2), "TAM": (73.8, 0.1),
                          "Adam": (70.1, 0.3), "AngularGrad": (70.9, 0.2), "AdaTAM": (72.7, 0.3)},
    "cifar100-resnet34": {"SGD": (73.6, 0.1), "SGDM": (74.7, 0.1), "TAM": (74.3, 0.3),
                          "Adam": (71.7, 0.1), "AngularGrad": (71.2, 0.2), "AdaTAM": (72.9, 0.1)},
    "cifar10-mobilenet": {"SGD": (93.7, 0.2), "SGDM": (93.9, 0.1), "TAM": (93.9, 0.2),
                          "Adam": (92.7, 0.1), "AngularGrad": (91.7, 0.1), "AdaTAM": (93.1, 0.1)},
    "cifar100-mobilenet": {"SGD": (72.8, 0.1), "SGDM": (72.8, 0.3), "TAM": (72.8, 0.1),
                           "Adam": (69.8, 0.1), "AngularGrad": (66.4, 0.1), "AdaTAM": (70.7, 0.3)},
}  # fmt: skip

PAPER_VIT = {
    "cifar10": {"SGD": (97.1, 0.1), "SGDM": (97.7, 0.1), "TAM": (97.7, 0.1)},
    "cifar100": {"SGD": (74.4, 0.6), "SGDM": (85.3, 0.2), "TAM": (86.2, 0.2)},
}
VIT_LRS = (0.01, 0.03, 0.1, 0.3)

NAMES = ("sgd", "sgdm", "tam", "adam", "angulargrad", "adatam")
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "resnet18": "ResNet18", "resnet34": "ResNet34",
          "mobilenet": "MobileNet", "digits": "scikit-learn's digits", "tiny": "A small ResNet"}  # fmt: skip


def arms(weight_decay: float, lrs: Mapping[str, tuple[float, ...]]) -> tuple[Arm, ...]:
    """The paper's six optimizers, and what TAM must beat to be said to help."""
    options: dict[str, Any] = {"weight_decay": weight_decay}
    found = {name: Arm(OPTIMIZERS[name].title, name, lrs[name], options) for name in NAMES if name in lrs}
    return (*found.values(), *variants.controls(found["tam"]))


def study(data: str, model: str, weight_decay: float, **more: Any) -> Study:
    name = f"{data}-{model}"
    given: dict[str, Any] = {"epochs": 200, "batch": 128, **more.pop("workload", {})}
    suffix = "" if weight_decay == 1e-4 else f"-wd{weight_decay:g}"
    return Study(
        name + suffix,
        f"{TITLES.get(model, model)} on {TITLES.get(data, data)}, weight decay {weight_decay:g}",
        {"data": data, "model": model, **given},
        baseline="SGDM",
        paper=PAPER.get(name, {}),
        choices=more.pop("choices", {"the paper's figures": TEST} if model == "mobilenet" else {}),
        **more,
    )


def paper() -> tuple[Study, ...]:
    """The paper's networks, grids and epochs; 3 seeds, since it does not say how many."""
    grids = {name: OPTIMIZERS[name].lr_grid for name in NAMES}
    pairs = [
        (data, model) for data in ("cifar10", "cifar100") for model in ("resnet18", "resnet34", "mobilenet")
    ]
    more = {"seeds": (0, 1, 2), "tuning_seeds": (100,)}
    found = [study(data, model, 1e-4, arms=arms(1e-4, grids), **more) for data, model in pairs]
    return (*found, study("cifar10", "resnet18", 5e-4, arms=arms(5e-4, grids), **more))


def vit(data: str) -> Study:
    """ViT-B/32, pretrained on ImageNet, fine-tuned with the paper's own grids: without the adaptive ones."""
    lrs = {"sgd": VIT_LRS, "sgdm": VIT_LRS, "tam": tuple(2 * lr for lr in VIT_LRS)}
    workload = {
        "data": data,
        "model": "vit",
        "epochs": 10,
        "batch": 128,
        "resize": 224,
        "checkpoint": "timm:vit_base_patch32_224",
    }
    return Study(
        f"{data}-vit",
        f"ViT-B/32 fine-tuned on {TITLES[data]}",
        workload,
        arms(0.0, lrs),
        baseline="SGDM",
        seeds=(0, 1, 2),
        tuning_seeds=(100,),
        paper=PAPER_VIT[data],
        choices=CHOICES_VIT,
    )


def at_the_papers_lr() -> tuple[Study, ...]:
    """ResNet18 on CIFAR-10 in full at the lrs the paper found best: no search."""
    lrs = {name: (OPTIMIZERS[name].lr or 0.0,) for name in NAMES}
    found = []
    for decay in (1e-4, 5e-4):
        tensor = Arm("TAM, tensor", "tam", lrs["tam"], {"weight_decay": decay, "scope": "tensor"})
        found.append(
            study("cifar10", "resnet18", decay, arms=(*arms(decay, lrs), tensor), seeds=tuple(range(10)))
        )
    return tuple(found)


def registered(controls: bool = False) -> tuple[Study, ...]:
    """Return the study of claim 1 in docs/registered.md; `controls`: with another seed's damping, too."""
    lrs = {"sgdm": (0.1,), "tam": (0.2,)}
    sgdm, tam = (one for one in arms(1e-4, lrs) if not one.control_of)
    more = (variants.another_seeds_damping(tam),) if controls else ()
    seeds = tuple(range(3, 13))  # stored trials have 0 to 2
    return (study("cifar10", "resnet18", 1e-4, arms=(sgdm, tam, *more), seeds=seeds, margin=0.3),)


def quick() -> tuple[Study, ...]:
    """Minutes on one GPU: SGDM and TAM for 20 epochs."""
    lrs = {"sgdm": (0.1,), "tam": (0.2,)}
    return (
        replace(
            study(
                "cifar10", "resnet18", 5e-4, arms=arms(5e-4, lrs), seeds=(0, 1, 2), workload={"epochs": 20}
            ),
            paper={},  # of 200 epochs
        ),
    )


def smoke() -> tuple[Study, ...]:
    """Less than a minute on two CPU cores: scikit-learn's digits and a network of 5,000 parameters."""
    lrs = {"sgdm": (0.1,), "tam": (0.02, 0.2)}
    more = {"seeds": (0, 1), "tuning_seeds": (100,), "choices": variants.SMALL, "small": True}
    workload = {"epochs": 2, "batch": 64, "held_out": 300}
    return (study("digits", "tiny", 1e-4, arms=arms(1e-4, lrs), workload=workload, **more),)


EXPERIMENT = Experiment(
    "images",
    "Image classification (the paper's section 4.1 and appendix)",
    images.run,
    images.config_of,
    {
        "paper": paper(),
        "vit": (vit("cifar10"), vit("cifar100")),
        "fair": tuple(map(variants.fair, paper())),
        "lr": at_the_papers_lr(),
        "registered": registered(),
        "registered-controls": registered(controls=True),
        "quick": quick(),
        "smoke": smoke(),
    },
    CHOICES,
    variants.CURVES,
    figures.distribution,
    images.check,
)
