"""ResNet50 on ImageNet: the last column of the paper's table. Meant for many GPUs, started by torchrun."""

from __future__ import annotations

from tam.lab.core import presets
from tam.lab.experiments.imagenet import trial
from tam.lab.experiments.images import studies as images

CHOICES = {
    "batch size": "256 over all ranks: the paper does not say.",
    "schedule": "cosine from the lr to 0, set once per epoch: the paper does not say.",
    "weight decay": "1e-4, coupled, the usual one for ResNet50: the paper does not say.",
    "augmentation": "crops of 8 to 100% of the area and flips; the middle for validation: the paper does not "
    "say.",
    "batch norm": "over each rank's share of the batch, as usual. Results depend a little on the number of "
    "ranks, which each result names.",
    "outcome": "the last epoch's accuracy on the 50,000 validation images, like in the paper; no test. The "
    "lr is chosen with other seeds, but on the same images.",
    "precision": "bfloat16 autocast on GPUs, float32 on CPUs. Parameters and optimizer state are float32.",
}
PAPER = {"SGD": (75.4, 0.1), "SGDM": (77.0, 0.1), "TAM": (77.1, 0.1), "Adam": (74.4, 0.5),
         "AngularGrad": (73.8, 0.1), "AdaTAM": (74.5, 0.1)}  # fmt: skip
SMOKE_CHOICES = {
    "batch size": "16 over all ranks.",
    "outcome": "the last epoch's accuracy on 32 generated images. It only shows that everything runs.",
}

STUDY = images.image_study(
    "imagenet-resnet50", "ResNet50 on ImageNet", images.variants(1e-4, images.PAPER_GRIDS), paper=PAPER,
    baseline="SGDM", data="imagenet", model="resnet50", epochs=90, batch=256, **images.TUNED,
)  # fmt: skip
QUICK = images.image_study(
    "imagenet-resnet18", "ResNet18 on ImageNet at 112 x 112, 4 epochs", images.variants(1e-4, images.TWO_LRS),
    data="imagenet", epochs=4, batch=256, size=112,
)  # fmt: skip
SMOKE = images.image_study(
    "generated-tiny", "a small network on generated images", images.variants(1e-4, images.TWO_LRS),
    data="generated", model="tiny", epochs=2, batch=16, size=24, seeds=(0, 1), small=True,
    choices=SMOKE_CHOICES,
)  # fmt: skip

EXPERIMENT = images.image_experiment(
    name="imagenet",
    title="ResNet50 on ImageNet (the paper's section 4.1); start it with torchrun -m tam lab run imagenet",
    presets={"paper": (STUDY,), "fair": (presets.fair(STUDY),), "quick": (QUICK,), "smoke": (SMOKE,)},
    run=trial.run, config=trial.Config, check=trial.check, choices=CHOICES, claims=(3,), runs_on_ranks=True,
)  # fmt: skip
