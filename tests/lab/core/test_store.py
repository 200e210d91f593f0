"""A trial's folder survives kills, damage and a full disk."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.core import store
from tam.lab.core.config import trial_key
from tam.lab.core.errors import BusyError, LabError
from tam.lab.core.store import TrialFolder
from tests.lab.core.helpers import CPU, save_checkpoints


def test_the_key_is_of_the_content() -> None:
    assert trial_key({"a": 1, "b": 2}) == trial_key({"b": 2, "a": 1}) != trial_key({"a": 1, "b": 3})


def test_the_last_checkpoint_counts_and_two_are_kept(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        assert folder.load(CPU) is None
        save_checkpoints(folder, 1, 2, 3)
        folder.log({"epoch": 4})  # after the last checkpoint: it will be done again
        found = folder.load(CPU)
        assert found is not None and found[0] == 3 and int(found[1]["x"]) == 3
        assert [row["epoch"] for row in folder.metrics()] == [1, 2, 3]
        assert len(list(folder.path.glob("checkpoint-*"))) == 2


def test_a_damaged_checkpoint_falls_back(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        newest = save_checkpoints(folder, 1, 2)
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1  # one bit
        newest.write_bytes(content)
        with pytest.warns(UserWarning, match="is damaged: going on from the checkpoint before it"):
            found = folder.load(CPU)
        assert found is not None and found[0] == 1
        assert [row["epoch"] for row in folder.metrics()] == [1]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        folder.log({"epoch": 1})
        with (folder.path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"epo')
        assert folder.metrics() == [{"epoch": 1}]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        folder.save(1, {"x": torch.tensor(1)})

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(store.os, "fsync", full)
        for write in (
            lambda: folder.save(2, {"x": torch.tensor(2)}),
            lambda: folder.finish({"diverged": False}, 1.0, CPU),
        ):
            with pytest.raises(LabError, match=r"the disk is full\. What was saved before is intact"):
                write()
        monkeypatch.undo()
        assert folder.read_result() is None and not list(folder.path.glob("*.part"))
        found = folder.load(CPU)
        assert found is not None and found[0] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_at_the_metrics(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    folder.path.mkdir(parents=True)
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        folder.at_work(),
        pytest.raises(LabError, match=r"metrics.jsonl cannot be written: the disk is full"),
    ):
        folder.log({"epoch": 1, "loss": 0.0})


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        folder.log({"epoch": 1})
        folder.save(1, {"x": torch.tensor(1)})
        (folder.path / "metrics.jsonl").write_bytes(b"\xff\n")
        with pytest.raises(LabError, match=r"metrics.jsonl is damaged"):
            folder.metrics()
        assert folder.load(CPU) is not None
        assert folder.metrics() == [{"epoch": 1}]  # the checkpoint has them, too
    for content in ("5", "{}", "[", '{"diverged": false}'):
        (folder.path / "result.json").write_text(content)
        with pytest.raises(LabError, match=r"result.json is damaged"):
            _ = folder.read_result()


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    folder.path.mkdir(parents=True)
    part = folder.path / ".checkpoint-000001-aa.pt.123.part"
    part.write_bytes(b"half")
    with folder.at_work():
        assert not part.exists()


def test_two_processes_do_not_run_one_trial(tmp_path: Path) -> None:
    first, second = (TrialFolder(tmp_path, {"a": 1}) for _ in range(2))
    with first.at_work(), pytest.raises(BusyError, match="another process works on"), second.at_work():
        pass
    with second.at_work():
        pass


def test_errors_of_the_work_itself_stay_what_they_are(tmp_path: Path) -> None:
    folder: Any = TrialFolder(tmp_path, {"a": 1})
    with pytest.raises(FileNotFoundError), folder.at_work():
        raise FileNotFoundError("data")


def test_a_finished_trial_keeps_no_checkpoints(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        folder.save(1, {"x": torch.tensor(1)})
        folder.finish({"validation": 93.6, "diverged": False}, 1.0, CPU)
    assert folder.read_result() is not None and folder.read_result()["validation"] == 93.6
    assert (
        folder.read_result()["machine"]["torch"] == torch.__version__
        and folder.read_result()["timing"]["seconds"] == 1
    )
    assert not list(folder.path.glob("checkpoint-*"))


def test_a_rank_that_does_not_write_knows_the_metrics_too(tmp_path: Path) -> None:
    """It decides by them as the one that writes does."""
    folder = TrialFolder(tmp_path, {"seed": 0})
    folder.writes = False
    folder.begin_with([])
    folder.log({"epoch": 1, "loss": float("nan")})
    assert len(folder.rows) == 1 and folder.metrics() == [] and not folder.path.exists()
