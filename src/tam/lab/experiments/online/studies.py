"""Online learning under label flips (the paper's section 4.3): does momentum help where tasks change?

The paper shows curves without figures. It says that TAM is like SGDM at 40%, and that it is better than SGDM
and SGD at 80% and 100% with 2 hidden layers; with 4 that at 80% and 100% TAM is like SGD, both better than
SGDM.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from tam.lab.core import controls, presets
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, ReportExtras
from tam.lab.core.study import Curve, Metric, Population, Study, Variant
from tam.lab.experiments.online import population, trial

CHOICES = {
    "what is flipped": "at each new task a fraction delta of the classes, drawn anew, have their "
    "labels permuted among themselves, in a ring of random order: none keeps its own; in the preset "
    "`samples` a fraction delta of the images get new random labels. The paper does not say which.",
    "metric": "online accuracy: each batch is predicted before it is learned; the mean over all "
    "batches of all tasks, as the paper has it.",
    "batch size": "128: the paper does not say.",
    "network": "3072 inputs, hidden layers of 128 with ReLU, torch's initial weights, no weight "
    "decay. 2 hidden layers have 411,146 parameters; 4 have 444,170, where the paper's 460K would fit 5.",
    "between tasks": "network and momentum are kept: the paper's hypothesis is about the latter.",
    "slope": "of the straight line through a run's online accuracies, in points a task; from the least to "
    "the greatest of the seeds.",
    "tasks": "60 of 40 passes, as in the paper; 40 in the preset tasks40, 5 in samples and quick.",
    "split": "40,000 images, drawn for each seed; the others are not used.",
    "precision": "float32, on GPUs with TF32 in matrix products.",
}
# What the paper found best, by depth, for 40, 80 and 100%.
BEST = {
    2: {"SGD": (0.03, 0.03, 0.03), "SGDM": (0.02, 0.01, 0.01), "TAM": (0.04, 0.02, 0.04)},
    4: {"SGD": (0.03, 0.03, 0.03), "SGDM": (0.005, 0.005, 0.005), "TAM": (0.01, 0.01, 0.02)},
}
SAYS = {
    (2, 40): "TAM is like SGDM, both better than SGD.", (2, 80): "TAM is better than SGDM and SGD.",
    (2, 100): "TAM is better than SGDM and SGD.", (4, 40): "TAM is like SGDM.",
    (4, 80): "TAM is like SGD, both better than SGDM.", (4, 100): "TAM is like SGD, both better than SGDM.",
}  # fmt: skip
DELTAS = (40, 80, 100)
GRID = (0.005, 0.01, 0.02, 0.03)
TAM = Variant("TAM", "tam", tuple(2 * lr for lr in GRID), against=("SGD",))
VARIANTS = (Variant("SGD", "sgd", GRID), Variant("SGDM", "sgdm", GRID), TAM, *controls.controls(TAM))


def study(depth: int, delta: int, tuning_seeds: tuple[int, ...] = (100, 101), **workload: Any) -> Study:
    best = ", ".join(f"{name} {lrs[DELTAS.index(delta)]}" for name, lrs in BEST[depth].items())
    what = "images given new labels" if workload.get("reading") == "samples" else "classes permuted"
    return Study(
        f"mlp{depth}-{delta}",
        f"{depth} hidden layers, {delta}% of the {what}",
        {"depth": depth, "delta": delta, "epochs": 60, **workload},
        VARIANTS, baseline="SGDM", seeds=(0, 1, 2, 3, 4), tuning_seeds=tuning_seeds, outcome="online",
        label="online accuracy %",
        choices={"the paper says": SAYS[depth, delta], "the paper's best lr": best},
    )  # fmt: skip


def studies(**settings: Any) -> tuple[Study, ...]:
    return tuple(study(depth, delta, **settings) for depth in BEST for delta in DELTAS)


def plasticity_lines(plan: Plan) -> list[str]:
    """Return how online accuracy changes from task to task, and what it is in a task's first pass."""
    lines = []
    for outcome in plan.outcomes():
        slopes, first = (list(outcome.values(key).values()) for key in ("slope", "first"))
        if slopes:
            lines.append(
                f"{outcome.variant.name}: slope {mean(slopes):+.3f} points per task (from {min(slopes):+.3f} "
                f"to {max(slopes):+.3f}), first pass {mean(first):.2f}% (n = {len(first)})."
            )
    return lines


