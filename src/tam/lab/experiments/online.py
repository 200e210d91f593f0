"""Online learning under label flips (the paper's section 4.3): does momentum help where tasks change?

The paper shows curves without figures. It says that TAM is like SGDM at 40%, and that it is better than SGDM
and SGD at 80% and 100% with 2 hidden layers; with 4 that at 80% and 100% TAM is like SGD, both better than
SGDM.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from tam.lab import online, variants
from tam.lab.experiment import Arm, Curve, Experiment, Plan, Study, Together
from tam.lab.outcome import outcomes

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
TAM = Arm("TAM", "tam", tuple(2 * lr for lr in GRID), against=("SGD",))
ARMS = (Arm("SGD", "sgd", GRID), Arm("SGDM", "sgdm", GRID), TAM, *variants.controls(TAM))


def study(depth: int, delta: int, tuning_seeds: tuple[int, ...] = (100, 101), **workload: Any) -> Study:
    best = ", ".join(f"{name} {lrs[DELTAS.index(delta)]}" for name, lrs in BEST[depth].items())
    what = "images given new labels" if workload.get("reading") == "samples" else "classes permuted"
    return Study(
        f"mlp{depth}-{delta}",
        f"{depth} hidden layers, {delta}% of the {what}",
        {"depth": depth, "delta": delta, "epochs": 60, **workload},
        ARMS,
        baseline="SGDM",
        seeds=(0, 1, 2, 3, 4),
        tuning_seeds=tuning_seeds,
        outcome="online",
        label="online accuracy %",
        choices={"the paper says": SAYS[depth, delta], "the paper's best lr": best},
    )


def studies(**settings: Any) -> tuple[Study, ...]:
    return tuple(study(depth, delta, **settings) for depth in BEST for delta in DELTAS)


def plasticity(plan: Plan) -> list[str]:
    """How online accuracy changes from task to task, and what it is in a task's first pass."""
    lines = []
    for outcome in outcomes(plan):
        slopes, first = (list(outcome.values(key).values()) for key in ("slope", "first"))
        if slopes:
            told = f"{mean(slopes):+.3f} points a task (from {min(slopes):+.3f} to {max(slopes):+.3f})"
            lines.append(
                f"{outcome.arm.name}: slope {told}, first pass {mean(first):.2f}% (n = {len(first)})."
            )
    return lines


FRESH = 200  # the first seed that no stored trial has: those have 0 to 4, 100 and 101
REGISTERED = {
    "lr": "fixed beforehand, no search: TAM's is twice SGDM's, an equal effective lr.",
    "tasks": "40 of 40 passes, as in the pilots; the paper has 60.",
}


def registered(controls: bool = False) -> tuple[Study, ...]:
    """Return the studies of docs/registered.md; `controls`: with another seed's damping, too."""
    found = [
        *(_claim(13, 2, delta, n, margin) for delta, n, margin in ((80, 20, 0.7), (100, 40, 1.1))),
        *(_claim(14, 4, delta, 10, 0.2) for delta in (80, 100)),
        *(_past_the_edge(delta, margin) for delta, margin in ((40, 3.4), (100, 5.2))),
    ]
    if not controls:
        return tuple(found)
    return tuple(
        replace(
            one,
            arms=(*one.arms, *(variants.another_seeds_damping(a) for a in one.arms if a.optimizer == "tam")),
        )
        for one in found
    )


def _registered_study(
    name: str, depth: int, delta: int, arms: tuple[Arm, ...], n: int, margin: float
) -> Study:
    """Return a study of 40 tasks with n fresh seeds."""
    plain = study(depth, delta, epochs=40)
    seeds, choices = tuple(range(FRESH, FRESH + n)), {**plain.choices, **REGISTERED}
    return replace(
        plain, name=name, arms=arms, baseline=arms[0].name, seeds=seeds, tuning_seeds=(), margin=margin,
        choices=choices,
    )  # fmt: skip


def _claim(number: int, depth: int, delta: int, n: int, margin: float) -> Study:
    """Return TAM and SGDM at the lrs of the pilots, an equal effective lr, and SGD."""
    sgd = [Arm(f"SGD at {lr}", "sgd", (lr,)) for lr in ((0.03, 0.05) if depth == 2 else (0.05,))]
    tam = Arm("TAM", "tam", (0.01,), against=tuple(one.name for one in sgd))
    arms = (Arm("SGDM", "sgdm", (0.005,)), *sgd, tam)
    return _registered_study(f"claim{number}-{delta}", depth, delta, arms, n, margin)


def _past_the_edge(delta: int, margin: float) -> Study:
    """Return TAM and SGDM at lrs that are too large for SGDM."""
    lrs = (0.01, 0.02)
    sgdm = [Arm(f"SGDM at {lr}", "sgdm", (lr,), versus="") for lr in lrs]
    tam = [Arm(f"TAM at {2 * lr}", "tam", (2 * lr,), versus=f"SGDM at {lr}") for lr in lrs]
    return _registered_study(f"edge-{delta}", 4, delta, (*sgdm, *tam), 15, margin)


def smoke() -> tuple[Study, ...]:
    small: dict[str, Any] = {"epochs": 2, "passes": 2, "batch": 64, "width": 16, "data": "digits"}
    arms = tuple(replace(arm, lrs=arm.lrs[-2:]) for arm in ARMS)
    choices = {
        "network": "192 inputs, hidden layers of 16.",
        "batch size": "64",
        "split": "1,137 images of digits.",
    }
    return tuple(
        replace(
            study(2, delta, (100,), held_out=300, **small),
            arms=arms,
            seeds=(0, 1),
            choices=choices,
            small=True,
        )
        for delta in (40, 100)
    )


EXPERIMENT = Experiment(
    "online",
    "Online learning under label flips (the paper's section 4.3)",
    online.run_together,
    online.config_of,
    {
        "paper": studies(),
        "tasks40": studies(tuning_seeds=(100,), epochs=40),
        "samples": studies(tuning_seeds=(100,), epochs=5, reading="samples"),
        "fair": tuple(variants.fair(one, middle=0.01) for one in studies()),
        "registered": registered(),
        "registered-controls": registered(controls=True),
        "quick": studies(tuning_seeds=(100,), epochs=5),
        "smoke": smoke(),
    },
    CHOICES,
    (
        Curve("online", "Online accuracy", "accuracy (%)", by="task"),
        Curve("first", "Online accuracy, first pass", "accuracy (%)", by="task"),
        Curve("alignment", "Alignment s", "s, task mean", by="task"),
    ),
    check=online.check,
    says=plasticity,
    together=Together(online.run_together, online.kind_of),
)
