"""Embeddings on disk: what is written is read, and damage is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tam.lab.core.errors import LabError
from tam.lab.experiments.llm.mteb import embeddings

TEXTS = [f"text {i}" for i in range(50)]
VECTORS = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32)


def write(folder: Path, count: int = 50) -> Path:
    embeddings.write_embeddings(TEXTS[:count], VECTORS[:count], folder, "a model", ["BIOSSES"])
    return folder / embeddings.FILE


def test_vectors_come_back(tmp_path: Path) -> None:
    write(tmp_path)
    found = embeddings.read_embeddings(tmp_path)
    assert (found.model, found.tasks, len(found.vector_by_key)) == ("a model", ["BIOSSES"], 50)
    vectors = [found.vector_by_key[embeddings.text_key(one)] for one in TEXTS]
    np.testing.assert_array_equal(vectors, VECTORS.astype(np.float16))
    write(tmp_path, count=20)  # and fewer replace them
    assert len(embeddings.read_embeddings(tmp_path).vector_by_key) == 20


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"embeddings.npz is missing"):
        embeddings.read_embeddings(tmp_path)
    path = write(tmp_path)
    whole = path.read_bytes()
    with np.load(path) as stored:
        columns = dict(stored)
    for damaged in (b"", whole[:-100], whole[:2000] + b"?" + whole[2001:]):
        path.write_bytes(damaged)
        with pytest.raises(LabError, match=r"embeddings.npz is damaged: make the embeddings again"):
            embeddings.read_embeddings(tmp_path)
    half = columns["vectors"]
    for vectors in (half * np.float16(np.nan), half.astype(str), half[:-1]):
        np.savez(path, **{**columns, "vectors": vectors})
        with pytest.raises(LabError, match=r"embeddings.npz is damaged"):
            embeddings.read_embeddings(tmp_path)
    np.savez(path, keys=columns["keys"], vectors=half)
    with pytest.raises(LabError, match=r"embeddings.npz is damaged"):
        embeddings.read_embeddings(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_numbers_that_halves_do_not_hold_are_not_written(value: float, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="an embedding by m is not finite in half precision"):
        embeddings.write_embeddings(["a"], np.array([[1, value]], np.float32), tmp_path / "x", "m", [])
    assert not (tmp_path / "x").exists()
