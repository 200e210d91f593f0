"""The networks of the image experiments. Those of the paper have its numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu


class Basic(nn.Module):
    """A block of two convolutions of 3 x 3."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(inside, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A block of convolutions of 1 x 1, 3 x 3 (with the stride) and 1 x 1."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(inside, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        y = relu(self.norm2(self.conv2(y)))
        return relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def _shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    if stride == 1 and inside == outside:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    """A ResNet (He et al. 2015): blocks (`depths`) and channels (`widths`) per stage.

    Its stem is 3 x 3, for images of 32 x 32, or if it is `large` that of ImageNet.
    """

    def __init__(
        self, block: type[Basic] | type[Bottleneck], depths: Sequence[int], classes: int,
        widths: Sequence[int] = (64, 128, 256, 512), large: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        inside = widths[0]
        stem: list[nn.Module] = [nn.Conv2d(3, inside, 3, 1, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()]
        if large:
            stem = [nn.Conv2d(3, inside, 7, 2, 3, bias=False), *stem[1:], nn.MaxPool2d(3, 2, 1)]
        blocks: list[nn.Module] = []
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for i in range(depth):
                blocks.append(block(inside, width, 2 if stage and i == 0 else 1))
                inside = width * block.expansion
        self.stem, self.blocks = nn.Sequential(*stem), nn.Sequential(*blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


# Channels and stride of MobileNet's depthwise separable convolutions. Some strides of ImageNet's network are
# left out: an image of 32 x 32 would shrink to nothing.
_LAYERS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


class MobileNet(nn.Module):
    """MobileNet V1 (Howard et al. 2017) for images of 32 x 32."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        inside = 32
        for width, stride in _LAYERS:
            layers += [
                nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False),
                nn.BatchNorm2d(inside), nn.ReLU(),
                nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            ]  # fmt: skip
            inside = width
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """A perceptron with ReLU between its layers: `widths` from the number of pixels to the last layer."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in pairwise(widths):
            layers += [nn.Linear(inside, outside), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.flatten(1)))  # type: ignore[no-any-return]


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
        Model("mlp", "MLP", lambda classes: MLP((3 * 32 * 32, 512, 512), classes)),
        Model("tiny-mlp", "an MLP for digits", lambda classes: MLP((3 * 8 * 8, 32, 32), classes)),
    )
}  # fmt: skip


def get_model(name: str) -> Model:
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
