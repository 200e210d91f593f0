"""Streams of experiences for continual learning: CLEAR's folders, and one made of a data set that drifts.

CLEAR-10 lies in its official folders, one for each of ten years:

    clear10/train/labeled_images/1/CLASS/*.jpg … 10/CLASS/*.jpg      (or clear10/train_image_only/…)
    clear10/test/labeled_images/1/CLASS/*.jpg … 10/CLASS/*.jpg

A drifting stream is not CLEAR, and never called so: a data set's images in ten parts whose appearance changes
from part to part: colours turn, contrast and saturation wane and grow, noise comes, step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tam.lab.data import HOW_CLEAR, load, split
from tam.lab.data.files import DataError
from tam.lab.data.imagenet import SUFFIXES, middle


@dataclass(frozen=True)
class Stream:
    """Experiences one after the other: of each its images to train, validate and test on."""

    name: str
    classes: int
    images: Tensor  # uint8, of all experiences
    labels: Tensor
    train: list[Tensor]  # indices, as many in each experience
    validation: list[Tensor]
    test: list[Tensor]

    def __len__(self) -> int:
        return len(self.train)


def drifting(data: str, folder: Path, seed: int, experiences: int = 10) -> Stream:
    """A data set in equal parts, each with an appearance of its own; training images are held out in each."""
    found = load(data, folder)
    kept = split(len(found.train[1]), len(found.train[1]) // 5, seed)
    test = torch.randperm(len(found.test[1]), generator=torch.Generator().manual_seed(seed))
    images, labels, parts, total = [], [], [], 0
    for source, indices in ((found.train, kept[0]), (found.train, kept[1]), (found.test, test)):
        size = len(indices) // experiences
        parts.append([torch.arange(total + k * size, total + (k + 1) * size) for k in range(experiences)])
        for k in range(experiences):
            rows = indices[k * size : (k + 1) * size]
            images.append(drift(source[0][rows], k / max(1, experiences - 1), seed, total + k))
            labels.append(source[1][rows])
        total += experiences * size
    return Stream(f"{data}, drifting", found.classes, torch.cat(images), torch.cat(labels), *parts)


def drift(images: Tensor, how_far: float, seed: int, draw: int) -> Tensor:
    """Images as they look so far (0 to 1) into the stream; at 0 they are as they were.

    The colour plane turns by up to 120 degrees, in the direction the seed says; contrast falls to a half and
    comes back, saturation falls to a third, and noise of up to 20 of 255 is added.
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
    """The turn of colours about the grey axis, as a matrix."""
    angle = math.radians(degrees)
    axis = torch.full((3,), 1 / math.sqrt(3), dtype=torch.float64)
    cross = torch.tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=torch.float64) / math.sqrt(3)
    turned = math.cos(angle) * torch.eye(3, dtype=torch.float64) + math.sin(angle) * cross
    return (turned + (1 - math.cos(angle)) * torch.outer(axis, axis)).float()


# ---------------------------------------------------------------------- CLEAR


def check_clear(folder: Path) -> tuple[Path, Path]:
    """Where training and test images lie."""
    found = []
    for names in (("train", "train_image_only"), ("test",)):
        there = [folder / "clear10" / name / "labeled_images" for name in names]
        here = next((path for path in there if path.is_dir()), None)
        if here is None:
            raise DataError(f"clear: {there[0].resolve()} is missing. {HOW_CLEAR}")
        for bucket in range(1, 11):
            if not (here / str(bucket)).is_dir():
                raise DataError(f"clear: {(here / str(bucket)).resolve()} is missing. {HOW_CLEAR}")
        found.append(here)
    return found[0], found[1]


def clear(folder: Path, size: int, seed: int) -> Stream:
    """CLEAR-10, the middle of every image in memory; a fifth of each year's training images are held out."""
    train, test = check_clear(folder)
    names = sorted({path.name for path in train.glob("*/*") if path.is_dir()})
    images: list[Tensor] = []
    labels: list[int] = []
    parts: list[list[Tensor]] = [[], []]
    for part, here in zip(parts, (train, test), strict=True):
        for bucket in range(1, 11):
            begin = len(labels)
            for label, name in enumerate(names):
                for path in sorted((here / str(bucket) / name).glob("*")):
                    if path.suffix.lower() in SUFFIXES:
                        images.append(_read(path, size))
                        labels.append(label)
            if len(labels) == begin:
                raise DataError(f"clear: {here / str(bucket)} has no images in folders of classes")
            part.append(torch.arange(begin, len(labels)))
    kept, held = [], []
    least = min(len(rows) for rows in parts[0])  # experiences of one length
    for rows in parts[0]:
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))][:least]
        kept.append(order[least // 5 :])
        held.append(order[: least // 5])
    return Stream("CLEAR-10", len(names), torch.stack(images), torch.tensor(labels), kept, held, parts[1])


def _read(path: Path, size: int) -> Tensor:
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"clear: {path} cannot be read: {error}") from error
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=middle(*image.size))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
