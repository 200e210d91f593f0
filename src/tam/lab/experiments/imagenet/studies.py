"""ResNet50 on ImageNet: the last column of the paper's table. Meant for many GPUs, started by torchrun."""

from __future__ import annotations

from pathlib import Path

from tam.lab.core import presets
from tam.lab.core.toml import read_toml
from tam.lab.experiments.imagenet import trial
from tam.lab.experiments.images import studies as images

NOTES = read_toml(Path(__file__).with_name("notes.toml"))

STUDY = images.image_study(
    "imagenet-resnet50", "ResNet50 on ImageNet", images.variants(1e-4, images.PAPER_GRIDS),
    paper=NOTES["paper"], baseline="SGDM", data="imagenet", model="resnet50", epochs=90, batch=256,
    **images.TUNED,
)  # fmt: skip
QUICK = images.image_study(
    "imagenet-resnet18", "ResNet18 on ImageNet at 112 x 112, 4 epochs", images.variants(1e-4, images.TWO_LRS),
    data="imagenet", epochs=4, batch=256, size=112,
)  # fmt: skip
SMOKE = images.image_study(
    "generated-tiny", "a small network on generated images", images.variants(1e-4, images.TWO_LRS),
    data="generated", model="tiny", epochs=2, batch=16, size=24, seeds=(0, 1), small=True,
    choices=NOTES["smoke"],
)  # fmt: skip

EXPERIMENT = images.image_experiment(
    name="imagenet",
    title="ResNet50 on ImageNet (the paper's section 4.1); start it with torchrun -m tam lab run imagenet",
    presets={"paper": (STUDY,), "fair": (presets.fair(STUDY),), "quick": (QUICK,), "smoke": (SMOKE,)},
    choices=NOTES["choices"], run=trial.run, config=trial.Config, check=trial.check, claims=(3,),
    modules=("PIL",), runs_on_ranks=True,
)  # fmt: skip
