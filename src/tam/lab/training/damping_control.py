"""Controls: TAM with the damping of another trial: constant at its mean, shuffled, or in order.

A trial of an optimizer with an alignment s leaves the s of every step in `alignment.pt`. A control reads it
there. With "mean" and "shuffled" the source is the same variant with the same seed. With "another" it is the
same variant with another seed: the same schedule of d without feedback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tam.lab.core.alignment import read_alignment
from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder


def load_source_alignment(config: TrialConfig, folder: TrialFolder) -> Tensor | None:
    """Return the s of every step that a control takes over. None if the trial is no control."""
    if config.damping is None:
        return None
    path = folder.path.parent / str(config.damping_of) / ALIGNMENT_FILE
    if not path.exists():
        source = config.damping_of
        raise LabError(f"{path} is missing: this control needs the alignment of the trial {source}")
    alignment = read_alignment(path)
    if config.damping == "mean":
        return torch.full_like(alignment, float(alignment.double().mean()))
    if config.damping == "shuffled":
        generator = torch.Generator().manual_seed(config.seed)
        return alignment[torch.randperm(len(alignment), generator=generator)]
    return alignment


def check_source_length(source: Tensor | None, steps: int) -> None:
    """Raise LabError if a control's source has another number of steps."""
    if source is not None and len(source) != steps:
        raise LabError(f"the trial whose damping this control uses has {len(source)} steps, not {steps}")
