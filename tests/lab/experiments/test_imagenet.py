"""ImageNet's folders, and its trial on one process and on two ranks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tam
from tam.lab.core.errors import DataError, LabError
from tam.lab.core.results import load_results
from tam.lab.core.selection import Selection, select_plans
from tam.lab.core.store import TrialFolder
from tam.lab.data.imagenet import Folders, crop, generate, middle
from tam.lab.experiments.imagenet import trial as imagenet
from tests.lab.experiments.test_images import CPU, outcome


def test_labels_are_the_folders_in_order(tmp_path: Path) -> None:
    data = Folders(generate(tmp_path / "data"), "val", 24)
    assert data.classes == ["class0", "class1", "class2", "class3"] and len(data) == 32
    image, label = data[31]
    assert label == 3 and image.shape == (3, 24, 24) and image.dtype == torch.uint8
    # Without draws it is the middle, resized.
    with Image.open(data.files[31][0]) as opened:
        expected = opened.resize((24, 24), Image.Resampling.BILINEAR, box=middle(48, 40))
    assert torch.equal(image.permute(1, 2, 0), torch.from_numpy(np.array(expected)))


def test_draws_depend_on_seed_epoch_and_image(tmp_path: Path) -> None:
    folder = generate(tmp_path / "data")
    one, two = (Folders(folder, "train", 24, draws=seed) for seed in (0, 1))
    assert torch.equal(one[5][0], one[5][0]) and not torch.equal(one[5][0], two[5][0])
    before = one[5][0]
    one.epoch = 1
    assert not torch.equal(one[5][0], before)


def test_crops_lie_in_the_image_and_have_the_right_size() -> None:
    generator, shares = torch.Generator().manual_seed(0), []
    for _ in range(500):
        left, top, right, bottom = crop(500, 375, generator)
        assert 0 <= left < right <= 500 and 0 <= top < bottom <= 375
        shares.append((right - left) * (bottom - top) / (500 * 375))
        assert 0.74 < (right - left) / (bottom - top) < 1.34
    assert 0.08 <= min(shares) < 0.12 and 0.4 < sum(shares) / 500 < 0.6


def test_missing_and_unreadable_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"imagenet/train.* ImageNet cannot be downloaded"):
        Folders(tmp_path, "train", 24)
    for split in ("train", "val"):
        (tmp_path / "imagenet" / split / "n01").mkdir(parents=True)
    with pytest.raises(DataError, match="has no images in folders of classes"):
        Folders(tmp_path, "train", 24)
    bad = tmp_path / "imagenet" / "train" / "n01" / "bad.JPEG"
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.JPEG cannot be read"):
        Folders(tmp_path, "train", 24)[0]


def config(**more: Any) -> imagenet.Config:
    given = {"data": "generated", "model": "tiny", "optimizer": "tam", "lr": 0.2, "seed": 0, "epochs": 3,
             "batch": 16, "size": 16}  # fmt: skip
    return imagenet.Config(**{**given, **more})


def run(root: Path, steps: int | None = None, **more: Any) -> TrialFolder:
    torch.set_num_threads(1)
    trial = config(**more)
    folder = TrialFolder(root, trial)
    with folder.at_work():
        for _ in itertools.islice(imagenet.run(trial, folder, root, CPU, 0.0), steps):
            pass
    return folder


def test_a_killed_trial_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = outcome(run(tmp_path / "whole"))
    run(tmp_path / "parts", 11)  # in the second epoch of 6 steps
    assert outcome(run(tmp_path / "parts")) == whole


def test_a_batch_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="96 images make no batch of 128"):
        run(tmp_path, batch=128)
    with pytest.raises(ValueError, match="data must be 'imagenet' or 'generated', got 'cifar'"):
        config(data="cifar")


def test_on_two_ranks_by_torchrun(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(tam.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    found = []
    for name in ("one", "two"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "tam", "lab", "run", "imagenet", "--preset", "smoke", "--device", "cpu"]
        done = subprocess.run([*command, "--out", str(tmp_path / name)], capture_output=True, text=True,
                              env=environment, timeout=200)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("tam lab report") == 1  # rank 0's
        (plan,) = select_plans(Selection("imagenet", "smoke"), load_results(tmp_path / name))
        assert plan.to_run() == []
        trials = plan.comparison_trials(plan.study.variant("TAM"))
        assert trials is not None
        folders = [TrialFolder(tmp_path / name, trial) for trial in trials]
        found.append([outcome(folder) for folder in folders])
        for folder in folders:
            assert folder.read_result() is not None and folder.read_result()["ranks"] == 2
            assert [row["epoch"] for row in folder.metrics()] == [1, 2]
    assert found[0] == found[1]
