"""The variants and studies of registered.md, part "Beyond the paper"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tam.lab.core.controls import another_seeds_damping
from tam.lab.core.study import Ladder, Study, Variant, rungs
from tam.lab.experiments.pretrain import trial
from tam.lab.optimizers import SCHEDULE_FREE

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
# AdaTAMW's momentum is a sum, 5 times the average that AdamW has at d = 1/2. So a fifth of AdamW's lr gives
# equal steps, and 5 times its weight decay an equal decay, which is lr times weight decay per step.
SHARE = 0.2
TORQUE = {**OPTIONS, "weight_decay": 0.5, "bias_correction": True, "scope": "tensor"}
NO_CLIPPING = {"clip": 0.0}


def variants(lrs: tuple[float, ...]) -> dict[str, Variant]:
    """Return the variants of the registration, by their number there, at these lrs of AdamW."""
    own = tuple(float(f"{SHARE * lr:.6g}") for lr in lrs)
    soft = {**TORQUE, "soft_restart": True}
    every = {
        "V1": Variant("AdamW", "adamw", lrs, OPTIONS),
        "V1n": Variant("AdamW, no clipping", "adamw", lrs, OPTIONS, NO_CLIPPING),
        "V3": Variant("AdaTAMW", "adatamw", own, {**TORQUE, "scope": "global"}),
        "V4": Variant("AdaTAMW per tensor", "adatamw", own, TORQUE),
        "V4n": Variant("AdaTAMW per tensor, no clipping", "adatamw", own, TORQUE, NO_CLIPPING),
        "V6": Variant("AdamW, lowered schedule", "adamw", lrs, OPTIONS, {"lowered": 0.42}),
        "V7": Variant("d at most 1/2", "adatamw-variant", own, {**TORQUE, "max_damping": 0.5}),
        "V8": Variant("gain 2, d at least 0.05", "adatamw-variant", own,
                      {**TORQUE, "gain": 2.0, "min_damping": 0.05}),
        "V9": Variant("soft restart", "adatamw-variant", own, soft),
        "V10": Variant("C-AdamW", "c-adamw", lrs, OPTIONS),
        "V11": Variant("AdamW, hypergradient", "hypergradient-adamw", lrs, OPTIONS),
        "V12": Variant("schedule-free AdamW", SCHEDULE_FREE, lrs, OPTIONS),
        "V13": Variant("preconditioned cosine", "adatamw-variant", own, {**TORQUE, "preconditioned": True}),
        "V14": Variant("smoothing 0.95", "adatamw", own, {**TORQUE, "smoothing": 0.95}),
        "V15": Variant("AdamW, momentum 0.8", "adamw", lrs, {**OPTIONS, "betas": (0.8, 0.95)}),
        # AdamW without the bias correction of its momentum.
        "V16": Variant("AdaTAMW, d = 1/2", "adatamw", own, {**TORQUE, "scope": "global", "smoothing": 1.0}),
    }  # fmt: skip
    controls = {"V2": ("V4", "constant damping"), "V9c": ("V9", "constant momentum and damping")}
    for key, (source, name) in controls.items():
        every[key] = replace(every[source], name=f"{every[source].name}, {name}", lrs=(), damping="mean",
                             control_of=every[source].name)  # fmt: skip
    return {**every, "V5": another_seeds_damping(every["V4"])}


def ladder(name: str, title: str, keys: str, lrs: tuple[float, ...], seeds: range, **workload: Any) -> Ladder:
    """Return a ladder of the variants with these numbers."""
    every = variants(lrs)
    return Ladder(
        name=name, title=title, workload={"epochs": 20, "data": "wikitext-2", **workload},
        variants=tuple(every[key] for key in keys.split()), baseline="AdamW", seeds=tuple(seeds),
        outcome="validation", label="validation loss (nats per byte)", cap=trial.CHANCE,
        controls=False,
    )  # fmt: skip


RUNGS = rungs(0.00035, 12)
FIRST_STAGE = ladder(
    "ladder",
    "Every learning rate, 4.9M parameters",
    "V1 V1n V4 V4n V5 V6 V9 V9c",
    RUNGS,
    range(6),
    size="4.9M",
)


def best_loss() -> Study:
    """Return the study of H6: each variant at its best rung of the first stage, with fresh seeds."""
    every = variants(RUNGS)
    return Study(
        "best", "The best learning rate of each, 4.9M parameters", FIRST_STAGE.workload,
        (every["V1"], every["V4"]), baseline="AdamW", seeds=tuple(range(100, 132)),
        tuning_seeds=FIRST_STAGE.seeds, former_tuning_seeds=len(FIRST_STAGE.seeds), outcome="validation",
        label=FIRST_STAGE.label, test_label="test loss", higher=False, margin=0.005, digits=4, controls=False,
    )  # fmt: skip


def failures() -> Study:
    """Return the study of H3's failures: the rung nearest to 1.4 times V4's upper knee, with fresh seeds."""
    every = variants((RUNGS[7],))
    return Study(
        "failures", "Past the upper knee, 4.9M parameters", FIRST_STAGE.workload,
        tuple(every[key] for key in ("V4", "V5", "V6")), baseline="AdamW, lowered schedule",
        seeds=tuple(range(200, 232)), outcome="validation", label=FIRST_STAGE.label, test_label="test loss",
        higher=False, margin=0.01, digits=4, controls=False,
    )  # fmt: skip


LARGER = ladder(
    "ladder-25M",
    "Every learning rate, 25M parameters",
    "V1 V4 V6 V8 V10 V11",
    RUNGS[:7],
    range(4),
    size="25M",
)


def start(name: str, title: str, keys: str, lr: float, seeds: range, **workload: Any) -> Study:
    """Return a study of how these variants start, at one lr of AdamW."""
    every = variants((lr,))
    return Study(
        name, title, {**FIRST_STAGE.workload, **workload},
        tuple(every[key] for key in keys.split()), baseline="AdamW", seeds=tuple(seeds), outcome="validation",
        label=FIRST_STAGE.label, test_label="test loss", higher=False, margin=0.03, digits=4, controls=False,
    )  # fmt: skip


STARTS = tuple(  # of H4, at V4's best rung of the first stage
    start(f"warmup-{warmup}", f"Warm-up of {warmup} steps, 4.9M parameters", "V1 V2 V4 V7", RUNGS[4],
          range(300, 312), warmup=warmup)
    for warmup in (0, 10, 50, 200)
)  # fmt: skip


def practice(name: str, title: str, **workload: Any) -> Study:
    """Return a study of what practitioners meet, at V1's best rung and with 4 times that learning rate."""
    compared = []
    for key in ("V1", "V3", "V4", "V8", "V12"):
        one = variants((RUNGS[4],))[key]
        four_times = replace(one, name=f"{one.name}, 4 times the lr", lrs=(4 * one.lrs[0],))
        compared += [one, four_times if key == "V1" else replace(four_times, versus="AdamW, 4 times the lr")]
    return Study(
        name, title, {**FIRST_STAGE.workload, "warmup": 50, "batch": 16, "steps": 600, **workload},
        tuple(compared), baseline="AdamW", seeds=tuple(range(400, 406)), outcome="validation",
        label=FIRST_STAGE.label, test_label="test loss", higher=False, margin=0.01, digits=4, controls=False,
    )  # fmt: skip


