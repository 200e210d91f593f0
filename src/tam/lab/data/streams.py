"""Streams of experiences for continual learning: CLEAR-10, and a stream made of a data set that drifts.

CLEAR-10 is read from its official folders, one per year: `clear10/train/labeled_images/1/CLASS/*.jpg` to `10`
(or `clear10/train_image_only/...`), and the same below `clear10/test`.

A drifting stream is not CLEAR and is never called so. It is a data set in ten parts whose appearance changes
from part to part: colours rotate, contrast falls and recovers, saturation falls, noise grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tam.lab.data import find, load, split
from tam.lab.data.imagenet import list_images, middle, read_image


@dataclass(frozen=True)
class Stream:
    """Experiences in order, with images for training, validation and test."""

    classes: int
    images: Tensor  # uint8, of all experiences
    labels: Tensor
    train: list[Tensor]  # indices per experience, equally many
    validation: list[Tensor]
    test: list[Tensor]

    def __len__(self) -> int:
        return len(self.train)


def drifting(data: str, folder: Path, seed: int, experiences: int = 10) -> Stream:
    """Return a data set in equal parts, each with its own appearance and its own validation images."""
    source = load(data, folder)
    train, validation = split(len(source.train[1]), len(source.train[1]) // 5, seed)
    test = torch.randperm(len(source.test[1]), generator=torch.Generator().manual_seed(seed))
    images, labels, parts, total = [], [], [], 0
    for pair, indices in ((source.train, train), (source.train, validation), (source.test, test)):
        size = len(indices) // experiences
        parts.append([torch.arange(total + k * size, total + (k + 1) * size) for k in range(experiences)])
        for k in range(experiences):
            rows = indices[k * size : (k + 1) * size]
            images.append(drift(pair[0][rows], k / max(1, experiences - 1), seed, total + k))
            labels.append(pair[1][rows])
        total += experiences * size
    return Stream(source.classes, torch.cat(images), torch.cat(labels), *parts)


def drift(images: Tensor, how_far: float, seed: int, draw: int) -> Tensor:
    """Return the images with their appearance at a point of the stream (0 to 1). At 0 they do not change.

    Colours rotate by up to 120 degrees, in a direction that depends on the seed. Contrast falls to 1/2 and
    recovers, saturation falls to 1/3, and noise of up to 20 of 255 is added.
    """
    generator = torch.Generator().manual_seed(seed * 1009 + draw)
    direction = 1.0 if torch.rand(1, generator=torch.Generator().manual_seed(seed)) < 0.5 else -1.0
    x = images.float() / 255
    grey = x.mean(1, keepdim=True)
    colour = (1 - 2 * how_far / 3) * torch.einsum("ij,njhw->nihw", turn(direction * 120 * how_far), x - grey)
    contrast = 1 - math.sin(math.pi * how_far) / 2
    noise = how_far * 20 / 255 * torch.randn(x.shape, generator=generator)
    return ((0.5 + contrast * (grey + colour - 0.5) + noise) * 255).round().clamp(0, 255).to(torch.uint8)


def turn(degrees: float) -> Tensor:
    """Return the matrix that rotates colours about the grey axis."""
    angle = math.radians(degrees)
    axis = torch.full((3,), 1 / math.sqrt(3), dtype=torch.float64)
    cross = torch.tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=torch.float64) / math.sqrt(3)
    turned = math.cos(angle) * torch.eye(3, dtype=torch.float64) + math.sin(angle) * cross
    return (turned + (1 - math.cos(angle)) * torch.outer(axis, axis)).float()


def clear(folder: Path, size: int, seed: int) -> Stream:
    """Return CLEAR-10 with the middle of every image. A fifth of each year's training images validates."""
    years = [folder / file.path for file in find("clear", folder).files]  # ten for training, ten for the test
    names = sorted({path.name for path in years[0].parent.glob("*/*") if path.is_dir()})
    images: list[tuple[Path, int]] = []
    parts: list[Tensor] = []
    for year in years:
        begin = len(images)
        images += list_images(year, names)
        parts.append(torch.arange(begin, len(images)))
    train, validation = [], []
    least = min(map(len, parts[:10]))  # all experiences have the same length
    for rows in parts[:10]:
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))][:least]
        train.append(order[least // 5 :])
        validation.append(order[: least // 5])
    pixels = torch.stack([read_image(path, size, middle) for path, _ in images])
    labels = torch.tensor([label for _, label in images])
    return Stream(len(names), pixels, labels, train, validation, parts[10:])
