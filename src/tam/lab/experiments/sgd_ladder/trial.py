"""A trial of a ladder of SGD: an image classifier at a constant lr, with the gradient's norm clipped.

It is a trial of `images` that also clips, measures the validation loss, and says for how long d was near 0.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from tam.lab.core.store import TrialFolder
from tam.lab.experiments.images import trial as images
from tam.lab.optimizers import rule_of
from tam.lab.training.loop import train_network
from tam.lab.training.metrics import autocast

CLASSES = 10
CHANCE = math.log(CLASSES)  # the loss of a network that has learned nothing
FROZEN = 0.02  # d below which a step hardly takes in its gradient


@dataclass(frozen=True, kw_only=True)
class Config(images.Config):
    """A run.

    Attributes:
        clip: The largest norm of the gradient; 0 does not clip.
    """

    always_stored: ClassVar[frozenset[str]] = frozenset({"clip"})  # it tells them from trials of images

    schedule: str = "constant"
    clip: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip must be a finite number >= 0, got {self.clip}")
        if self.sgdm_from is not None or self.decay_in_cosine:
            raise ValueError("sgdm_from and decay_in_cosine are not supported")
        rule_of(self.optimizer, self.options)


class Training(images.Training):
    """A network, its data and its optimizer."""

    is_compiled: ClassVar[bool] = False  # five epochs take less time than compiling them

    def __init__(self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device) -> None:
        super().__init__(config, folder, data_folder, device)
        self.clip, self.rule = config.clip, rule_of(config.optimizer, config.options)

    def prepare_gradients(self) -> Tensor:
        """Clip the gradients, for every optimizer. Return their norm before."""
        if not self.clip:
            return super().prepare_gradients()
        return clip_grad_norm_(self.model.parameters(), self.clip)

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any]]:
        row = yield from super().epoch(epoch)
        if "damping" in row:  # with the gain and the bounds of the rule
            row["damping"] = float(self.rule.damping(self.measured(epoch)[:, -1]).mean())
        return row

    @torch.no_grad()
    def validate(self) -> dict[str, Tensor]:
        """Return accuracy and mean loss."""
        images, labels = self.validation_set()
        correct, loss = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.model.eval()
        for x, y in self.batches(images, labels):
            with autocast(self.device):
                outputs = self.model(x)
            correct += (outputs.argmax(1) == y).sum()
            loss += cross_entropy(outputs.float(), y, reduction="sum")
        self.model.train()
        return {"validation": 100 * correct / len(labels), "validation_loss": loss / len(labels)}

    def result(self, metrics: list[dict[str, Any]]) -> dict[str, Any]:
        result = super().result(metrics)
        loss = float(metrics[-1]["validation_loss"])
        is_finite = math.isfinite(loss) and not result["diverged"]
        verdict = {"diverged": not is_finite, "failed": not is_finite or loss > CHANCE}
        result |= {"validation_loss": loss if is_finite else math.nan, **verdict}
        s = self.recorder.alignment[: int(self.recorder.steps_taken)].cpu()
        if s.isnan().all():  # SGDM has none
            return result
        quarter = len(s) // 4
        return {
            **result, "settled_alignment": float(s[quarter : len(s) - quarter].mean()),
            "frozen_steps": longest_run(self.rule.damping(s) < FROZEN),
        }  # fmt: skip


def longest_run(flags: Tensor) -> int:
    """Return the length of the longest run of True.

    >>> longest_run(torch.tensor([True, False, True, True]))
    2
    """
    position = torch.arange(1, len(flags) + 1)
    last_false = torch.where(flags.cpu(), 0, position).cummax(0).values
    return int((position - last_false).max())


run = partial(train_network, Training)
