"""The variants that are compared: the paper's grid, and grids of an equal effective lr."""

from __future__ import annotations

from typing import Any

from tam.lab.core.study import Variant

GRID = (5e-6, 1e-5, 5e-5)
NO_DECAY: dict[str, Any] = {"weight_decay": 0.0}  # Hugging Face's default; the optimizers' own is another
ADAMW, ADATAMW = "AdamW", "AdaTAMW"
FIFTH, FIVE_TIMES = "AdaTAMW, a fifth of the lrs", "AdamW, five times the lrs"
CORRECTED = "AdaTAMW, bias correction, a fifth of the lrs"
UNTUNED = "not fine-tuned"
PAIRS = ((ADATAMW, ADAMW), (FIFTH, ADAMW), (ADATAMW, FIVE_TIMES), (CORRECTED, ADAMW))  # compared on MTEB


def make_variants(grid: tuple[float, ...] = GRID) -> tuple[Variant, ...]:
    """Return all variants, with this grid."""
    fifth, five_times = tuple(lr / 5 for lr in grid), tuple(lr * 5 for lr in grid)
    return (
        Variant(ADAMW, "adamw", grid, NO_DECAY),
        Variant(ADATAMW, "adatamw", grid, NO_DECAY, against=(FIVE_TIMES,)),
        Variant(FIFTH, "adatamw", fifth, NO_DECAY),
        Variant(FIVE_TIMES, "adamw", five_times, NO_DECAY),
        Variant(CORRECTED, "adatamw", fifth, {**NO_DECAY, "bias_correction": True}),
        Variant(UNTUNED, "adamw", grid[:1], NO_DECAY, {"epochs": 0}, versus=""),
    )
