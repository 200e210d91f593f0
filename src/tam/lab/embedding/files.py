"""Embeddings on disk, in files small enough to be carried.

    index.json      the model, the tasks, and how many vectors of how many numbers in how many parts
    part-000.npz    digests of texts, and their vectors in half precision

The index is written last: a folder without one was not written to its end.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tam.lab.store import LabError, digest_of, write_whole

SIZE = 15 << 20  # bytes of a part, at most
FRAME = 1024  # what a part has besides its rows, at most
INDEX = "index.json"


def key_of(text: str) -> str:
    """What a text's vector is kept under."""
    return digest_of(text.encode())


def write(
    sentences: Sequence[str],
    vectors: NDArray[np.float32],
    folder: Path,
    model: str,
    tasks: Sequence[str],
    file_size: int = SIZE,
) -> None:
    """Writes the vectors of different texts in the place of whatever embeddings are there."""
    with np.errstate(over="ignore"):
        half = vectors.astype(np.float16)
    if not np.isfinite(half).all():
        raise LabError(f"an embedding by {model} is no number, or too large for half precision")
    keys = np.array([key_of(text) for text in sentences], dtype="S16")
    rows = (file_size - FRAME) // (keys.itemsize + half.itemsize * half.shape[1])
    if rows < 1:
        raise LabError(f"a file of {file_size} bytes does not hold one embedding of {half.shape[1]} numbers")
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / INDEX, *folder.glob("part-*.npz")):
        path.unlink(missing_ok=True)
    starts = range(0, len(keys), rows)
    for number, start in enumerate(starts):
        buffer = io.BytesIO()
        np.savez(buffer, keys=keys[start : start + rows], vectors=half[start : start + rows])
        write_whole(folder / _part(number), buffer.getvalue())
    index = {"model": model, "tasks": list(tasks), "count": len(keys), "dimension": half.shape[1]}
    write_whole(folder / INDEX, json.dumps({**index, "parts": len(starts)}, indent=1).encode() + b"\n")


def index_of(folder: Path) -> dict[str, Any]:
    """What the folder has."""
    path = folder / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        numbers = {key: int(found[key]) for key in ("count", "dimension", "parts")}
        return {"model": str(found["model"]), "tasks": list(found["tasks"]), **numbers}
    except FileNotFoundError as error:
        raise LabError(f"{path} is missing: the embeddings were not written to their end") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} is damaged: make the embeddings again") from error


def read(folder: Path) -> dict[str, NDArray[np.float16]]:
    """All the vectors, by the digests of their texts."""
    index = index_of(folder)
    found: dict[str, NDArray[np.float16]] = {}
    for number in range(index["parts"]):
        path = folder / _part(number)
        try:
            with np.load(path) as part:
                keys, vectors = part["keys"].astype(str).tolist(), part["vectors"]
            if not np.isfinite(vectors).all():
                raise ValueError("a vector is no number")
            found.update(zip(keys, vectors, strict=True))
        except FileNotFoundError as error:
            raise LabError(f"{path} is missing: the embeddings are of {index['parts']} parts") from error
        except (
            OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, zipfile.BadZipFile
        ) as error:  # fmt: skip
            raise LabError(f"{path} is damaged: make the embeddings again") from error
    if len(found) != index["count"] or any(row.shape != (index["dimension"],) for row in found.values()):
        raise LabError(f"{folder} has not the embeddings its {INDEX} tells of: make them again")
    return found


def _part(number: int) -> str:
    return f"part-{number:03d}.npz"
