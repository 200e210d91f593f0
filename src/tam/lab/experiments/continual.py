"""Continual learning (the paper's appendix): CLEAR with ResNet50, and a small stream that drifts."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from tam.lab import continual, variants
from tam.lab.charts import Series, line_chart
from tam.lab.experiment import Arm, Curve, Experiment, Plan, Study, Table
from tam.lab.outcome import Outcome, outcomes, twins

CHOICES = {
    "outcome": "the mean accuracy on all experiences after the last one; lrs are chosen by images held out "
    "of training, a fifth of each experience, with another seed.",
    "lr": "the paper's grid, 0.005, 0.1 and 0.2; both of its winners lie at the lower edge, so that SGDM "
    "has 0.0025 and 0.001, too. At equal lr TAM's steps are half of SGDM's: beside it runs TAM at twice all "
    "of SGDM's lrs.",
    "optimizer": "one for the whole stream, its momentum kept from experience to experience, a fixed lr, "
    "weight decay 1e-4: the paper does not say.",
    "passes": "5 through each experience in batches of 64, with crops and flips: the paper does not say.",
    "first weights": "random, unless --checkpoint gives others; the paper does not say, but 90% after some "
    "thousand images is not learned from random ones.",
    "images": "of CLEAR the middle of each, 224 x 224; of the drifting stream whole.",
    "forgetting": "the best accuracy an experience has had since it was learned less that after the last, "
    "the mean of all but the last; negative where accuracy grew.",
    "test images": "are read after every experience, for the accuracies; nothing is chosen by them.",
    "LwF": "strength 1, temperature 2: the paper does not say.",
    "pixels": "normalised by the moments of the first experience.",
    "precision": "bfloat16 autocast on GPUs, float32 on CPUs; parameters and state are float32.",
}
# The paper's table: accuracy on each of CLEAR's experiences after the last.
PAPER = {
    ("SGDM", "naive"): (89.1, 90.1, 89.8, 89.4, 92.0, 90.7, 90.4, 91.2, 89.9, 93.7),
    ("TAM", "naive"): (90.9, 90.5, 92.5, 92.2, 93.6, 92.7, 92.4, 92.9, 93.4, 95.9),
    ("SGDM", "lwf"): (93.2, 93.3, 93.7, 93.8, 94.0, 92.3, 93.4, 94.5, 93.3, 96.1),
    ("TAM", "lwf"): (95.3, 94.6, 94.6, 94.5, 97.1, 94.4, 94.8, 95.3, 94.5, 96.3),
}
DECAY: dict[str, Any] = {"weight_decay": 1e-4}
GRID = (0.005, 0.1, 0.2)
LOWER, TWICE = "SGDM, lower lrs too", "TAM, twice SGDM's lrs"
TITLES = {"naive": "Naive", "lwf": "Learning without Forgetting"}


def study(stream: str, model: str, method: str, **workload: Any) -> Study:
    on_clear = stream == "clear"
    lower = Arm(LOWER, "sgdm", (0.001, 0.0025, *GRID), DECAY)
    tam = Arm("TAM", "tam", GRID, DECAY, against=(LOWER,))
    # Between 0.005 and 0.1 the grid has no lr: TAM cannot have the steps of SGDM's best.
    twice = Arm(TWICE, "tam", tuple(2 * lr for lr in lower.lrs), DECAY, against=(LOWER,))
    where = "CLEAR-10" if on_clear else f"a stream of {stream} that drifts (not CLEAR)"
    return Study(
        f"{stream}-{method}",
        f"{TITLES[method]} on {where}",
        {"stream": stream, "model": model, "method": method, "epochs": 10, **workload},
        (Arm("SGDM", "sgdm", GRID, DECAY), lower, tam, twice, *variants.controls(tam)),
        baseline="SGDM",
        seeds=(0, 1, 2),
        tuning_seeds=(100,),
        paper={name: (round(mean(row), 2), None) for (name, how), row in PAPER.items() if how == method}
        if on_clear
        else {},
        outcome="average",
        label="average accuracy %",
        choices={"the paper says": SAYS, **({} if on_clear else {"stream": DRIFT})},
    )


SAYS = "on CLEAR TAM is better than SGDM on every experience, naively and with LwF, both at lr 0.005."
DRIFT = (
    "ten experiences of 4,000 images of CIFAR-10 to train on, 1,000 to validate and 1,000 to test on, which "
    "drift: the colour plane turns by up to 120 degrees, contrast falls to a half and comes back, "
    "saturation falls to a third, noise of up to 20 of 255 is added (lab/data/streams.py). It is no "
    "substitute for CLEAR's years."
)


def matrices(plan: Plan) -> dict[str, list[list[float]]]:
    """Of each arm the accuracies, experience trained x experience evaluated, the mean over its seeds."""
    found, again = {}, twins(plan)
    for outcome in (one for one in outcomes(plan) if one.arm.name not in again):
        ours = [result["matrix"] for result in _whole(outcome)]
        if ours:
            size = range(len(ours[0]))
            found[outcome.arm.name] = [[mean(matrix[i][j] for matrix in ours) for j in size] for i in size]
    return found


def _whole(outcome: Outcome) -> list[dict[str, Any]]:
    """The results of runs that came to the last experience."""
    results = (folder.result for folder in outcome.folders.values())
    return [result for result in results if result is not None and not result["diverged"]]


def tables(plan: Plan) -> list[Table]:
    """The accuracy matrices."""
    return [
        (
            [f"{name}: after", *(f"on {j + 1}" for j in range(len(matrix)))],
            [[str(i + 1), *(f"{x:.1f}" for x in row)] for i, row in enumerate(matrix)],
        )
        for name, matrix in matrices(plan).items()
    ]


def figures(plan: Plan) -> list[str]:
    """What is known in the end, the paper's beside ours."""
    last = {name: matrix[-1] for name, matrix in matrices(plan).items()}
    if plan.study.paper:
        method = str(plan.study.workload["method"])
        last |= {f"{name}, the paper's": list(row) for (name, how), row in PAPER.items() if how == method}
    lines = [Series(name, [j + 1.0 for j in range(len(row))], row) for name, row in last.items()]
    title = "Accuracy after the last experience"
    return [line_chart(lines, title, "experience", "accuracy (%)")] if lines else []


