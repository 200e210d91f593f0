"""The parameter lists the step is timed on."""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet18(classes: int = 10) -> list[Shape]:
    """ResNet-18 for 32 x 32 images: 62 tensors, 11.2M numbers."""
    convolutions: list[Shape] = [(64, 3, 3, 3)]
    channels = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            convolutions += [(width, channels, 3, 3), (width, width, 3, 3)]
            if channels != width:
                convolutions.append((width, channels, 1, 1))
            channels = width
    norms = [(shape[0],) for shape in convolutions for _ in range(2)]
    return [*convolutions, *norms, (classes, 512), (classes,)]


def bert(hidden: int, layers: int, vocabulary: int = 30522) -> list[Shape]:
    """A BERT encoder with its masked-LM head, the output tied to the embedding."""
    h = hidden
    shapes: list[Shape] = [(vocabulary, h), (512, h), (2, h), (h,), (h,)]
    for _ in range(layers):
        shapes += [shape for _ in range(4) for shape in ((h, h), (h,))]
        shapes += [(h,), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,), (h,), (h,)]
    return [*shapes, (h, h), (h,), (h,), (h,), (vocabulary,)]


LISTS = {
    "resnet18": resnet18(),
    "bert-base": bert(768, 12),
    "bert-large": bert(1024, 24),
    "1.3B": bert(2048, 24, 50000),
}
