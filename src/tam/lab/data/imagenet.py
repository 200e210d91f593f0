"""ImageNet in folders: `imagenet/train/CLASS/*.JPEG` and `imagenet/val/CLASS/*.JPEG`.

Images are read as they are needed. What is drawn for one, its crop and flip, depends on seed, epoch and the
image's number alone, so that it is the same on however many ranks and after a kill.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tam.lab.data.files import DataError

HOW = (
    "ImageNet cannot be downloaded without an agreement with its owners, and has no official checksums of "
    "images: put imagenet/train and imagenet/val into the data folder, each with a folder of images for "
    "every class"
)
SUFFIXES = (".jpeg", ".jpg", ".png")


class Folders(Dataset[tuple[Tensor, int]]):
    """The images of a split, as uint8 tensors [3, size, size] with their labels."""

    def __init__(self, folder: Path, split: str, size: int, draws: int | None = None) -> None:
        self.size, self.seed = size, draws
        self.epoch = 0
        here = folder / "imagenet" / split
        if not here.is_dir():
            raise DataError(f"imagenet: {here.resolve()} is missing. {HOW}")
        self.classes = sorted(path.name for path in here.iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((here / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise DataError(f"imagenet: {here.resolve()} has no images in folders of classes")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        """With draws a random crop and perhaps a flip, else the middle."""
        import numpy as np
        from PIL import Image, UnidentifiedImageError

        path, label = self.files[i]
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"imagenet: {path} cannot be read: {error}") from error
        bilinear = Image.Resampling.BILINEAR
        if self.seed is None:
            box = middle(*image.size)
            flipped = False
        else:
            mixed = (self.seed * 100003 + self.epoch) * 20_000_003 + i  # there are fewer images than that
            generator = torch.Generator().manual_seed(mixed % 2**63)
            box = crop(image.size[0], image.size[1], generator)
            flipped = bool(torch.rand(1, generator=generator) < 0.5)
        image = image.resize((self.size, self.size), bilinear, box=box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return (pixels.flip(2) if flipped else pixels).contiguous(), label


def middle(width: int, height: int) -> tuple[float, float, float, float]:
    """The square in the middle: 7/8 of the shorter side, as 224 of 256."""
    side = min(width, height) * 0.875
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def crop(width: int, height: int, generator: torch.Generator) -> tuple[float, float, float, float]:
    """8 to 100% of the area, sides of 3:4 to 4:3, anywhere (Szegedy et al. 2015)."""
    for _ in range(10):
        share, ratio, x, y = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        area = width * height * (0.08 + 0.92 * share)
        aspect = math.exp(math.log(3 / 4) + ratio * math.log(16 / 9))
        w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if w <= width and h <= height:
            left, top = x * (width - w), y * (height - h)
            return left, top, left + w, top + h
    return middle(width, height)


def generate(folder: Path, classes: int = 4, train: int = 24, validation: int = 8) -> Path:
    """A data folder of the same layout with small images of noise, whose colour tells the class."""
    import numpy as np
    from PIL import Image

    if (folder / "imagenet").is_dir():
        return folder
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", validation)):
        for label in range(classes):
            here = part / "imagenet" / split / f"class{label}"
            here.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (40, 48, 3))
                pixels[..., label % 3] += 32 * (label // 3 + 1)
                Image.fromarray(pixels.astype(np.uint8)).save(here / f"{i}.png")
    try:
        part.rename(folder)
    except OSError:  # another process was quicker
        shutil.rmtree(part)
    return folder
