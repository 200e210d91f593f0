"""Continual learning (the paper's appendix): CLEAR with ResNet50, and a small stream that drifts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from tam.lab.core import controls, presets
from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.registry import Experiment, ReportExtras
from tam.lab.core.study import Curve, Metric, Study, Table, Variant
from tam.lab.experiments.continual import trial
from tam.lab.report.charts import Series, line_chart
from tam.lab.training.factory import CHECKPOINT_OPTION

CHOICES = {
    "outcome": "the mean accuracy on all experiences after the last one. Lrs are chosen with another seed, "
    "on a fifth of each experience that is held out of training.",
    "lr": "the paper's grid, 0.005, 0.1 and 0.2. Both of its winners are at the lower edge, so SGDM also has "
    "0.0025 and 0.001. At equal lr TAM's steps are half of SGDM's, so one TAM has twice all of SGDM's lrs.",
    "optimizer": "one for the whole stream, with its momentum kept between experiences, a fixed lr, weight "
    "decay 1e-4: the paper does not say.",
    "passes": "5 through each experience in batches of 64, with crops and flips: the paper does not say.",
    "first weights": "random, unless --checkpoint gives others. The paper does not say, but random ones do "
    "not reach 90% after some thousand images.",
    "images": "of CLEAR the middle of each, 224 x 224; of the drifting stream the whole image.",
    "forgetting": "the best accuracy on an experience since it was learned, minus that after the last; the "
    "mean of all but the last. Negative if accuracy grew.",
    "test images": "are read after every experience, for the accuracies. Nothing is chosen by them.",
    "LwF": "strength 1, temperature 2: the paper does not say.",
    "pixels": "normalized by the moments of the first experience.",
    "precision": "bfloat16 autocast on GPUs, float32 on CPUs. Parameters and optimizer state are float32.",
}
PAPER_SAYS = "on CLEAR TAM is better than SGDM on every experience, naively and with LwF, both at lr 0.005."
DRIFT = (
    "ten experiences of CIFAR-10, each with 4,000 images for training, 1,000 for validation and 1,000 for "
    "the test. They drift: the colour plane turns by up to 120 degrees, contrast falls to a half and comes "
    "back, saturation falls to a third, noise of up to 20 of 255 is added (lab/data/streams.py). It is no "
    "substitute for CLEAR's years."
)
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
METHODS = {"naive": "Naive", "lwf": "Learning without Forgetting"}


def study(stream: str, model: str, method: str, **workload: Any) -> Study:
    """Return the comparison on one stream with one method."""
    on_clear = stream == "clear"
    lower = Variant(LOWER, "sgdm", (0.001, 0.0025, *GRID), DECAY)
    tam = Variant("TAM", "tam", GRID, DECAY, against=(LOWER,))
    # Between 0.005 and 0.1 the grid has no lr: TAM cannot have the steps of SGDM's best.
    twice = Variant(TWICE, "tam", tuple(2 * lr for lr in lower.lrs), DECAY, against=(LOWER,))
    paper = {name: (round(mean(row), 2), None) for name, row in paper_rows(method).items()}
    where = "CLEAR-10" if on_clear else f"a stream of {stream} that drifts (not CLEAR)"
    workload = {"stream": stream, "model": model, "method": method, "epochs": 10, **workload}
    variants = (Variant("SGDM", "sgdm", GRID, DECAY), lower, tam, twice, *controls.controls(tam))
    return Study(
        f"{stream}-{method}", f"{METHODS[method]} on {where}", workload, variants, baseline="SGDM",
        seeds=(0, 1, 2), tuning_seeds=(100,), outcome="average", label="average accuracy %",
        paper=paper if on_clear else {},
        choices={"the paper says": PAPER_SAYS, **({} if on_clear else {"stream": DRIFT})},
    )  # fmt: skip


def paper_rows(method: str) -> dict[str, tuple[float, ...]]:
    """Return the paper's accuracies with a method, by optimizer."""
    return {name: row for (name, row_method), row in PAPER.items() if row_method == method}


