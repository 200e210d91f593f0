"""Continual learning (the paper's appendix): CLEAR with ResNet50, and a small stream that drifts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from tam.lab.core import controls, presets
from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.registry import Experiment, ReportExtras
from tam.lab.core.study import Curve, Metric, Study, Table, Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.continual import trial
from tam.lab.report.charts import Series, line_chart
from tam.lab.training.factory import CHECKPOINT_OPTION

NOTES = read_toml(Path(__file__).with_name("notes.toml"))
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
    paper = {name: (round(mean(row), 2), None) for name, row in NOTES["paper"][method].items()}
    where = "CLEAR-10" if on_clear else f"a stream of {stream} that drifts (not CLEAR)"
    workload = {"stream": stream, "model": model, "method": method, "epochs": 10, **workload}
    variants = (Variant("SGDM", "sgdm", GRID, DECAY), lower, tam, twice, *controls.controls(tam))
    return Study(
        f"{stream}-{method}", f"{METHODS[method]} on {where}", workload, variants, baseline="SGDM",
        seeds=(0, 1, 2), tuning_seeds=presets.TUNING_SEEDS, outcome="average", label="average accuracy %",
        paper=paper if on_clear else {},
        choices={**NOTES["study"], **({} if on_clear else NOTES["drifting"])},
    )  # fmt: skip


def smoke(method: str) -> Study:
    """Return three experiences of digits, each variant at one lr."""
    small_study = study("digits", "tiny", method, epochs=3, passes=1, batch=32)
    variants = tuple(replace(variant, lrs=variant.lrs[1:2]) for variant in small_study.variants)
    return replace(
        small_study, variants=variants, seeds=(0, 1), tuning_seeds=(), choices=NOTES["smoke"], small=True
    )


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
            matrices[outcome.variant.name] = np.mean(by_seed, axis=0).tolist()
    return matrices


def accuracy_tables(plan: Plan) -> list[Table]:
    """Return the forgetting of each variant, and the accuracy matrices."""
    forgetting = []
    for outcome in plan.outcomes():
        if results := complete_results(outcome):
            value = f"{mean(result['forgetting'] for result in results):.2f}"
            forgetting.append([outcome.variant.name, value, str(len(results))])
    tables = [Table(["variant", "forgetting (points)", "n"], forgetting)] if forgetting else []
    for name, matrix in mean_matrices(plan).items():
        header = [f"{name}: after", *(f"on {j + 1}" for j in range(len(matrix)))]
        rows = [[str(i + 1), *(f"{x:.1f}" for x in row)] for i, row in enumerate(matrix)]
        tables.append(Table(header, rows))
    return tables


def final_accuracy_chart(plan: Plan, styles: Mapping[str, int]) -> list[str]:
    """Return a chart of the accuracies after the last experience, with the paper's."""
    final = {name: matrix[-1] for name, matrix in mean_matrices(plan).items()}
    if plan.study.paper:
        paper = NOTES["paper"][plan.study.workload["method"]]
        final |= {f"{name}, the paper's": row for name, row in paper.items()}
    series = [
        Series(name, [j + 1.0 for j in range(len(row))], row, style=styles.get(name))
        for name, row in final.items()
    ]
    title = "Accuracy after the last experience"
    return [line_chart(series, title, "experience", "accuracy (%)")] if series else []


CLEAR = tuple(study("clear", "resnet50", method, checkpoint=None) for method in METHODS)
DRIFTING = tuple(study("cifar10", "resnet18", method) for method in METHODS)
WITHOUT_LOWER = [presets.without(one, LOWER, TWICE) for one in (*CLEAR, *DRIFTING)]

EXPERIMENT = Experiment(
    name="continual", title="Continual learning (the paper's appendix)", run=trial.run, config=trial.Config,
    data_fields=("stream",), choices=NOTES["choices"], options=(CHECKPOINT_OPTION,), claims=(21,),
    presets={
        "paper": CLEAR,
        "drift": DRIFTING,
        "fair": tuple(presets.fair(one, middle=0.01) for one in WITHOUT_LOWER),
        "quick": tuple(replace(one, seeds=(0,)) for one in DRIFTING),
        "smoke": tuple(map(smoke, METHODS)),
    },
    curves=tuple(Curve(**curve) for curve in NOTES["curves"]),
    metrics=(Metric("loss", ".3f", False), Metric("average", ".2f", True), Metric("alignment", "+.3f")),
    extras=ReportExtras(figures=final_accuracy_chart, tables=accuracy_tables),
)  # fmt: skip
