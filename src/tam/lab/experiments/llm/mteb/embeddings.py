"""Embeddings on disk: a file with the model, the tasks, keys of texts, and vectors in half precision."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tam.lab.core.errors import LabError
from tam.lab.core.store import digest_of, write_whole

FILE = "embeddings.npz"


class Embeddings(NamedTuple):
    """Vectors by the keys of their texts, the model that made them, and the tasks they are for."""

    model: str
    tasks: list[str]
    vectors: dict[str, NDArray[np.float16]]


def text_key(text: str) -> str:
    """Return the key that a text's vector is stored under."""
    return digest_of(text.encode())


def write_embeddings(
    texts: Sequence[str], vectors: NDArray[np.float32], folder: Path, model: str, tasks: Sequence[str]
) -> None:
    """Write the vectors of different texts. They replace the embeddings in the folder."""
    with np.errstate(over="ignore"):
        half = vectors.astype(np.float16)
    if not np.isfinite(half).all():
        raise LabError(f"an embedding by {model} is not finite in half precision")
    buffer, keys = io.BytesIO(), [text_key(text) for text in texts]
    np.savez(buffer, model=model, tasks=np.array(tasks, str), keys=np.array(keys, "S16"), vectors=half)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, buffer.getvalue())


def read_embeddings(folder: Path) -> Embeddings:
    """Return the embeddings in a folder."""
    path = folder / FILE
    try:
        with np.load(path) as stored:
            keys, vectors = stored["keys"].astype(str).tolist(), stored["vectors"]
            if not np.isfinite(vectors).all():
                raise ValueError("a vector is not finite")
            by_key = dict(zip(keys, vectors, strict=True))
            return Embeddings(str(stored["model"]), stored["tasks"].tolist(), by_key)
    except FileNotFoundError as error:
        raise LabError(f"{path} is missing: make the embeddings again") from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise LabError(f"{path} is damaged: make the embeddings again") from error
