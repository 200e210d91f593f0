"""Data sets in their official layouts: small files of the same form."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from tam.lab.core.errors import DataError
from tam.lab.data import SETS, files, find, image_sets, load, moments, split
from tam.lab.data.files import File, Layout


def write_binary(folder: Path, labels: int, names: list[str], n: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    found = {}
    for name in names:
        records = rng.integers(0, 256, (n, labels + 3072), dtype=np.uint8)
        records[:, labels - 1] %= 10
        records.tofile(folder / name)
        found[name] = records
    return found


def test_cifar10_binary(tmp_path: Path) -> None:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    written = write_binary(tmp_path / "cifar-10-batches-bin", 1, names)
    data = load("cifar10", tmp_path)
    assert data.classes == 10 and data.train[0].shape == (35, 3, 32, 32) and len(data.test[1]) == 7
    record = written["data_batch_2.bin"][3]
    assert data.train[1][10] == record[0]
    # Red first, then green and blue, row by row.
    assert data.train[0][10, 1, 2, 5] == record[1 + 1024 + 2 * 32 + 5]
    x = data.train[0].double() / 255
    torch.testing.assert_close(torch.tensor(data.mean).double(), x.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(data.std).double(), x.std((0, 2, 3), correction=0))


def test_cifar100_binary_has_two_labels(tmp_path: Path) -> None:
    written = write_binary(tmp_path / "cifar-100-binary", 2, ["train.bin", "test.bin"])
    data = load("cifar100", tmp_path)
    assert data.train[1].tolist() == written["train.bin"][:, 1].tolist()  # the fine one


def test_only_official_pickles_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, n in (("train", 5), ("test", 2)):
        entry = {b"data": np.zeros((n, 3072), np.uint8), b"fine_labels": list(range(n))}
        (folder / name).write_bytes(pickle.dumps(entry))
    with pytest.raises(DataError, match=r"is not the official file .*, and other pickles are not opened"):
        load("cifar100", tmp_path)
    official = find("cifar100", tmp_path)
    layout = Layout(tuple(File(f.path, files.md5_of(tmp_path / f.path)) for f in official.files))
    read_bytes = Path.read_bytes

    def read_then_replace(path: Path) -> bytes:
        content = read_bytes(path)
        path.write_bytes(b"cos\nabort\n(tR.")  # who opens it now is gone
        return content

    monkeypatch.setattr(Path, "read_bytes", read_then_replace)
    (images, labels), test = image_sets.read_cifar(layout, tmp_path)
    assert images.shape == (5, 3, 32, 32) and labels.tolist() == [0, 1, 2, 3, 4] and len(test[1]) == 2


def test_svhn(tmp_path: Path) -> None:
    for name, n in (("train", 4), ("test", 3)):
        x = np.arange(32 * 32 * 3 * n, dtype=np.uint64).astype(np.uint8).reshape(32, 32, 3, n)
        savemat(tmp_path / f"{name}_32x32.mat", {"X": x, "y": np.array([[10], [1], [2], [9]][:n])})
    data = load("svhn", tmp_path)
    assert data.train[1].tolist() == [0, 1, 2, 9]  # the digit 0 is labelled 10
    assert data.train[0].shape == (4, 3, 32, 32)
    (tmp_path / "test_32x32.mat").write_bytes(b"not a mat file")
    with pytest.raises(DataError, match=r"test_32x32\.mat cannot be read"):
        load("svhn", tmp_path)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAM_DATA", str(tmp_path))
    message = f"cifar10 is incomplete: 6 of 6 files missing in {tmp_path}. Run: tam lab data get cifar10"
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path)
    assert str(error.value) == message
    other = tmp_path / "other folder"
    with pytest.raises(DataError, match=f"tam lab data get cifar10 --data '{other}'$"):
        load("cifar10", other)
    names = [f"data_batch_{i}.bin" for i in (1, 2, 3, 5)] + ["test_batch.bin"]
    write_binary(tmp_path / "cifar-10-batches-bin", 1, names)
    with pytest.raises(DataError, match=r"1 of 6 files missing .*data_batch_4\.bin"):
        load("cifar10", tmp_path)
    with pytest.raises(DataError, match="no data set 'cifar11'; there are cifar10, "):
        load("cifar11", tmp_path)
    with pytest.raises(DataError, match=r"imagenet is incomplete: .* ImageNet cannot be downloaded"):
        find("imagenet", tmp_path)


def test_presence(tmp_path: Path) -> None:
    assert SETS["digits"].presence(tmp_path) == "present"
    assert SETS["cifar100"].presence(tmp_path) == SETS["clear"].presence(tmp_path) == "missing"
    write_binary(tmp_path / "cifar-100-binary", 2, ["train.bin"])
    assert SETS["cifar100"].presence(tmp_path) == "incomplete"
    (tmp_path / "cifar-100-python").mkdir()
    for name in ("train", "test"):
        (tmp_path / "cifar-100-python" / name).touch()
    assert SETS["cifar100"].presence(tmp_path) == "present"


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    write_binary(tmp_path / "cifar-100-binary", 2, ["train.bin", "test.bin"])
    path = tmp_path / "cifar-100-binary" / "test.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a multiple of 3074"):
        load("cifar100", tmp_path)
    with pytest.raises(DataError, match=r"train\.bin has 21518 bytes instead of 153700000"):
        files.check("cifar100", find("cifar100", tmp_path), tmp_path)


def test_splits_are_seeded_and_disjoint() -> None:
    train, validation = split(100, 20, seed=3)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(100)) and len(validation) == 20
    assert torch.equal(split(100, 20, seed=3)[0], train) and not torch.equal(split(100, 20, seed=4)[0], train)


def test_moments_of_one_colour() -> None:
    images = torch.full((2, 1, 3, 3), 51, dtype=torch.uint8)
    (mean,), (std,) = moments(images)
    assert mean == pytest.approx(0.2) and std == pytest.approx(0, abs=1e-7)
