"""CIFAR-10 and CIFAR-100, in their python and binary versions."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tam.lab.data.files import DataError, Download, File, Layout, md5_of

_SITE = "https://www.cs.toronto.edu/~kriz/"
_PIXELS = 3 * 32 * 32

BINARY_10 = Layout(
    "the binary version (cifar-10-batches-bin)",
    tuple(
        File(f"cifar-10-batches-bin/{name}.bin", md5, 10000 * (1 + _PIXELS))
        for name, md5 in (
            ("data_batch_1", "5dd7e06a14cb22eb9f671a540d1b7c25"),
            ("data_batch_2", "5ea93a67294ea407fff1d09f752e9692"),
            ("data_batch_3", "942cd6a4bcdd0dd3c604fbe906cb4421"),
            ("data_batch_4", "ae636b3ba5c66a11e91e8cb52e771fcb"),
            ("data_batch_5", "53f37980c15c3d472c316c40844f3f0d"),
            ("test_batch", "803d5f7f4d78ea53de84dbe85f74fb6d"),
        )
    ),
    (Download(_SITE + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
)
PYTHON_10 = Layout(
    "the python version (cifar-10-batches-py)",
    tuple(
        File(f"cifar-10-batches-py/{name}", md5)
        for name, md5 in (
            ("data_batch_1", "c99cafc152244af753f735de768cd75f"),
            ("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
            ("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
            ("data_batch_4", "634d18415352ddfa80567beed471001a"),
            ("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
            ("test_batch", "40351d587109b95175f43aff81a1287e"),
        )
    ),
    (Download(_SITE + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
)
BINARY_100 = Layout(
    "the binary version (cifar-100-binary)",
    (
        File("cifar-100-binary/train.bin", None, 50000 * (2 + _PIXELS)),
        File("cifar-100-binary/test.bin", None, 10000 * (2 + _PIXELS)),
    ),
    (Download(_SITE + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
)
PYTHON_100 = Layout(
    "the python version (cifar-100-python)",
    (
        File("cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d"),
        File("cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    ),
    (Download(_SITE + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
)


def read(layout: Layout, folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images, each with its labels."""
    reader = _read_pickle if layout in (PYTHON_10, PYTHON_100) else _read_binary
    parts = [reader(folder / file.path, file) for file in layout.files]
    images, labels = zip(*parts, strict=True)
    return (torch.cat(images[:-1]), torch.cat(labels[:-1])), (images[-1], labels[-1])


def _read_binary(path: Path, file: File) -> tuple[Tensor, Tensor]:
    """Records of a label, of CIFAR-100 a coarse one and a fine one, and 3072 bytes: red, green, blue."""
    labels = 2 if "cifar-100" in file.path else 1
    raw = np.fromfile(path, dtype=np.uint8)
    if raw.size == 0 or raw.size % (labels + _PIXELS):
        raise DataError(f"{path} has {raw.size} bytes: no whole number of records of {labels + _PIXELS}")
    records = torch.from_numpy(raw.reshape(-1, labels + _PIXELS))
    return records[:, labels:].reshape(-1, 3, 32, 32).clone(), records[:, labels - 1].long()


def _read_pickle(path: Path, file: File) -> tuple[Tensor, Tensor]:
    """A pickle can run any code when it is opened: only the official files are."""
    if md5_of(path) != file.md5:
        raise DataError(f"{path} is not the official file (md5 {file.md5}), and other pickles are not opened")
    with path.open("rb") as source:
        found = pickle.load(source, encoding="bytes")
    labels = found.get(b"labels", found.get(b"fine_labels"))
    return torch.from_numpy(found[b"data"].reshape(-1, 3, 32, 32)), torch.tensor(labels)
