"""A trial's folder: its config, metrics as they come, checkpoints and the result.

    trials/3f2a90c1d4e7/config.json        what determines the trial; its hash is the folder's name
                        metrics.jsonl      one line per epoch
                        checkpoint-*.pt    the last two, each with the digest of its content in its name
                        alignment.pt       s of every step
                        result.json        when the trial is finished, with the digests of other files

Every file is written completely or not at all, so a process can be killed at any moment. A folder may come
from somebody else: links are not followed when files are written, and a LabError names a damaged file.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout

from tam.lab.core.config import TrialConfig, trial_key
from tam.lab.core.environment import describe_machine
from tam.lab.core.errors import BusyError, LabError

ALIGNMENT_FILE = "alignment.pt"  # s of every step
SCORES_FOLDER = "mteb"  # what was measured of the trained network
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{1,9})-([0-9a-f]{16})\.pt")  # epoch and digest
CHECKPOINTS = 2  # the last one, and the one before it should that be damaged
MAX_DEPTH = 50  # of JSON
RERUN = "Remove the trial's folder, and it is run again"

# Types of what is read of a result. A section stands before its values.
REQUIRED = {"diverged": bool, "timing": dict, "machine": dict, "timing.seconds": int | float}
OPTIONAL = {
    "epochs": int, "files": dict, "timing.together": int, "timing.date": str,
    "settings": dict, "settings.options": dict, "settings.optimizer": str,
}  # fmt: skip

T = TypeVar("T", dict[str, Any], list[Any])


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely, or leave the one that is there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _explained_write_errors(path):
        try:
            remove_path(part)
            with part.open("xb") as file:  # O_CREAT | O_EXCL: a link that appears meanwhile is not followed
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            remove_path(part)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file completely, or leave the one that is there."""
    write_whole(path, json.dumps(value, indent=1).encode() + b"\n")


@contextmanager
def _explained_write_errors(path: Path) -> Iterator[None]:
    """Raise a LabError with the reason if this file cannot be written inside."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            reason = "a file is in its place, or in that of a folder above it"
        hint = "What was saved before is intact: once there is room, the same command continues from there"
        raise LabError(f"{path} cannot be written: {reason}. {hint}") from error


@contextmanager
def _explained_read_errors(path: Path, hint: str) -> Iterator[None]:
    """Raise a LabError if this file cannot be read inside or is damaged, but not if it is missing."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise LabError(f"{path} is damaged: {error}. {hint}".strip()) from error


def read_json(path: Path, kind: type[T], hint: str = "", check: Callable[[T], None] | None = None) -> T:
    """Return the content of a JSON file that holds a dict or a list.

    It is damaged if `check` raises ValueError, and `hint` says what to do then. One that is missing raises
    FileNotFoundError.
    """
    with _explained_read_errors(path, hint):
        value = json.loads(path.read_text(encoding="utf-8"))
        _check_depth(value)
        if not isinstance(value, kind):
            raise ValueError(f"it holds a {type(value).__name__}, not a {kind.__name__}")
        if check is not None:
            check(value)
        return value


def _check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Raise if JSON is nested so deeply that code which walks through it could fail."""
    if left == 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(child, left - 1)


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of_folder(folder: Path) -> str:
    """Return a digest of the names and contents of its files, without hidden files and *.md."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix.lower() != ".md"]
    lines = [f"{file.name} {digest_of(file.read_bytes())}\n" for file in files if file.name[0] != "."]
    return digest_of("".join(lines).encode())


@contextmanager
def _hold_lock(path: Path, patience: float) -> Iterator[None]:
    """Hold a lock file inside. The system releases it if the process is killed.

    filelock itself refuses to follow a link on systems with O_NOFOLLOW. On others a link that replaces the
    file after the check is followed, but nothing is ever written to it.
    """
    with _explained_write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise LabError(f"{path} is not a regular file: remove it")
        try:
            lock = FileLock(path).acquire(timeout=patience, poll_interval=0.1)
        except Timeout as error:
            raise BusyError(f"another process works on {path.parent}") from error
    with lock:
        yield


