"""Data sets, read from their official layouts.

    data = load("cifar10", Path("data"))
    train, validation = split(len(data.train[1]), 10000, seed=0)

`sets.toml` lists their files, `files.py` checks them, `download.py` gets them, `image_sets.py` and others
read them.
"""

from __future__ import annotations

from tam.lab.data.files import SETS, default_folder, find, get_set
from tam.lab.data.image_sets import ImageData, load, moments, split

__all__ = ["SETS", "ImageData", "default_folder", "find", "get_set", "load", "moments", "split"]
