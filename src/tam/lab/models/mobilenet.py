"""MobileNet V1 (Howard et al. 2017) for images of 32 x 32."""

from __future__ import annotations

from torch import Tensor, nn

# Channels and stride of each depthwise separable convolution. Some strides of ImageNet's network are left
# out: an image of 32 x 32 would shrink to nothing.
_LAYERS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))


class MobileNet(nn.Module):
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