@contextmanager
def lock_folder(root: Path) -> Iterator[None]:
    """Hold the lock of a results folder inside, to change a JSON file there."""
    with _hold_lock(root / ".lock", -1):
        for part in root.glob(".*.json.*.part"):  # of processes that were killed: others do not write now
            remove_path(part)
        yield


def refuse_links(*folders: Path) -> None:
    """Raise if one of these folders is a link: what is written to it would overwrite somebody's files."""
    for folder in folders:
        if os.path.islink(folder):  # False, too, for a name that is too long
            raise LabError(f"{folder} is a link, which nothing is written through: put a folder in its place")


def remove_path(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def read_result(trial: Path) -> dict[str, Any] | None:
    """Return the result of the trial in this folder. None if it is not finished."""
    try:
        return read_json(trial / "result.json", dict, "Remove it, and the trial is run again", check_result)
    except FileNotFoundError:
        return None


def check_result(result: Mapping[str, Any]) -> None:
    """Raise ValueError if a result misses a value that every result has, or has one that cannot be."""
    for name, kind in (REQUIRED | OPTIONAL).items():
        section, _, key = name.rpartition(".")
        values = result.get(section, {}) if section else result
        if not isinstance(values.get(key), kind) and (name in REQUIRED or key in values):
            raise ValueError(f"{name!r} is missing or of a wrong type")
    if not 0 <= result["timing"]["seconds"] < 1e12:
        raise ValueError("'timing.seconds' is no duration")
    json.dumps(result, ensure_ascii=False).encode()  # raises ValueError at text that cannot be written


def parse_rows(content: bytes) -> list[dict[str, Any]]:
    """Return the rows of JSON lines. A last one that was not written completely is left out."""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def check_rows(rows: list[dict[str, Any]], epochs: int | None) -> None:
    """Raise ValueError if a row is no dict of an epoch and numbers, or if there is not one for each epoch.

    A value may be a list of numbers, too.
    """
    if epochs is not None and len(rows) != epochs:
        raise ValueError(f"it has {len(rows)} lines, but the result is of {epochs} epochs")
    for row in rows:
        if not isinstance(row, dict) or type(row.get("epoch")) is not int:
            raise ValueError("a line holds no dict with an epoch")
        for name, value in row.items():
            if not all(map(_is_number, value if isinstance(value, list) else [value])):
                raise ValueError(f"{name!r} of epoch {row['epoch']} is no number")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def read_metrics(path: Path, epochs: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a metrics file. A finished trial has one for each of its `epochs`."""
    with _explained_read_errors(path, RERUN):
        try:
            rows = parse_rows(path.read_bytes())
        except FileNotFoundError:
            rows = []
        check_rows(rows, epochs)
        return rows


class TrialFolder:
    def __init__(self, root: Path, config: TrialConfig | Mapping[str, Any]) -> None:
        self.config = config.canonical if isinstance(config, TrialConfig) else dict(config)
        self.key = trial_key(self.config)
        self.path = root / "trials" / self.key
        self.writes = True  # False on ranks that take part in a trial another rank writes
        self.trials_together = 1  # so many trials shared the device
        self.rows: list[dict[str, Any]] = []  # the metrics, while the trial runs
        # For a trial that cannot yield its progress: an engine sets it.
        self.report_progress: Callable[[Any], None] = lambda progress: None
        self._digests: dict[str, str] = {}  # of the files that `write` has written

    def read_result(self) -> dict[str, Any] | None:
        return read_result(self.path)

    def finish(self, result: Mapping[str, Any], seconds: float, device: torch.device) -> None:
        """Write the result with how long it took, when and where. The checkpoints are removed."""
        if not self.writes:
            return
        today = datetime.now(timezone.utc).date().isoformat()
        timing = {"seconds": seconds, "together": self.trials_together, "date": today}
        files = {"files": self._digests} if self._digests else {}
        machine = describe_machine(device)
        write_json(self.path / "result.json", {**result, **files, "timing": timing, "machine": machine})
        for _, _, path in self._checkpoints():
            remove_path(path)

    @contextmanager
    def at_work(self, patience: float = 0.5) -> Iterator[None]:
        """Hold the trial's lock inside. Another process has some seconds to release it.

        It may have finished the trial: read the result inside.
        """
        refuse_links(self.path.parent, self.path)
        with _hold_lock(self.path / "lock", patience):
            for part in self.path.glob(".*.part"):  # of a process that was killed
                remove_path(part)
            write_json(self.path / "config.json", self.config)
            yield

    def busy(self) -> bool:
        """Return whether a process works on the trial. Nothing is written: the folder may be read-only."""
        path = self.path / "lock"
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                return False
            if sys.platform == "win32":
                FileLock(path).acquire(timeout=0).lock.release()
            else:  # as filelock does, which opens the file for writing, and in some versions truncates it
                import fcntl

                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may look, too
        except (Timeout, BlockingIOError):
            return True
        except OSError:
            pass  # there is none, or it cannot be opened: that is reported when the trial starts
        return False

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a line to the metrics."""
        self.rows.append(dict(row))
        path = self.path / "metrics.jsonl"
        if self.writes:
            with _explained_write_errors(path), path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows so far."""
        return read_metrics(self.path / "metrics.jsonl")

    def write(self, name: str, value: Any) -> None:
        """Write a file next to the others. The result holds its digest."""
        if self.writes:
            content = _serialized(value)
            write_whole(self.path / name, content)
            self._digests[name] = digest_of(content)

    def save(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, from which `load` continues after this epoch."""
        if not self.writes:
            return
        stored = {"epoch": epoch, "state": dict(state), "rows": json.dumps(self.rows), "files": self._digests}
        content = _serialized(stored)
        write_whole(self.path / f"checkpoint-{epoch:06d}-{digest_of(content)}.pt", content)
        for _, _, path in self._checkpoints()[CHECKPOINTS:]:
            remove_path(path)

    def load(self, device: torch.device) -> tuple[int, dict[str, Any]] | None:
        """Return the epoch and state of the last intact checkpoint. The metrics become those up to there."""
        checkpoint, self.rows = None, []
        for epoch, digest, path in self._checkpoints():
            try:
                content = path.read_bytes()
                if digest_of(content) != digest:
                    raise ValueError("its digest is not the one in its name")
                stored = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
                if stored.get("epoch", epoch) != epoch:  # checkpoints of older versions hold none
                    raise ValueError("its epoch is not the one in its name")
                checkpoint, self.rows = (epoch, stored["state"]), json.loads(stored["rows"])
                self._digests = dict(stored.get("files", {}))
                break
            except Exception:  # torch raises any error of its reader
                warnings.warn(f"{path} is damaged: going on from the checkpoint before it", stacklevel=2)
                if self.writes:
                    remove_path(path)  # it would take the place of a good one
        self.begin_with(self.rows)
        return checkpoint

    def checkpoint_epoch(self) -> int:
        """Return the epoch of the last checkpoint, by its name. 0 if there is none. Nothing is written."""
        return max((epoch for epoch, _, _ in self._checkpoints()), default=0)

    def begin_with(self, rows: list[dict[str, Any]]) -> None:
        """Set the metrics to these rows. `log` adds to them."""
        self.rows = rows
        if self.writes:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            write_whole(self.path / "metrics.jsonl", lines.encode())

    def _checkpoints(self) -> list[tuple[int, str, Path]]:
        """Return the epoch, digest and path of each, the newest first. Others, and links, are not ours."""
        paths = [path for path in self.path.glob("checkpoint-*") if path.is_file() and not path.is_symlink()]
        names = [CHECKPOINT_NAME.fullmatch(path.name) for path in paths]
        return sorted([(int(name[1]), name[2], self.path / name[0]) for name in names if name], reverse=True)


def _serialized(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
