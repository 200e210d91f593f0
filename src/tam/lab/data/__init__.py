"""Data sets, read from their official layouts.

    data = load("cifar10", Path("data"))
    train, validation = split(len(data.train[1]), 10000, seed=0)

`files.py` checks files, `download.py` gets them, `image_sets.py` and others read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tam.lab.core.errors import DataError
from tam.lab.data import files, image_sets, imagenet, movielens, text
from tam.lab.data.files import File, Layout, default_folder
from tam.lab.data.image_sets import Pair

__all__ = ["SETS", "DataError", "DataSet", "ImageData", "default_folder", "find", "get_set", "load", "split"]

CLEAR = tuple(  # here and not in `streams`, which imports this package
    Layout(
        tuple(File(f"clear10/{part}/labeled_images/{year}")
              for part in (train, "test") for year in range(1, 11)),
        how_to_get="CLEAR-10 is at https://clear-benchmark.github.io: put clear10/train/labeled_images/1 to "
        "10 and clear10/test/labeled_images/1 to 10 into the data folder, with one folder per class",
    )
    for train in ("train", "train_image_only")
)  # fmt: skip


@dataclass(frozen=True)
class ImageData:
    """Images in memory."""

    name: str
    classes: int
    train: Pair
    test: Pair
    mean: tuple[float, ...]  # per channel of the training images, pixels in [0, 1]
    std: tuple[float, ...]


@dataclass(frozen=True)
class DataSet:
    """A data set the lab knows."""

    layouts: tuple[Layout, ...]  # in the order of preference; none if it is built in
    classes: int = 0
    read: Callable[[Layout, Path], tuple[Pair, Pair]] | None = None  # of images that fit into memory

    def presence(self, folder: Path) -> str:
        """Return "present", "incomplete" or "missing". Contents are not checked."""
        missing = [(len(layout.missing_files(folder)), len(layout.files)) for layout in self.layouts]
        if not missing or min(missing)[0] == 0:
            return "present"
        return "incomplete" if any(count < files for count, files in missing) else "missing"

    def megabytes(self) -> float:
        """Return the size of the download, about. 0 if there is none."""
        return sum(download.megabytes for layout in self.layouts[:1] for download in layout.downloads)


SETS: Mapping[str, DataSet] = {
    "cifar10": DataSet((image_sets.BINARY_10, image_sets.PYTHON_10), 10, image_sets.read_cifar),
    "cifar100": DataSet((image_sets.BINARY_100, image_sets.PYTHON_100), 100, image_sets.read_cifar),
    "svhn": DataSet((image_sets.SVHN,), 10, image_sets.read_svhn),
    "digits": DataSet((), 10, image_sets.read_digits),
    "movielens": DataSet((movielens.SMALL,)),
    **{name: DataSet((layout,)) for name, layout in text.TEXTS.items()},
    "imagenet": DataSet((imagenet.LAYOUT,)),
    "clear": DataSet(CLEAR),
}


def get_set(name: str) -> DataSet:
    if name not in SETS:
        raise DataError(f"no data set {name!r}; there are {', '.join(SETS)}")
    return SETS[name]


def find(name: str, folder: Path) -> Layout:
    """Return the layout of a data set that is in the folder."""
    layouts = get_set(name).layouts
    return files.find(name, layouts, folder) if layouts else Layout(())


def load(name: str, folder: Path) -> ImageData:
    """Return a data set of images, in memory."""
    data_set, layout = get_set(name), find(name, folder)
    if data_set.read is None:
        raise DataError(f"{name} is not a set of images")
    train, test = data_set.read(layout, folder)
    for images, labels in (train, test):
        if int(labels.min()) < 0 or int(labels.max()) >= data_set.classes or len(images) != len(labels):
            raise DataError(f"{name}: labels are not those of {data_set.classes} classes")
    return ImageData(name, data_set.classes, train, test, *moments(train[0]))


def moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, pixels in [0, 1], from the counts of the 256 values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.reshape(-1), minlength=256).double() / channel.numel()
        mean.append(float(share @ values))
        std.append(float((share @ values.square() - mean[-1] ** 2).sqrt()))
    return tuple(mean), tuple(std)


def split(n: int, held_out: int, seed: int) -> Pair:
    """Return indices of training and validation images. They are the same for every variant of a seed."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[: n - held_out], order[n - held_out :]
