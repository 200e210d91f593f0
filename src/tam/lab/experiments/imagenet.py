"""ResNet50 on ImageNet: the last column of the paper's table. Meant for many GPUs: torchrun starts it."""

from __future__ import annotations

from dataclasses import replace

from tam.lab import figures, imagenet, variants
from tam.lab.experiment import Experiment, Study
from tam.lab.experiments.images import NAMES, arms
from tam.registry import OPTIMIZERS

CHOICES = {
    "batch size": "256 over all ranks: the paper does not say.",
    "schedule": "cosine from the lr to 0, set once an epoch: the paper does not say.",
    "weight decay": "1e-4, coupled, the usual one for ResNet50: the paper does not say.",
    "augmentation": "crops of 8 to 100% of the area and flips; the middle to validate on: the paper does "
    "not say.",
    "batch norm": "over each rank's share of the batch, as is usual: results depend a little on the number "
    "of ranks, which each result names.",
    "outcome": "the last epoch's accuracy on the 50,000 validation images, as the paper has it; no test. The "
    "lr is chosen with other seeds, but by the same images.",
    "precision": "bfloat16 autocast on GPUs, float32 on CPUs; parameters and state are float32.",
}
PAPER = {"SGD": (75.4, 0.1), "SGDM": (77.0, 0.1), "TAM": (77.1, 0.1), "Adam": (74.4, 0.5),
         "AngularGrad": (73.8, 0.1), "AdaTAM": (74.5, 0.1)}  # fmt: skip

STUDY = Study(
    "imagenet-resnet50",
    "ResNet50 on ImageNet",
    {"data": "imagenet", "model": "resnet50", "epochs": 90, "batch": 256},
    arms(1e-4, {name: OPTIMIZERS[name].lr_grid for name in NAMES}),
    baseline="SGDM",
    seeds=(0, 1, 2),
    tuning_seeds=(100,),
    paper=PAPER,
)
QUICK = replace(
    STUDY,
    name="imagenet-resnet18",
    title="ResNet18 on ImageNet at 112 x 112, 4 epochs",
    workload={"data": "imagenet", "epochs": 4, "batch": 256, "model": "resnet18", "size": 112},
    arms=arms(1e-4, {"sgdm": (0.1,), "tam": (0.2,)}),
    tuning_seeds=(),
    paper={},
)
SMOKE = replace(
    QUICK,
    name="generated-tiny",
    title="a small network on generated images",
    workload={"data": "generated", "model": "tiny", "epochs": 2, "batch": 16, "size": 24},
    seeds=(0, 1),
    small=True,
    choices={
        "batch size": "16 over all ranks.",
        "outcome": "the last epoch's accuracy on 32 generated images: it shows that everything runs, and "
        "means nothing.",
    },
)

EXPERIMENT = Experiment(
    "imagenet",
    "ResNet50 on ImageNet (the paper's section 4.1): torchrun --nproc-per-node N -m tam lab run imagenet",
    imagenet.run,
    imagenet.config_of,
    {"paper": (STUDY,), "fair": (variants.fair(STUDY),), "quick": (QUICK,), "smoke": (SMOKE,)},
    CHOICES,
    variants.CURVES,
    figures.distribution,
    imagenet.check,
    ranks=True,
)
