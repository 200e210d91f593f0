"""Online learning under label flips (the paper's section 4.3): does momentum help where tasks change?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from tam.lab.core import controls, presets
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, ReportExtras
from tam.lab.core.study import Curve, Metric, Population, Study, Table, Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.online import population, trial

NOTES = read_toml(Path(__file__).with_name("notes.toml"))
DELTAS = (40, 80, 100)
GRID = (0.005, 0.01, 0.02, 0.03)
TAM = Variant("TAM", "tam", tuple(2 * lr for lr in GRID), against=("SGD",))
VARIANTS = (Variant("SGD", "sgd", GRID), Variant("SGDM", "sgdm", GRID), TAM, *controls.controls(TAM))


def study(depth: int, delta: int, former_tuning_seeds: int = 1, **workload: Any) -> Study:
    name = f"mlp{depth}-{delta}"
    what = "images given new labels" if workload.get("reading") == "samples" else "classes permuted"
    return Study(
        name,
        f"{depth} hidden layers, {delta}% of the {what}",
        {"depth": depth, "delta": delta, "epochs": 60, **workload},
        VARIANTS, baseline="SGDM", seeds=(0, 1, 2, 3, 4), tuning_seeds=presets.TUNING_SEEDS,
        former_tuning_seeds=former_tuning_seeds, outcome="online", label="online accuracy %",
        choices=NOTES["paper"][name],
    )  # fmt: skip


def studies(**settings: Any) -> tuple[Study, ...]:
    return tuple(study(depth, delta, **settings) for depth in (2, 4) for delta in DELTAS)


def plasticity_tables(plan: Plan) -> list[Table]:
    """Return how online accuracy changes from task to task, and what it is in a task's first pass."""
    rows = []
    for outcome in plan.outcomes():
        slopes, first = (list(outcome.values(key).values()) for key in ("slope", "first"))
        if slopes:
            values = [f"{value:+.3f}" for value in (mean(slopes), min(slopes), max(slopes))]
            rows.append([outcome.variant.name, *values, f"{mean(first):.2f}", str(len(first))])
    header = ["variant", "slope (points per task)", "lowest", "highest", "first pass %", "n"]
    return [Table(header, rows)] if rows else []


def _registered_study(
    name: str, depth: int, delta: int, variants: tuple[Variant, ...], n: int, margin: float
) -> Study:
    """Return a study of 40 tasks with n fresh seeds."""
    pilot = study(depth, delta, epochs=40)
    return replace(
        pilot, name=name, variants=variants, baseline=variants[0].name, margin=margin, tuning_seeds=(),
        seeds=tuple(range(200, 200 + n)),  # stored trials have 0 to 4, 100 and 101
        choices={**pilot.choices, **NOTES["registered"]},
    )  # fmt: skip


def _at_pilots_lrs(*sgd_lrs: float) -> tuple[Variant, ...]:
    """Return TAM and SGDM at the lrs of the pilots, an equal effective lr, and SGD."""
    sgd = [Variant(f"SGD at {lr}", "sgd", (lr,)) for lr in sgd_lrs]
    tam = Variant("TAM", "tam", (0.01,), against=tuple(one.name for one in sgd))
    return Variant("SGDM", "sgdm", (0.005,)), *sgd, tam


PAST_THE_EDGE = (  # lrs that are too large for SGDM
    *(Variant(f"SGDM at {lr}", "sgdm", (lr,), versus="") for lr in (0.01, 0.02)),
    *(Variant(f"TAM at {2 * lr}", "tam", (2 * lr,), versus=f"SGDM at {lr}") for lr in (0.01, 0.02)),
)
REGISTERED = (  # the studies of registered.md
    _registered_study("claim13-80", 2, 80, _at_pilots_lrs(0.03, 0.05), n=20, margin=0.7),
    _registered_study("claim13-100", 2, 100, _at_pilots_lrs(0.03, 0.05), n=40, margin=1.1),
    _registered_study("claim14-80", 4, 80, _at_pilots_lrs(0.05), n=10, margin=0.2),
    _registered_study("claim14-100", 4, 100, _at_pilots_lrs(0.05), n=10, margin=0.2),
    _registered_study("edge-40", 4, 40, PAST_THE_EDGE, n=15, margin=3.4),
    _registered_study("edge-100", 4, 100, PAST_THE_EDGE, n=15, margin=5.2),
)


def _with_controls(whole: Study) -> Study:
    """Return a registered study with another seed's damping for TAM."""
    added = [controls.another_seeds_damping(one) for one in whole.variants if one.optimizer == "tam"]
    return replace(whole, variants=(*whole.variants, *added))


def smoke() -> tuple[Study, ...]:
    workload: dict[str, Any] = {"epochs": 2, "passes": 2, "batch": 64, "width": 16}
    workload |= {"data": "digits", "held_out": 300}
    variants = tuple(replace(variant, lrs=variant.lrs[-2:]) for variant in VARIANTS)
    small: dict[str, Any] = {
        "seeds": (0, 1),
        "tuning_seeds": (100,),
        "choices": NOTES["smoke"],
        "small": True,
    }
    studies = [study(2, delta, **workload) for delta in (40, 100)]
    return tuple(replace(one, variants=variants, **small) for one in studies)


EXPERIMENT = Experiment(
    name="online",
    title="Online learning under label flips (the paper's section 4.3)",
    config=population.Config, run=trial.run_together,
    presets={
        "paper": studies(former_tuning_seeds=2),
        "tasks40": studies(epochs=40),
        "samples": studies(epochs=5, reading="samples"),
        "fair": tuple(presets.fair(one, middle=0.01) for one in studies()),
        "registered": REGISTERED, "registered-controls": tuple(map(_with_controls, REGISTERED)),
        "quick": studies(epochs=5),
        "smoke": smoke(),
    },
    choices=NOTES["choices"],
    curves=tuple(Curve(**curve) for curve in NOTES["curves"]),
    metrics=(Metric("online", ".2f", higher_is_better=True), Metric("alignment", "+.3f")),
    data_fields=("data",), claims=(12, 13, 14),
    population=Population(trial.run_together, trial.kind_of), extras=ReportExtras(tables=plasticity_tables),
)  # fmt: skip