NEWSGROUPS = {"second": "20newsgroups"}
PRACTICE = (
    practice("plain", "As in the first stage"),
    practice("cold", "No warm-up", warmup=0),
    practice("outliers", "1 % of the batches are random bytes", outliers=0.01),
    practice("switch", "Another corpus from the middle on", **NEWSGROUPS, second_steps=300),
    practice("fine-tuning", "100 steps on another corpus at a tenth of the lr", **NEWSGROUPS, steps=700,
             second_steps=100, second_lr=0.1),
    practice("batch-8", "8 sequences per step", batch=8),
    practice("batch-512", "512 sequences per step, 100 steps", batch=512, steps=100, warmup=10),
)  # fmt: skip

# Exploratory, on CPU cores: a run takes half a minute of a core. In a pilot of AdamW, seed 900, the loss is
# lowest at 0.002 and 0.004.
SMALL: dict[str, Any] = {
    "size": "0.9M", "steps": 300, "epochs": 10, "batch": 16, "context": 64, "warmup": 25,
}  # fmt: skip
SMALL_RUNGS = rungs(0.0014, 7)
SMALL_LADDER = ladder(
    "ladder-0.9M", "Every learning rate, 0.9M parameters", "V1 V3 V4 V8 V10 V11 V12 V15", SMALL_RUNGS,
    range(500, 504), **SMALL,
)  # fmt: skip
SMALL_STARTS = tuple(
    start(f"warmup-{warmup}-0.9M", f"Warm-up of {warmup} steps, 0.9M parameters", "V1 V2 V3 V4 V7",
          SMALL_RUNGS[2], range(510, 516), **{**SMALL, "warmup": warmup})
    for warmup in (0, 25)
)  # fmt: skip
SMALL_COLD_LADDER = ladder(
    "cold-ladder-0.9M", "Every learning rate without warm-up, 0.9M parameters", "V1 V3 V16",
    rungs(0.0007, 5, 2.0), range(520, 524), **{**SMALL, "warmup": 0},
)  # fmt: skip
