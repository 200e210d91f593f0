"""Controls of the damping: they use the s of another trial."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.lab.core.alignment import read_alignment
from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder
from tam.lab.optimizers.variants import TAMVariant
from tam.optimizers.base import make_state
from tam.optimizers.torque import TorqueOptimizer
from tam.switching.warmup import Warmup


def alignment_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors to which the step writes s, one per segment. Empty if the optimizer has no s.

    In a warm-up they are those of the active optimizer. They are its state as soon as there are gradients.
    """
    active = optimizer.optimizer if isinstance(optimizer, Warmup) else optimizer
    if isinstance(active, TAMVariant):
        return active.alignments()
    if not isinstance(active, TorqueOptimizer):
        return []
    make_state(active)
    return active.segments.alignments()


def hold_momentum_factor(config: TrialConfig, folder: TrialFolder, optimizer: Optimizer) -> None:
    """Give a control with constant damping the mean momentum of its source, if that has soft restarts.

    Raises:
        LabError: If the source's file is missing or damaged, or has another number of segments.
    """
    if config.damping == "mean" and isinstance(optimizer, TAMVariant):
        s = read_source_alignment(config, folder, len(optimizer.alignments()))
        assert s is not None
        optimizer.hold_momentum_factor(s)


def load_source_alignment(
    config: TrialConfig, folder: TrialFolder, optimizer: Optimizer | None = None
) -> Tensor | None:
    """Return the s of every step that a control takes over. None if the trial is no control.

    A trial whose optimizer has an alignment s leaves the s of every step in `alignment.pt`: [steps], or
    [steps, segments] if there are several segments. A control is TAM with the damping of that trial, segment
    by segment: constant at the segment's mean, steps shuffled, or in order. With "mean" and "shuffled" the
    source is the same variant with the same seed. With "another" it has another seed: the same schedule of d
    without feedback.

    Args:
        config: The trial's.
        folder: The trial's. That of the source is next to it.
        optimizer: The trial's. None: it has one segment.

    Raises:
        LabError: If the file is missing or damaged, or has another number of segments.
    """
    segments = 0 if optimizer is None else len(alignment_tensors(optimizer))
    alignment = read_source_alignment(config, folder, max(1, segments))
    if alignment is not None and config.damping == "mean":
        return alignment.double().mean(0).to(alignment.dtype).expand_as(alignment).contiguous()
    if alignment is not None and config.damping == "shuffled":
        generator = torch.Generator().manual_seed(config.seed)
        return alignment[torch.randperm(len(alignment), generator=generator)]
    return alignment


def read_source_alignment(config: TrialConfig, folder: TrialFolder, segments: int) -> Tensor | None:
    """Return the s of every step as the source recorded it. None if the trial is no control.

    Raises:
        LabError: If the file is missing or damaged, or has another number of segments.
    """
    if config.damping is None:
        return None
    path = folder.path.parent / str(config.damping_of) / ALIGNMENT_FILE
    if not path.exists():
        source = config.damping_of
        raise LabError(f"{path} is missing: this control needs the alignment of the trial {source}")
    alignment = read_alignment(path)
    alignment = alignment.float() if alignment.dtype == torch.float16 else alignment
    _check_segments(alignment, segments, path.parent.name)
    return alignment


def _check_segments(alignment: Tensor, segments: int, source: str) -> None:
    """Raise LabError if the control's optimizer has another number of segments than its source."""
    stored = alignment.shape[1] if alignment.dim() == 2 else 1
    if stored == segments:
        return
    have = "one s per step" if stored == 1 else f"{stored} segments"
    raise LabError(
        f"the trial {source}, whose damping this control uses, has {have}, but the control's optimizer has "
        f"{segments} segment{'s' if segments > 1 else ''}. Packed results hold one s per step, the mean over "
        "the segments: run the source again in a new folder"
    )


def check_source_length(source: Tensor | None, steps: int, name: str | None = None) -> None:
    """Raise LabError if a control's source, the trial of this name, has another number of steps."""
    if source is not None and len(source) != steps:
        trial = f"trial {name}" if name else "trial"
        raise LabError(f"the {trial} whose damping this control uses has {len(source)} steps, not {steps}")
