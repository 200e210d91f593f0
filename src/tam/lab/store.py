"""A trial's folder: its config, metrics as they come, checkpoints and the result.

    trials/3f2a90c1d4e7/config.json        what determines the trial; its hash is the folder's name
                        metrics.jsonl      a line an epoch
                        checkpoint-*.pt    the last two, each with the digest of its content in its name
                        result.json        when it is finished

Whatever is written is written whole or not at all, so that a process can be killed at any moment.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import torch

from tam.lab.machine import machine

KEPT = 2  # checkpoints: the last one, and the one before it should that be damaged


class LabError(RuntimeError):
    """What stops a trial or a run, in words for the one who started it."""


class BusyError(LabError):
    """Another process works on the trial."""


def key_of(config: Mapping[str, Any]) -> str:
    """The name of a trial: a hash of its config."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, or leaves the one that is there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise explained(error, path) from error


def explained(error: OSError, path: Path) -> LabError:
    """What a file that cannot be written means."""
    what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
    return LabError(
        f"{path} cannot be written: {what}. Nothing is lost: what was saved before stands, and the same "
        "command goes on from there"
    )


def read_result(trial: Path) -> dict[str, Any] | None:
    """Of the trial in this folder, if it is finished."""
    path = trial / "result.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not {"diverged", "timing", "machine"} <= found.keys():
            raise ValueError(f"{path} is of something else")
        return dict(found)
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise LabError(f"{path} is damaged: remove it, and the trial is run again") from error


class TrialFolder:
    """The folder of one trial."""

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        self.config, self.key = dict(config), key_of(config)
        self.path = root / "trials" / self.key
        self.writes = True  # not so on ranks that take part in a trial another one writes of
        self.together = 1  # so many trials shared the device
        self.rows: list[dict[str, Any]] = []  # the metrics, while it is at work

    # ------------------------------------------------------------------ result

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of a finished trial."""
        return read_result(self.path)

    def finish(self, result: Mapping[str, Any], seconds: float, device: torch.device) -> None:
        """Writes the result with how long it took, when and where; the checkpoints are no longer needed."""
        if not self.writes:
            return
        today = datetime.now(timezone.utc).date().isoformat()
        timing = {"seconds": seconds, "together": self.together, "date": today}
        known = {**result, "timing": timing, "machine": machine(device)}
        write_whole(self.path / "result.json", _json(known))
        for path in self._checkpoints():
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ at work

    @contextmanager
    def at_work(self, patience: float = 0.5) -> Iterator[None]:
        """Inside, the trial is this process's alone; another one is given some seconds to end.

        It may have finished the trial: look at `result` inside.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        except OSError as error:
            raise explained(error, self.path) from error
        latest = time.monotonic() + patience
        with lock:
            while not _locked(lock):
                if time.monotonic() >= latest:
                    raise BusyError(f"another process works on {self.path}")
                time.sleep(0.1)
            with suppress(OSError):  # for whoever looks who it is; on a full disk nobody does
                os.truncate(lock.fileno(), 0)
                os.write(lock.fileno(), f"{os.getpid()}\n".encode())
            for part in self.path.glob(".*.part"):  # of a process that was killed
                shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
            write_whole(self.path / "config.json", _json(self.config))
            yield

    def busy(self) -> bool:
        """Whether a process is at work on the trial."""
        try:
            with (self.path / "lock").open("a") as lock:
                return not _locked(lock)
        except OSError:
            return False  # there is none, or what is wrong will be told when the trial begins

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends a line to the metrics."""
        self.rows.append(dict(row))
        if not self.writes:
            return
        try:
            with (self.path / "metrics.jsonl").open("ab") as file:
                file.write(_line(row))
        except OSError as error:
            raise explained(error, self.path / "metrics.jsonl") from error

    def metrics(self) -> list[dict[str, Any]]:
        """The lines so far; a last one that was not written whole is left out."""
        try:
            lines = (self.path / "metrics.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        try:
            return [json.loads(line) for line in lines[:-1]]
        except ValueError as error:
            raise LabError(
                f"{self.path}/metrics.jsonl is damaged: remove the folder, and it is run again"
            ) from error

    def write(self, name: str, value: Any) -> None:
        """A file beside the others."""
        if self.writes:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            write_whole(self.path / name, buffer.getvalue())

    def save(self, epoch: int, state: Mapping[str, Any]) -> None:
        """A checkpoint, from which `load` goes on after the given epoch."""
        if not self.writes:
            return
        buffer = io.BytesIO()
        torch.save({"state": dict(state), "rows": json.dumps(self.rows)}, buffer)
        content = buffer.getvalue()
        write_whole(self.path / f"checkpoint-{epoch:06d}-{digest_of(content)}.pt", content)
        for path in self._checkpoints()[KEPT:]:
            path.unlink(missing_ok=True)

    def load(self, device: torch.device) -> tuple[int, dict[str, Any]] | None:
        """The epoch and state of the last checkpoint that is whole; the metrics are then those till there."""
        found, self.rows = None, []
        for path in self._checkpoints():
            _, epoch, digest = path.stem.split("-")
            try:
                content = path.read_bytes()
            except OSError:
                content = b""
            if digest_of(content) == digest:
                kept = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
                found, self.rows = (int(epoch), kept["state"]), json.loads(kept["rows"])
                break
            warnings.warn(f"{path} is damaged: going on from the checkpoint before it", stacklevel=2)
            if self.writes:
                path.unlink()  # it would take the place of a good one
        self.begin_with(self.rows)
        return found

    def begin_with(self, rows: list[dict[str, Any]]) -> None:
        """The metrics are these, and whatever is logged from now on."""
        self.rows = rows
        if self.writes:
            write_whole(self.path / "metrics.jsonl", b"".join(map(_line, rows)))

    def _checkpoints(self) -> list[Path]:
        """The newest first."""
        return sorted(self.path.glob("checkpoint-*.pt"), reverse=True)


def _locked(file: IO[str]) -> bool:
    """Tries to take the lock, which is ours until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of_folder(folder: Path) -> str:
    """Of its files' names and contents, but for hidden files and *.md, which tell of the others."""
    there = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".") and path.suffix.lower() != ".md"
    ]
    return digest_of("".join(f"{path.name} {digest_of(path.read_bytes())}\n" for path in there).encode())


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Inside, what a folder knows of itself is this process's alone."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("a")
    except OSError as error:
        raise explained(error, root) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
