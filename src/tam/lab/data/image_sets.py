"""Sets of images that fit into memory: CIFAR-10 and CIFAR-100 (python and binary versions), SVHN, digits."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tam.lab.core.errors import DataError
from tam.lab.data.files import Download, File, Layout

Pair = tuple[Tensor, Tensor]  # images uint8 [n, channels, height, width], labels int64 [n]

_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_PIXELS = 3 * 32 * 32
_BATCHES = {  # md5 of the binary and of the python version
    "data_batch_1": ("5dd7e06a14cb22eb9f671a540d1b7c25", "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": ("5ea93a67294ea407fff1d09f752e9692", "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": ("942cd6a4bcdd0dd3c604fbe906cb4421", "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": ("ae636b3ba5c66a11e91e8cb52e771fcb", "634d18415352ddfa80567beed471001a"),
    "data_batch_5": ("53f37980c15c3d472c316c40844f3f0d", "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": ("803d5f7f4d78ea53de84dbe85f74fb6d", "40351d587109b95175f43aff81a1287e"),
}
_MAT = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}

BINARY_10 = Layout(
    tuple(File(f"cifar-10-batches-bin/{name}.bin", md5, 10000 * (1 + _PIXELS))
          for name, (md5, _) in _BATCHES.items()),
    (Download(_CIFAR + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170),),
)  # fmt: skip
PYTHON_10 = Layout(
    tuple(File(f"cifar-10-batches-py/{name}", md5) for name, (_, md5) in _BATCHES.items()),
    (Download(_CIFAR + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170),),
)
BINARY_100 = Layout(
    (File("cifar-100-binary/train.bin", None, 50000 * (2 + _PIXELS)),
     File("cifar-100-binary/test.bin", None, 10000 * (2 + _PIXELS))),
    (Download(_CIFAR + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 169),),
)  # fmt: skip
PYTHON_100 = Layout(
    (File("cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d"),
     File("cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc")),
    (Download(_CIFAR + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169),),
)  # fmt: skip
SVHN = Layout(
    tuple(File(name, md5) for name, md5 in _MAT.items()),
    tuple(Download(_SVHN + name, md5, 123) for name, md5 in _MAT.items()),  # on average
)


def read_cifar(layout: Layout, folder: Path) -> tuple[Pair, Pair]:
    """Return the training and the test images, each with their labels."""
    reader = _read_pickle if layout in (PYTHON_10, PYTHON_100) else _read_binary
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
