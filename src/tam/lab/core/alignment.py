"""s of every step of a trial, for its controls and reports."""

from __future__ import annotations

import bz2
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tam.lab.core.errors import LabError
from tam.lab.core.store import ALIGNMENT_FILE, RERUN, TrialFolder, digest_of, read_result

PACKED_LEVELS = 4096  # between s = 0 and s = 1 in a packed file
LEVELS = 128  # the same where s is kept in 8 bits
MAX_STEPS = 2**28  # that are unpacked


def read_alignment(path: Path, result: Mapping[str, Any] | None = None) -> Tensor:
    """Return s of every step of a trial: [steps], or [steps, segments] if there are several segments.

    The digest is in the trial's result, which is read if it is not given. Older results have none.
    """
    if result is None:
        result = read_result(path.parent) or {}
    expected = result.get("files", {}).get(path.name)
    try:
        content = path.read_bytes()
        if expected is not None and digest_of(content) != expected:
            raise LabError(f"{path} is damaged: its digest is not the one in the result. {RERUN}")
        s: Tensor = torch.load(io.BytesIO(content), weights_only=True)
        s = unpack_levels(s).float() / LEVELS if s.dtype == torch.uint8 else s
        has_shape = s.dim() == 1 or (s.dim() == 2 and s.shape[1] > 1)
        if not has_shape or not (s.abs() <= 1 + 1e-6).all():  # so it is, too, if there is a NaN
            raise LabError(f"{path} is damaged: s must be between -1 and 1. {RERUN}")
        return s
    except LabError:
        raise
    except Exception as error:  # torch raises any error of its reader
        raise LabError(f"{path} is damaged: it cannot be read. {RERUN}") from error


def round_alignment(s: Tensor) -> Tensor:
    """Return s rounded to multiples of 1/4096, as float32.

    From 1/2 on, only every second multiple is used: older packed files have s in 16 bits, and copies in both
    forms must be equal. So there are no negative zeros, either.
    """
    return (s.float() * PACKED_LEVELS).round().div(PACKED_LEVELS).half().float() + 0.0


def to_differences(s: Tensor) -> list[int]:
    """Return rounded s in units of 1/4096, each value minus the one before: small integers compress well."""
    levels = (s * PACKED_LEVELS).round().to(torch.int32)
    differences: list[int] = torch.diff(levels, prepend=levels.new_zeros(1)).tolist()
    return differences


def from_differences(differences: Sequence[int]) -> Tensor:
    """Return s, given what `to_differences` made of it."""
    if not differences or not all(type(difference) is int for difference in differences):
        raise ValueError("the differences of an alignment must be integers, one per step")
    return round_alignment(torch.tensor(differences, dtype=torch.int64).cumsum(0) / PACKED_LEVELS)


# A trial can have 499,200 steps: 1 MB in 16 bits, for each of hundreds of networks. In steps of 1/128, which
# change d by at most 1/512, and compressed, it is 0.16 MB.


def levels_of(s: Tensor) -> Tensor:
    """Return s rounded to multiples of 1/128, as int8."""
    return (s * LEVELS).round().clamp(-LEVELS, LEVELS - 1).to(torch.int8)


def pack_levels(levels: Tensor) -> Tensor:
    """Return the levels compressed, as bytes: their differences are small. int8 wraps, there and back."""
    steps = torch.diff(levels, prepend=levels.new_zeros(1))
    return torch.frombuffer(bytearray(bz2.compress(steps.numpy().tobytes())), dtype=torch.uint8)


def unpack_levels(packed: Tensor) -> Tensor:
    decompressor = bz2.BZ2Decompressor()
    content = decompressor.decompress(packed.numpy().tobytes(), MAX_STEPS)
    if not decompressor.eof:
        raise ValueError(f"the data is cut, or has more than {MAX_STEPS} steps")
    steps = torch.frombuffer(bytearray(content), dtype=torch.int8)
    return steps.cumsum(0, dtype=torch.int8)


def keep_levels(folder: TrialFolder, levels: Tensor) -> None:
    """Write s of all steps, in 8 bits and compressed."""
    folder.write(ALIGNMENT_FILE, pack_levels(levels))
