"""The paper's two illustrations, on surfaces of two dimensions with a narrow valley and noisy gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from tam.lab.core import controls, presets
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, ReportExtras
from tam.lab.core.study import Curve, Metric, Study, Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.toy import trial
from tam.lab.report.charts import Series, line_chart

NOTES = read_toml(Path(__file__).with_name("notes.toml"))
TAM = Variant("TAM", "tam", (0.2,))
ARROW_LR = 0.2  # momenta are drawn as steps of this lr
TITLES = {"sgdm": "SGDM", "tam": "TAM, twice"}
VARIANTS = {"sgdm": "SGDM", "tam": "TAM"}
ANGLES = [float(angle) for angle in range(0, 181, 5)]


def study(surface: str) -> Study:
    sgd = Variant("SGD", "sgd", (1.0,))  # of the same effective lr
    return Study(
        surface,
        f"Trajectories on the surface '{surface}'",
        {"surface": surface, "epochs": 300},
        (Variant("SGDM", "sgdm", (0.1,)), TAM, sgd, *controls.controls(TAM)),
        baseline="SGDM", seeds=tuple(range(20)), outcome="final", label="final loss", higher=False,
        margin=0.0, digits=5,
    )  # fmt: skip


def figures(plan: Plan, styles: Mapping[str, int]) -> Sequence[str]:
    """Return charts: momenta along an SGD trajectory, |m| by the angle, and the trials' trajectories."""
    momenta = trial.momenta_along_trajectory(str(plan.study.workload["surface"]))
    steps = [float(i + 1) for i in range(len(momenta["sgdm"]))]
    looks = {k: styles.get(name) for k, name in VARIANTS.items()}
    sizes = [Series(TITLES[k], steps, [float(m.norm()) for m in momenta[k]], style=looks[k]) for k in TITLES]
    turns = [Series(TITLES[k], steps[1:], trial.turning_angles(momenta[k]), style=looks[k]) for k in TITLES]
    sgdm, tam = (trial.size_by_angle(name, ANGLES) for name in ("sgdm", "tam"))
    by_angle = [
        Series("SGDM, half", ANGLES, [size / 2 for size in sgdm]),
        Series("TAM", ANGLES, tam, style=looks["tam"]),
        Series("SGDM", ANGLES, sgdm, style=looks["sgdm"]),
    ]
    return [
        line_chart(_arrows(momenta, looks), "Momenta along one SGD trajectory, as steps", "x", "y"),
        line_chart(sizes, "|m| along one SGD trajectory", "step", "|m|"),
        line_chart(turns, "Turn of m from step to step", "step", "degrees"),
        line_chart(by_angle, "|m| after a gradient at an angle, |m| = |g| = 1 before", "degrees", "|m|"),
        line_chart(_paths(plan, styles), "Trajectories of the first seed", "x", "y"),
    ]


def _arrows(momenta: dict[str, list[Tensor]], looks: Mapping[str, int | None]) -> list[Series]:
    """Return the trajectory, and from every fifth point on it the step each momentum would make."""
    points = momenta["trajectory"]
    series = [Series("SGD's trajectory", [float(x[0]) for x in points], [float(x[1]) for x in points])]
    for key, title in TITLES.items():
        ends = [(x, x - ARROW_LR * m) for x, m in zip(points[::5], momenta[key][::5], strict=True)]
        x, y = ([value for a, b in ends for value in (float(a[i]), float(b[i]), math.nan)] for i in (0, 1))
        series.append(Series(title, x, y, style=looks[key]))
    return series


def _paths(plan: Plan, styles: Mapping[str, int]) -> list[Series]:
    series = []
    for outcome in plan.outcomes():
        rows = next((one.metrics for one in outcome.records.values() if not one.diverged), [])
        if rows:
            x, y = [row["x"] for row in rows], [row["y"] for row in rows]
            series.append(Series(outcome.variant.name, x, y, style=styles.get(outcome.variant.name)))
    return series


def fair(whole: Study) -> Study:
    """Return the study with searched lrs. Its trials take a second, so there are more tuning seeds."""
    return replace(presets.fair(whole, tuning_seeds=tuple(range(100, 110))), former_tuning_seeds=10)


STUDIES = tuple(study(surface) for surface in trial.SURFACES)

EXPERIMENT = Experiment(
    name="toy",
    title="The paper's illustrations, computed on surfaces of two dimensions",
    config=trial.Config, run=trial.run,
    presets={
        "paper": STUDIES,
        "fair": tuple(map(fair, STUDIES)),
        "quick": tuple(replace(one, seeds=tuple(range(5))) for one in STUDIES),
        "smoke": (
            replace(STUDIES[0], seeds=(0, 1), workload={"surface": "ravine", "epochs": 20}, small=True),
        ),
    },
    choices=NOTES["choices"],
    curves=tuple(Curve(**curve) for curve in NOTES["curves"]),
    metrics=(Metric("loss"), Metric("alignment", "+.3f")),
    cpu_presets=None, extras=ReportExtras(figures=figures),
)  # fmt: skip
