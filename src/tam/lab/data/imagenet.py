"""ImageNet in folders: `imagenet/train/CLASS/*.JPEG` and `imagenet/val/CLASS/*.JPEG`.

Images are read when they are needed. The crop and the flip of an image depend only on the seed, the epoch and
the image's number. So they are the same on any number of ranks and after a resume.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tam.lab.core.errors import DataError
from tam.lab.data.files import find

SUFFIXES = (".jpeg", ".jpg", ".png")
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Folders(Dataset[tuple[Tensor, int]]):
    """The images of a split, as uint8 tensors [3, size, size] with their labels."""

    def __init__(self, folder: Path, split: str, size: int, draws: int | None = None) -> None:
        self.size, self.seed, self.epoch = size, draws, 0
        find("imagenet", folder)
        root = folder / "imagenet" / split
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.files = list_images(root, self.classes)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        """Return a random crop that may be flipped if there are draws, else the middle of the image."""
        path, label = self.files[i]
        if self.seed is None:
            return read_image(path, self.size, middle), label
        mixed = (self.seed * 100003 + self.epoch) * 20_000_003 + i  # there are fewer images than that
        generator = torch.Generator().manual_seed(mixed % 2**63)
        pixels = read_image(path, self.size, lambda width, height: crop(width, height, generator))
        is_flipped = bool(torch.rand(1, generator=generator) < 0.5)
        return (pixels.flip(2).contiguous() if is_flipped else pixels), label


def list_images(root: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the images in the folders of these classes, with their labels. Not all folders need exist."""
    images = [
        (path, label) for label, name in enumerate(classes) if (root / name).is_dir()
        for path in sorted((root / name).iterdir()) if path.suffix.lower() in SUFFIXES
    ]  # fmt: skip
    if not images:
        raise DataError(f"{root.resolve()} has no images in folders of classes")
    return images


def read_image(path: Path, size: int, box: Callable[[int, int], Box]) -> Tensor:
    """Return a part of an image as a uint8 tensor [3, size, size]. `box` takes its width and height."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box(*image.size))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def middle(width: int, height: int) -> Box:
    """Return the square in the middle: 7/8 of the shorter side, like 224 of 256."""
    side = min(width, height) * 0.875
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def crop(width: int, height: int, generator: torch.Generator) -> Box:
    """Return a random part: 8 to 100% of the area, sides of 3:4 to 4:3 (Szegedy et al. 2015)."""
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
    """Write a data folder of the same layout with small images of noise, whose colour tells the class."""
    import numpy as np
    from PIL import Image

    if (folder / "imagenet").is_dir():
        return folder
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", validation)):
        for label in range(classes):
            target = part / "imagenet" / split / f"class{label}"
            target.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(0, 128, (40, 48, 3))
                pixels[..., label % 3] += 32 * (label // 3 + 1)
                Image.fromarray(pixels.astype(np.uint8)).save(target / f"{i}.png")
    try:
        part.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(part)
    return folder