FRESH = 200  # the first seed that no stored trial has: those have 0 to 4, 100 and 101
REGISTERED = {
    "lr": "fixed beforehand, no search: TAM's is twice SGDM's, an equal effective lr.",
    "tasks": "40 of 40 passes, as in the pilots; the paper has 60.",
}


def registered(with_controls: bool = False) -> tuple[Study, ...]:
    """Return the studies of docs/registered.md. `with_controls` adds another seed's damping."""
    studies = [
        *(_claim(13, 2, delta, n, margin) for delta, n, margin in ((80, 20, 0.7), (100, 40, 1.1))),
        *(_claim(14, 4, delta, 10, 0.2) for delta in (80, 100)),
        *(_past_the_edge(delta, margin) for delta, margin in ((40, 3.4), (100, 5.2))),
    ]
    return tuple(map(_with_controls, studies)) if with_controls else tuple(studies)


def _with_controls(whole: Study) -> Study:
    added = [controls.another_seeds_damping(one) for one in whole.variants if one.optimizer == "tam"]
    return replace(whole, variants=(*whole.variants, *added))


def _registered_study(
    name: str, depth: int, delta: int, variants: tuple[Variant, ...], n: int, margin: float
) -> Study:
    """Return a study of 40 tasks with n fresh seeds."""
    pilot = study(depth, delta, epochs=40)
    return replace(
        pilot, name=name, variants=variants, baseline=variants[0].name, margin=margin, tuning_seeds=(),
        seeds=tuple(range(FRESH, FRESH + n)), choices={**pilot.choices, **REGISTERED},
    )  # fmt: skip


def _claim(number: int, depth: int, delta: int, n: int, margin: float) -> Study:
    """Return TAM and SGDM at the lrs of the pilots, an equal effective lr, and SGD."""
    sgd = [Variant(f"SGD at {lr}", "sgd", (lr,)) for lr in ((0.03, 0.05) if depth == 2 else (0.05,))]
    tam = Variant("TAM", "tam", (0.01,), against=tuple(one.name for one in sgd))
    variants = (Variant("SGDM", "sgdm", (0.005,)), *sgd, tam)
    return _registered_study(f"claim{number}-{delta}", depth, delta, variants, n, margin)


def _past_the_edge(delta: int, margin: float) -> Study:
    """Return TAM and SGDM at lrs that are too large for SGDM."""
    lrs = (0.01, 0.02)
    sgdm = [Variant(f"SGDM at {lr}", "sgdm", (lr,), versus="") for lr in lrs]
    tam = [Variant(f"TAM at {2 * lr}", "tam", (2 * lr,), versus=f"SGDM at {lr}") for lr in lrs]
    return _registered_study(f"edge-{delta}", 4, delta, (*sgdm, *tam), 15, margin)


def smoke() -> tuple[Study, ...]:
    workload = {"epochs": 2, "passes": 2, "batch": 64, "width": 16, "data": "digits", "held_out": 300}
    variants = tuple(replace(variant, lrs=variant.lrs[-2:]) for variant in VARIANTS)
    choices = {
        "network": "192 inputs, hidden layers of 16.", "batch size": "64", "split": "1,137 images of digits.",
    }  # fmt: skip
    studies = [study(2, delta, (100,), **workload) for delta in (40, 100)]
    return tuple(
        replace(one, variants=variants, seeds=(0, 1), choices=choices, small=True) for one in studies
    )


EXPERIMENT = Experiment(
    name="online",
    title="Online learning under label flips (the paper's section 4.3)",
    config=population.Config, run=trial.run_together,
    presets={
        "paper": studies(),
        "tasks40": studies(tuning_seeds=(100,), epochs=40),
        "samples": studies(tuning_seeds=(100,), epochs=5, reading="samples"),
        "fair": tuple(presets.fair(one, middle=0.01) for one in studies()),
        "registered": registered(),
        "registered-controls": registered(with_controls=True),
        "quick": studies(tuning_seeds=(100,), epochs=5),
        "smoke": smoke(),
    },
    choices=CHOICES,
    curves=(
        Curve("online", "Online accuracy", "accuracy (%)", by="task"),
        Curve("first", "Online accuracy, first pass", "accuracy (%)", by="task"),
        Curve("alignment", "Alignment s", "s, task mean", by="task"),
    ),
    metrics=(Metric("online", ".2f", higher_is_better=True), Metric("alignment", "+.3f")),
    check=trial.check, claims=(12, 13, 14),
    population=Population(trial.run_together, trial.kind_of), extras=ReportExtras(lines=plasticity_lines),
)  # fmt: skip
