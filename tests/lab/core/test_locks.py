"""Locks exclude processes, end with them, and never touch what they are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tam.lab.core.errors import BusyError, LabError
from tam.lab.core.results import load_existing_results
from tam.lab.core.selection import Selection, remember_selection, selections_of
from tam.lab.core.store import TrialFolder, write_whole
from tests.lab.engines.test_engines import PATHS

HOLD = """
import sys
from pathlib import Path
from tam.lab.core.store import TrialFolder

with TrialFolder(Path(sys.argv[1]), {"a": 1}).at_work():
    print("holds", flush=True)
    sys.stdin.read()
"""
COUNT = """
import sys
from pathlib import Path
from tam.lab.core.errors import BusyError
from tam.lab.core.store import TrialFolder

root = Path(sys.argv[1])
for number in range(20):
    with TrialFolder(root, {"a": 1}).at_work(patience=60):
        path = root / "count"
        path.write_text(str(int(path.read_text()) + 1))
"""


@contextmanager
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of a trial."""
    command = [sys.executable, "-c", HOLD, str(root)]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [root, *root.rglob("*")]
    }


def test_a_process_that_is_killed_releases_its_lock(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with holder(tmp_path) as process:
        assert folder.busy()
        with pytest.raises(BusyError, match="another process works on"), folder.at_work(patience=0):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not folder.busy()
        with folder.at_work(patience=0):
            pass


def test_processes_that_race_for_a_lock_take_turns(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert (tmp_path / "count").read_text() == "40"


def make_read_only(folder: TrialFolder) -> None:
    """Take all rights to write, and make files so old that a change of one is seen."""
    for path in (folder.path / "lock", folder.path):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o555)


def test_looking_whether_a_trial_runs_writes_nothing(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    assert not folder.busy() and not folder.path.exists()
    with folder.at_work():
        pass
    make_read_only(folder)
    before = snapshot(tmp_path)
    assert not folder.busy() and snapshot(tmp_path) == before
    folder.path.chmod(0o755)
    (folder.path / "lock").unlink()
    folder.path.chmod(0o555)
    before = snapshot(tmp_path)
    assert not folder.busy() and snapshot(tmp_path) == before
    folder.path.chmod(0o755)


def test_a_lock_is_seen_in_a_read_only_folder(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with holder(tmp_path) as process:
        (folder.path / "lock").write_text("not to be truncated")
        make_read_only(folder)
        before = snapshot(tmp_path)
        assert folder.busy() and TrialFolder(tmp_path, {"a": 1}).busy() and snapshot(tmp_path) == before
        process.kill()
        process.wait()
        assert not folder.busy() and snapshot(tmp_path) == before
        folder.path.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="flock")
def test_looking_does_not_keep_others_from_looking(tmp_path: Path) -> None:
    import fcntl

    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        pass
    with (folder.path / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # like another process that looks at this moment
        assert not folder.busy()


def test_a_link_instead_of_a_lock_is_refused(tmp_path: Path) -> None:
    """Of a folder from somebody else: the file it points to stays as it is."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder, root = TrialFolder(tmp_path / "lab", {"a": 1}), tmp_path / "lab"
    folder.path.mkdir(parents=True)
    (root / ".lock").symlink_to(tmp_path / "new")
    with pytest.raises(LabError, match=r"\.lock is not a regular file"):
        remember_selection(Selection("images", "smoke"), root)
    (folder.path / "lock").symlink_to(victim)
    assert not folder.busy()
    with pytest.raises(LabError, match="lock is not a regular file"), folder.at_work():
        pass
    assert victim.read_text() == "precious" and not (tmp_path / "new").exists()
    (folder.path / "lock").unlink()
    (folder.path / "lock").mkdir()
    with pytest.raises(LabError, match="lock is not a regular file"), folder.at_work():
        pass


def test_a_link_instead_of_a_part_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".report.md.{os.getpid()}.part").symlink_to(victim)
    write_whole(tmp_path / "report.md", b"report")
    assert victim.read_text() == "precious"
    assert (tmp_path / "report.md").read_text() == "report" and not (tmp_path / "report.md").is_symlink()
    folder = TrialFolder(tmp_path, {"a": 1})
    folder.path.mkdir(parents=True)
    (folder.path / ".model.part").symlink_to(tmp_path)  # a link to a folder is removed, not the folder
    with folder.at_work():
        assert victim.exists() and not (folder.path / ".model.part").is_symlink()


def test_parts_of_killed_processes_are_removed_from_the_results_folder(tmp_path: Path) -> None:
    stale, other = tmp_path / ".runs.json.12345.part", tmp_path / ".titles-00.pt.12345.part"
    for path in (stale, other):
        path.write_text("half")
    remember_selection(Selection("images", "smoke"), tmp_path)
    assert not stale.exists()
    assert other.exists()  # another process may write it: the folder's lock is for JSON alone
    assert selections_of(load_existing_results(tmp_path)) == [Selection("images", "smoke", tuning_seeds=1)]
    assert json.loads((tmp_path / "runs.json").read_text())[0]["experiment"] == "images"
