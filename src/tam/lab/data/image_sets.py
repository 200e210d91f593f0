"""Sets of images that fit into memory: CIFAR-10 and CIFAR-100 (python and binary versions), SVHN, digits."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tam.lab.core.errors import DataError
from tam.lab.data.files import File, Layout, find, get_set

Pair = tuple[Tensor, Tensor]  # images uint8 [n, channels, height, width], labels int64 [n]

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class ImageData:
    """Images in memory."""

    classes: int
    train: Pair
    test: Pair
    mean: tuple[float, ...]  # per channel of the training images, pixels in [0, 1]
    std: tuple[float, ...]


def load(name: str, folder: Path) -> ImageData:
    """Return a data set of images, in memory."""
    classes, layout = get_set(name).classes, find(name, folder)
    if name not in READERS:
        raise DataError(f"{name} is not a set of images")
    train, test = READERS[name](layout, folder)
    for images, labels in (train, test):
        if int(labels.min()) < 0 or int(labels.max()) >= classes or len(images) != len(labels):
            raise DataError(f"{name}: labels are not those of {classes} classes")
    return ImageData(classes, train, test, *moments(train[0]))


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


def read_cifar(layout: Layout, folder: Path) -> tuple[Pair, Pair]:
    """Return the training and the test images, each with their labels."""
    reader = _read_binary if layout.files[0].path.endswith(".bin") else _read_pickle
    parts = [reader(folder / file.path, file) for file in layout.files]
    images, labels = zip(*parts, strict=True)
    return (torch.cat(images[:-1]), torch.cat(labels[:-1])), (images[-1], labels[-1])


def _read_binary(path: Path, file: File) -> Pair:
    """Read records of one label (CIFAR-100: a coarse and a fine one) and 3072 bytes: red, green, blue."""
    labels = 2 if "cifar-100" in file.path else 1
    raw = np.fromfile(path, dtype=np.uint8)
    if raw.size == 0 or raw.size % (labels + _PIXELS):
        raise DataError(f"{path} has {raw.size} bytes, not a multiple of {labels + _PIXELS}: it is damaged")
    records = torch.from_numpy(raw.reshape(-1, labels + _PIXELS))
    return records[:, labels:].reshape(-1, 3, 32, 32).clone(), records[:, labels - 1].long()


def _read_pickle(path: Path, file: File) -> Pair:
    """Read a pickle. A pickle can run any code when it is opened, so only the official files are."""
    content = path.read_bytes()  # read once: the file that is checked is the file that is opened
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != file.md5:
        raise DataError(f"{path} is not the official file (md5 {file.md5}), and other pickles are not opened")
    batch = pickle.loads(content, encoding="bytes")
    labels = batch.get(b"labels", batch.get(b"fine_labels"))
    return torch.from_numpy(batch[b"data"].reshape(-1, 3, 32, 32)), torch.tensor(labels)


def read_svhn(layout: Layout, folder: Path) -> tuple[Pair, Pair]:
    """Return the training and the test images with their labels. The files label the digit 0 as 10."""
    from scipy.io import loadmat

    parts = []
    for file in layout.files:
        try:
            arrays = loadmat(folder / file.path)
            images, labels = torch.from_numpy(arrays["X"]), torch.from_numpy(arrays["y"])
        except Exception as error:  # scipy raises many kinds
            raise DataError(f"{folder / file.path} cannot be read: {error}") from error
        parts.append((images.permute(3, 2, 0, 1).contiguous(), labels.reshape(-1).long() % 10))
    return parts[0], parts[1]


def read_digits(layout: Layout, folder: Path) -> tuple[Pair, Pair]:
    """Read scikit-learn's 1797 digits of 8 x 8, in three equal channels. The last 360 are the test set."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.as_tensor(digits.images * 255 / 16).round().to(torch.uint8)
    images, labels = images[:, None].repeat(1, 3, 1, 1), torch.as_tensor(digits.target).long()
    return (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


READERS = {"cifar10": read_cifar, "cifar100": read_cifar, "svhn": read_svhn, "digits": read_digits}
