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

FIFTH_GRID, FIVE_TIMES_GRID = tuple(lr / 5 for lr in GRID), tuple(lr * 5 for lr in GRID)
VARIANTS = (
    Variant(ADAMW, "adamw", GRID, NO_DECAY),
    Variant(ADATAMW, "adatamw", GRID, NO_DECAY, against=(FIVE_TIMES,)),
    Variant(FIFTH, "adatamw", FIFTH_GRID, NO_DECAY),
    Variant(FIVE_TIMES, "adamw", FIVE_TIMES_GRID, NO_DECAY),
    Variant(CORRECTED, "adatamw", FIFTH_GRID, {**NO_DECAY, "bias_correction": True}),
    Variant(UNTUNED, "adamw", GRID[:1], NO_DECAY, {"epochs": 0}, versus=""),
)