def smoke(method: str) -> Study:
    """Return three experiences of digits, each variant at one lr."""
    small_study = study("digits", "tiny", method, epochs=3, passes=1, batch=32)
    variants = tuple(replace(variant, lrs=variant.lrs[1:2]) for variant in small_study.variants)
    choices = {"stream": "three experiences of digits. They show that everything runs, and mean nothing."}
    return replace(small_study, variants=variants, seeds=(0, 1), tuning_seeds=(), choices=choices, small=True)


# ---------------------------------------------------------------------- the report


def complete_results(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the results of runs that reached the last experience."""
    results = (record.result for record in outcome.records.values())
    return [result for result in results if not result["diverged"]]


def mean_matrices(plan: Plan) -> dict[str, list[list[float]]]:
    """Return each variant's mean accuracies over its seeds, experience trained x experience evaluated."""
    matrices, duplicates = {}, plan.duplicates()
    for outcome in plan.outcomes():
        by_seed = [result["matrix"] for result in complete_results(outcome)]
        if by_seed and outcome.variant.name not in duplicates:
            matrices[outcome.variant.name] = [
                [mean(cells) for cells in zip(*rows, strict=True)] for rows in zip(*by_seed, strict=True)
            ]
    return matrices


def accuracy_tables(plan: Plan) -> list[Table]:
    """Return the accuracy matrices as tables."""
    tables = []
    for name, matrix in mean_matrices(plan).items():
        header = [f"{name}: after", *(f"on {j + 1}" for j in range(len(matrix)))]
        tables.append((header, [[str(i + 1), *(f"{x:.1f}" for x in row)] for i, row in enumerate(matrix)]))
    return tables


def final_accuracy_chart(plan: Plan, styles: Mapping[str, int]) -> list[str]:
    """Return a chart of the accuracies after the last experience, with the paper's."""
    final = {name: matrix[-1] for name, matrix in mean_matrices(plan).items()}
    if plan.study.paper:
        paper = paper_rows(str(plan.study.workload["method"]))
        final |= {f"{name}, the paper's": list(row) for name, row in paper.items()}
    series = [
        Series(name, [j + 1.0 for j in range(len(row))], row, style=styles.get(name))
        for name, row in final.items()
    ]
    title = "Accuracy after the last experience"
    return [line_chart(series, title, "experience", "accuracy (%)")] if series else []


def forgetting_lines(plan: Plan) -> list[str]:
    """Return each variant's forgetting, and its accuracies after the last experience."""
    lines = []
    for outcome in plan.outcomes():
        results = complete_results(outcome)
        if results:
            final = zip(*(result["matrix"][-1] for result in results), strict=True)
            accuracies = ", ".join(f"{mean(column):.1f}" for column in final)
            forgetting = mean(result["forgetting"] for result in results)
            text = f"forgetting {forgetting:.2f} points (n = {len(results)}); after the last experience"
            lines.append(f"{outcome.variant.name}: {text} {accuracies}.")
    return lines


CLEAR = tuple(study("clear", "resnet50", method, checkpoint=None) for method in METHODS)
DRIFTING = tuple(study("cifar10", "resnet18", method) for method in METHODS)
WITHOUT_LOWER = [presets.without(one, LOWER, TWICE) for one in (*CLEAR, *DRIFTING)]

EXPERIMENT = Experiment(
    name="continual", title="Continual learning (the paper's appendix)", run=trial.run, config=trial.Config,
    check=trial.check, choices=CHOICES, options=(CHECKPOINT_OPTION,), claims=(21,),
    presets={
        "paper": CLEAR,
        "drift": DRIFTING,
        "fair": tuple(presets.fair(one, middle=0.01) for one in WITHOUT_LOWER),
        "quick": tuple(replace(one, seeds=(0,)) for one in DRIFTING),
        "smoke": tuple(map(smoke, METHODS)),
    },
    curves=(
        Curve("average", "Mean accuracy on the experiences so far", "accuracy (%)", by="experience"),
        Curve("loss", "Training loss", "loss", log=True, by="experience"),
        Curve("alignment", "Alignment s", "s", by="experience"),
    ),
    metrics=(Metric("loss", ".3f", False), Metric("average", ".2f", True), Metric("alignment", "+.3f")),
    extras=ReportExtras(figures=final_accuracy_chart, lines=forgetting_lines, tables=accuracy_tables),
)  # fmt: skip
