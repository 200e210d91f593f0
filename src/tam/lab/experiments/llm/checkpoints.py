"""The Trainer's checkpoints, completed by the lab's own state with a digest of every file.

    checkpoints/checkpoint-40/...              what the Trainer writes after step 40
                              lab-DIGEST.pt    the lab's state, the step, and the sha256 of every other file

The lab's file is written last and named by its own digest. A checkpoint without it, with a damaged file, or
with another step than its folder's name is not used. Hashing takes about 2 seconds per GB; BERT-large's
checkpoints have 4 GB.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tam.lab.core.store import digest_of, write_whole

FOLDER = "checkpoints"


def list_checkpoints(trial: Path) -> list[Path]:
    """Return the checkpoints of a trial, the newest first."""
    paths = (trial / FOLDER).glob("checkpoint-*")
    return sorted((path for path in paths if path.name[11:].isdecimal()), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written, by its name."""
    return int(checkpoint.name.rpartition("-")[2])


def complete_checkpoint(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Add the lab's state to a checkpoint that the Trainer has written."""
    buffer = io.BytesIO()
    torch.save({**state, "step": step_of(checkpoint), "digests": _file_digests(checkpoint)}, buffer)
    write_whole(checkpoint / f"lab-{digest_of(buffer.getvalue())}.pt", buffer.getvalue())


def read_checkpoint(checkpoint: Path) -> dict[str, Any] | None:
    """Return the lab's state of a checkpoint. None if it is incomplete or damaged."""
    try:
        (path,) = checkpoint.glob("lab-*.pt")
        content = path.read_bytes()
        if checkpoint.is_symlink() or path.name != f"lab-{digest_of(content)}.pt":
            return None
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
        is_intact = state["step"] == step_of(checkpoint) and state["digests"] == _file_digests(checkpoint)
        return state if is_intact else None
    except Exception:  # a file is missing, or torch's reader meets something else
        return None


def _file_digests(checkpoint: Path) -> dict[str, str]:
    """Return the sha256 of every file but the lab's own. A file is read piece by piece."""
    digests = {}
    for path in checkpoint.rglob("*"):
        if path.is_file() and not path.name.startswith("lab-"):
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(1 << 24):
                    digest.update(piece)
            digests[str(path.relative_to(checkpoint))] = digest.hexdigest()
    return digests
