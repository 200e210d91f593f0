"""Data sets, read from their official layouts.

    data = load("cifar10", Path("data"))
    train, validation = split(len(data.train[1]), 10000, seed=0)

`files.py` knows where files lie and whether they are whole; `cifar.py` and `svhn.py` read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tam.lab.data import cifar, files, imagenet, movielens, svhn, text
from tam.lab.data.files import DataError, Layout, default_folder

__all__ = ["SETS", "DataError", "ImageData", "default_folder", "find", "load", "split"]

# Here and not in `streams`, which imports this package.
HOW_CLEAR = (
    "CLEAR-10 is at https://clear-benchmark.github.io: put clear10/train/labeled_images/1 to 10 and "
    "clear10/test/labeled_images/1 to 10 into the data folder, each with a folder of images for every class"
)

Pair = tuple[Tensor, Tensor]  # images uint8 [n, channels, height, width], labels int64 [n]


@dataclass(frozen=True)
class ImageData:
    """Images in memory."""

    name: str
    classes: int
    train: Pair
    test: Pair
    mean: tuple[float, ...]  # of the training images' channels, pixels in [0, 1]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Set:
    """A data set the lab knows."""

    name: str
    title: str
    classes: int
    layouts: tuple[Layout, ...]  # in the order in which they are looked for
    read: Callable[[Layout, Path], tuple[Pair, Pair]]


def _digits(layout: Layout, folder: Path) -> tuple[Pair, Pair]:
    """scikit-learn's 1797 digits of 8 x 8, in three equal channels; the last 360 are the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.as_tensor(found.images * 255 / 16).round().to(torch.uint8)
    images, labels = images[:, None].repeat(1, 3, 1, 1), torch.as_tensor(found.target).long()
    return (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


SETS: Mapping[str, Set] = {
    one.name: one
    for one in (
        Set("cifar10", "CIFAR-10", 10, (cifar.BINARY_10, cifar.PYTHON_10), cifar.read),
        Set("cifar100", "CIFAR-100", 100, (cifar.BINARY_100, cifar.PYTHON_100), cifar.read),
        Set("svhn", "SVHN", 10, (svhn.MAT,), svhn.read),
        Set("digits", "scikit-learn's digits", 10, (), _digits),
    )
}


OTHERS: Mapping[str, tuple[Layout, ...]] = {  # that are no images
    "movielens": (movielens.SMALL,),
    **{name: (layout,) for name, layout in text.TEXTS.items()},
}


def layouts_of(name: str) -> tuple[Layout, ...]:
    """Of any data set the lab knows; none of one that is embedded."""
    return OTHERS[name] if name in OTHERS else get_set(name).layouts


def get_set(name: str) -> Set:
    if name == "imagenet":
        raise DataError(imagenet.HOW)
    if name in ("clear", "clear10"):
        raise DataError(HOW_CLEAR)
    if name not in SETS:
        raise DataError(f"data set {name!r}: must be one of {', '.join((*SETS, *OTHERS))}")
    return SETS[name]


def find(name: str, folder: Path) -> Layout:
    """Whichever of a data set's layouts lies in the folder."""
    layouts = layouts_of(name)
    return files.find(name, layouts, folder) if layouts else Layout("embedded", ())


def load(name: str, folder: Path) -> ImageData:
    """The data set, read."""
    found = get_set(name)
    train, test = found.read(find(name, folder), folder)
    for images, labels in (train, test):
        if int(labels.min()) < 0 or int(labels.max()) >= found.classes or len(images) != len(labels):
            raise DataError(f"{name}: labels are not those of {found.classes} classes")
    return ImageData(name, found.classes, train, test, *moments(train[0]))


def moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, pixels in [0, 1]; from the counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.reshape(-1), minlength=256).double() / channel.numel()
        mean.append(float(share @ values))
        std.append(float((share @ values.square() - mean[-1] ** 2).sqrt()))
    return tuple(mean), tuple(std)


def split(n: int, held_out: int, seed: int) -> Pair:
    """Indices of the images to train on and of those to validate on, the same for every arm of a seed."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[: n - held_out], order[n - held_out :]
