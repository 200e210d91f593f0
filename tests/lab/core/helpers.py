"""Trial folders for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from tam.lab.core.store import TrialFolder

CPU = torch.device("cpu")


def save_checkpoints(folder: TrialFolder, *epochs: int) -> Path:
    """Log and save these epochs. Return the newest checkpoint. The caller holds the trial's lock."""
    for epoch in epochs:
        folder.log({"epoch": epoch})
        folder.save(epoch, {"x": torch.tensor(epoch)})
    return max(folder.path.glob("checkpoint-*.pt"))
