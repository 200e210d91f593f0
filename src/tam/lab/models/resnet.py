"""ResNets (He et al. 2015) for images of 32 x 32 with a stem of 3 x 3, and ResNet-50 for ImageNet."""

from __future__ import annotations

from collections.abc import Sequence

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
    """A ResNet: blocks (`depths`) and channels (`widths`) per stage; `large`, with ImageNet's stem."""

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
