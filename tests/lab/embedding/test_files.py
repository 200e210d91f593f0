"""Embeddings on disk: what is written is read, in small parts, and damage is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tam.lab.embedding import files
from tam.lab.store import LabError

TEXTS = [f"text {i}" for i in range(50)]
VECTORS = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32)


def write(folder: Path, count: int = 50, size: int = 2000) -> Path:
    files.write(TEXTS[:count], VECTORS[:count], folder, "a model", ["BIOSSES"], size)
    return folder


def test_vectors_come_back_from_files_of_the_given_size(tmp_path: Path) -> None:
    write(tmp_path)
    parts = sorted(tmp_path.glob("part-*.npz"))
    assert len(parts) == 4 and all(path.stat().st_size <= 2000 for path in parts)
    told = {"model": "a model", "tasks": ["BIOSSES"], "count": 50, "dimension": 24, "parts": 4}
    assert json.loads((tmp_path / "index.json").read_text()) == told == files.index_of(tmp_path)
    found = files.read(tmp_path)
    np.testing.assert_array_equal([found[files.key_of(one)] for one in TEXTS], VECTORS.astype(np.float16))
    write(tmp_path, count=20)  # and less in their place
    assert len(list(tmp_path.glob("part-*.npz"))) == 2 and len(files.read(tmp_path)) == 20


def test_a_folder_that_was_not_written_to_its_end_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)

    def full(path: Path, content: bytes) -> None:
        raise LabError("the disk is full")

    monkeypatch.setattr(files, "write_whole", full)
    with pytest.raises(LabError, match="the disk is full"):
        write(tmp_path)
    with pytest.raises(
        LabError, match=r"index.json is missing: the embeddings were not written to their end"
    ):
        files.read(tmp_path)


def test_damage_is_named(tmp_path: Path) -> None:
    part = write(tmp_path) / "part-001.npz"
    whole = part.read_bytes()
    for damaged in (b"", whole[:-100], whole[:1000] + b"?" + whole[1001:]):
        part.write_bytes(damaged)
        with pytest.raises(LabError, match=r"part-001.npz is damaged: make the embeddings again"):
            files.read(tmp_path)
    with np.load(tmp_path / "part-000.npz") as other:
        kept = {"keys": other["keys"], "vectors": other["vectors"]}
    for vectors in (kept["vectors"] * np.float16(np.nan), kept["vectors"].astype(str)):
        np.savez(part, keys=kept["keys"], vectors=vectors)
        with pytest.raises(LabError, match=r"part-001.npz is damaged"):
            files.read(tmp_path)
    part.write_bytes((tmp_path / "part-000.npz").read_bytes())
    with pytest.raises(LabError, match=r"has not the embeddings its index.json tells of"):
        files.read(tmp_path)
    part.unlink()
    with pytest.raises(LabError, match=r"part-001.npz is missing: the embeddings are of 4 parts"):
        files.read(tmp_path)
    for index in ("{", "[]", '{"model": "m"}', '{"model": "m", "tasks": [], "count": "many"}'):
        (tmp_path / "index.json").write_text(index)
        with pytest.raises(LabError, match=r"index.json is damaged"):
            files.read(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_numbers_that_halves_do_not_hold_are_not_written(value: float, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="an embedding by m is no number, or too large"):
        files.write(["a"], np.array([[1, value]], np.float32), tmp_path / "x", "m", [])
    assert not (tmp_path / "x").exists()


def test_files_too_small_for_one_embedding(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="a file of 1050 bytes does not hold one embedding of 24 numbers"):
        write(tmp_path, size=1050)
