"""SVHN, cropped digits, in its .mat files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tam.lab.data.files import DataError, Download, File, Layout

_SITE = "http://ufldl.stanford.edu/housenumbers/"
_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
MAT = Layout(
    "the cropped digits (train_32x32.mat, test_32x32.mat)",
    tuple(File(name, md5) for name, md5 in _MD5.items()),
    tuple(Download(_SITE + name, md5) for name, md5 in _MD5.items()),
)


def read(layout: Layout, folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images, each with its labels; the digit 0 is labelled 10 in the files."""
    from scipy.io import loadmat

    parts = []
    for file in layout.files:
        try:
            found = loadmat(folder / file.path)
            images, labels = torch.from_numpy(found["X"]), torch.from_numpy(found["y"])
        except Exception as error:  # scipy raises many kinds
            raise DataError(f"{folder / file.path} cannot be read: {error}") from error
        parts.append((images.permute(3, 2, 0, 1).contiguous(), labels.reshape(-1).long() % 10))
    return parts[0], parts[1]