def forgotten(plan: Plan) -> list[str]:
    """How much of what was known is lost, by arm, and what is known in the end."""
    lines = []
    for outcome in outcomes(plan):
        whole = _whole(outcome)
        if whole:
            last = [result["matrix"][-1] for result in whole]
            known = ", ".join(f"{mean(column):.1f}" for column in zip(*last, strict=True))
            lost = f"forgetting {mean(one['forgetting'] for one in whole):.2f} points (n = {len(whole)})"
            lines.append(f"{outcome.arm.name}: {lost}; after the last experience {known}.")
    return lines


def smoke(method: str) -> Study:
    made = study("digits", "tiny", method, epochs=3, passes=1, batch=32)
    arms = tuple(replace(arm, lrs=arm.lrs[1:2]) for arm in made.arms)
    choices = {"stream": "three experiences of digits: they show that everything runs, and mean nothing."}
    return replace(made, arms=arms, seeds=(0, 1), tuning_seeds=(), choices=choices, small=True)


METHODS = tuple(TITLES)
CLEAR = tuple(study("clear", "resnet50", method, checkpoint=None) for method in METHODS)
SMALL = tuple(study("cifar10", "resnet18", method) for method in METHODS)

EXPERIMENT = Experiment(
    "continual",
    "Continual learning (the paper's appendix)",
    continual.run,
    continual.config_of,
    {
        "paper": CLEAR,
        "drift": SMALL,
        "fair": tuple(
            variants.fair(variants.without(one, LOWER, TWICE), middle=0.01) for one in (*CLEAR, *SMALL)
        ),
        "quick": tuple(replace(one, seeds=(0,)) for one in SMALL),
        "smoke": tuple(map(smoke, METHODS)),
    },
    CHOICES,
    (
        Curve("average", "Mean accuracy on the experiences so far", "accuracy (%)", by="experience"),
        Curve("loss", "Training loss", "loss", log=True, by="experience"),
        Curve("alignment", "Alignment s", "s", by="experience"),
    ),
    figures,
    continual.check,
    says=forgotten,
    tables=tables,
)
