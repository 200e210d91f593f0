"""When does torque help? Pretraining a byte-level GPT, at learning rates up to where training fails.

The questions H1 to H8 and the rules that answer them are in registered.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tam.lab.core.registry import Experiment
from tam.lab.core.study import Curve, Ladder, Metric, Population, rungs
from tam.lab.core.toml import read_toml
from tam.lab.experiments.pretrain import trial
from tam.lab.experiments.pretrain.hypotheses import judge_hypotheses
from tam.lab.experiments.pretrain.registered import (
    FIRST_STAGE,
    LARGER,
    PRACTICE,
    SMALL_COLD_LADDER,
    SMALL_LADDER,
    SMALL_STARTS,
    STARTS,
    best_loss,
    failures,
    ladder,
)

NOTES = read_toml(Path(__file__).with_name("notes.toml"))


def smoke() -> Ladder:
    """Return a ladder of tiny networks on generated text."""
    small = {
        "size": "tiny",
        "data": "generated",
        "context": 32,
        "batch": 8,
        "steps": 40,
        "epochs": 4,
        "warmup": 5,
    }
    keys = "V1 V1n V4 V5 V6 V7 V9 V9c V10 V11 V12 V13"
    study = ladder("smoke", "Tiny networks", keys, rungs(0.002, 5, 2.0), range(2), **small)
    return replace(study, small=True, choices=NOTES["smoke"])


EXPERIMENT = Experiment(
    name="pretrain",
    title="Pretraining a byte-level GPT (beyond the paper)",
    config=trial.Config, run=trial.run_together,
    presets={
        "registered": (FIRST_STAGE, best_loss(), failures(), LARGER, *STARTS, *PRACTICE),
        "quick": (ladder("quick", "Two variants, 4.9M parameters", "V1 V4", rungs(0.0005, 5, 2.0), range(2),
                         size="4.9M"),),
        "cpu": (*SMALL_STARTS, SMALL_LADDER, SMALL_COLD_LADDER),
        "smoke": (smoke(),),
    },
    choices=NOTES["choices"],
    curves=tuple(Curve(**curve) for curve in NOTES["curves"]),
    metrics=(Metric("loss", ".3f", higher_is_better=False), Metric("alignment", "+.3f")),
    data_fields=("data", "second"), check=trial.check, missing=trial.missing, one_per_process=True,
    cpu_presets=("cpu", "smoke"), hypotheses=judge_hypotheses,
    population=Population(trial.run_together, trial.kind_of, trial.most_together),
)  # fmt: skip
