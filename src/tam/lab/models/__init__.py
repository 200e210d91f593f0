"""The networks of the paper's image classification, with the paper's numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from tam.lab.models.mobilenet import MobileNet
from tam.lab.models.resnet import Basic, Bottleneck, ResNet


@dataclass(frozen=True)
class Model:
    """A network by name."""

    name: str
    title: str
    make: Callable[[int], nn.Module]  # given the number of classes
    paper: str = ""  # the paper's number of parameters
    note: str = ""  # why that number does not fit


def _vit(classes: int) -> nn.Module:
    import timm  # with new weights: a trial names its checkpoint

    model: nn.Module = timm.create_model("vit_base_patch32_224", num_classes=classes)
    return model


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("resnet18", "ResNet18", lambda classes: ResNet(Basic, (2, 2, 2, 2), classes), "11M"),
        Model("resnet34", "ResNet34", lambda classes: ResNet(Basic, (3, 4, 6, 3), classes), "22M"),
        Model("resnet50", "ResNet50",
              lambda classes: ResNet(Bottleneck, (3, 4, 6, 3), classes, large=True), "25.5M"),
        Model("mobilenet", "MobileNet", MobileNet, "13M",
              "MobileNet V1, which the paper cites, has 3.2M here and 4.2M on ImageNet: 13M fits neither"),
        Model("vit", "ViT-B/32", _vit, "87M",
              "the paper names no variant; 87M fits ViT-B/32, ViT-B/16 has 86M"),
        Model("tiny", "a ResNet of 8 channels", lambda classes: ResNet(Basic, (1, 1), classes, (8, 16))),
    )
}  # fmt: skip


def get_model(name: str) -> Model:
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
