"""What trials measure in the same way: gradient norm, accuracy, the metrics and result of a classifier."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tam.lab.models import count_parameters
from tam.step.rule import damping_of


def autocast(device: torch.device) -> torch.autocast:
    """Return the precision that networks compute in: bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def grad_norm(model: nn.Module) -> Tensor:
    """Return the norm of all gradients, on the device."""
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    return torch.linalg.vector_norm(torch.stack(norms))  # type: ignore[no-any-return]


@torch.no_grad()
def count_correct(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """Return how many labels the network predicts, on the device, in float64 for exact percentages."""
    model.eval()
    correct = torch.zeros((), dtype=torch.float64, device=device)
    for images, labels in batches:
        with autocast(device):
            correct += (model(images).argmax(1) == labels).sum()
    model.train()
    return correct


def classifier_metrics(
    epoch: int, lr: float, loss: float, grad_norm: float, alignment: float, validation: float
) -> dict[str, Any]:
    """Return the metrics of an epoch, counted from 0. An alignment of NaN means there is none."""
    row = {"epoch": epoch + 1, "lr": lr, "loss": loss, "grad_norm": grad_norm, "validation": validation}
    if math.isnan(alignment):
        return row
    return {**row, "alignment": alignment, "damping": damping_of(alignment)}


def classifier_result(metrics: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return what a trial's result takes from the metrics of its last epoch."""
    figures = {key: value for key, value in metrics.items() if key in ("loss", "validation")}
    counts = {"epochs": metrics["epoch"], "parameters": count_parameters(model)}
    return {**figures, **counts, "diverged": not math.isfinite(metrics["loss"])}
