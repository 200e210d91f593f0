"""The paper's two illustrations, on surfaces of two dimensions with a narrow valley and noisy gradients."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from tam.lab import toy, variants
from tam.lab.charts import Series, line_chart
from tam.lab.experiment import Arm, Curve, Experiment, Plan, Study
from tam.lab.outcome import outcomes

CHOICES = {
    "surfaces": "a quadratic ravine 100 times steeper across than along, and Rosenbrock's valley: the "
    "paper's figures show a surface without saying which.",
    "noise": "0.1 in each coordinate of the gradient: the paper does not say.",
    "outcome": "the mean loss of the last tenth of the steps.",
}
TAM = Arm("TAM", "tam", (0.2,))
ARROW = 0.2  # momenta are drawn as steps of this lr
ANGLES = [float(angle) for angle in range(0, 181, 5)]


def study(surface: str) -> Study:
    arms = (
        Arm("SGDM", "sgdm", (0.1,)),
        TAM,
        Arm("SGD", "sgd", (1.0,)),  # of the same effective lr
        *variants.controls(TAM),
    )
    return Study(
        surface,
        f"Trajectories on the surface '{surface}'",
        {"surface": surface, "epochs": 300},
        arms,
        baseline="SGDM",
        seeds=tuple(range(20)),
        outcome="final",
        label="final loss",
        higher=False,
        margin=0.0,
        digits=5,
    )


def figures(plan: Plan) -> list[str]:
    """Momenta along an SGD trajectory, the size of a new momentum against the angle, and our trajectories."""
    found = toy.along_a_trajectory(str(plan.study.workload["surface"]))
    steps = [float(i + 1) for i in range(len(found["sgdm"]))]
    titles = {"sgdm": "SGDM", "tam": "TAM, twice"}
    sizes = [Series(titles[k], steps, [float(m.norm()) for m in found[k]]) for k in titles]
    turned = [Series(titles[k], steps[1:], toy.turns(found[k])) for k in titles]
    by_angle = [
        Series("SGDM, half", ANGLES, [x / 2 for x in toy.size_by_angle("sgdm", ANGLES)]),
        Series("TAM", ANGLES, toy.size_by_angle("tam", ANGLES)),
        Series("SGDM", ANGLES, toy.size_by_angle("sgdm", ANGLES)),
    ]
    return [
        line_chart(_arrows(found), "Momenta along one SGD trajectory, as steps", "x", "y"),
        line_chart(sizes, "|m| along one SGD trajectory", "step", "|m|"),
        line_chart(turned, "Turn of m from step to step", "step", "degrees"),
        line_chart(by_angle, "|m| after a gradient at an angle, |m| = |g| = 1 before", "degrees", "|m|"),
        line_chart(_paths(plan), "Trajectories of the first seed", "x", "y"),
    ]


def _arrows(found: dict[str, list[Tensor]]) -> list[Series]:
    """The trajectory, and from every fifth place on it the step each momentum would make."""
    places = found["trajectory"]
    series = [Series("SGD's trajectory", [float(x[0]) for x in places], [float(x[1]) for x in places])]
    for key, title in (("sgdm", "SGDM"), ("tam", "TAM, twice")):
        ends = [(x, x - ARROW * m) for x, m in zip(places[::5], found[key][::5], strict=True)]
        lines = [(*begin.tolist(), *end.tolist()) for begin, end in ends]
        x = [value for x0, _, x1, _ in lines for value in (x0, x1, math.nan)]
        y = [value for _, y0, _, y1 in lines for value in (y0, y1, math.nan)]
        series.append(Series(title, x, y))
    return series


def _paths(plan: Plan) -> list[Series]:
    series = []
    for style, outcome in enumerate(outcomes(plan)):
        rows = next(iter(outcome.folders.values())).metrics() if outcome.folders else []
        if rows:
            x, y = [row["x"] for row in rows], [row["y"] for row in rows]
            series.append(Series(outcome.arm.name, x, y, style=style))
    return series


STUDIES = tuple(study(surface) for surface in toy.SURFACES)

EXPERIMENT = Experiment(
    "toy",
    "The paper's illustrations, computed on surfaces of two dimensions",
    toy.run,
    toy.config_of,
    {
        "paper": STUDIES,
        "fair": tuple(variants.fair(one, tuning_seeds=tuple(range(100, 110))) for one in STUDIES),
        "quick": tuple(replace(one, seeds=tuple(range(5))) for one in STUDIES),
        "smoke": (replace(STUDIES[0], seeds=(0, 1), workload={"surface": "ravine", "epochs": 20}),),
    },
    CHOICES,
    (
        Curve("loss", "Loss", "loss", log=True, by="step"),
        Curve("alignment", "Alignment s", "s", by="step"),
        Curve("grad_norm", "Gradient norm", "|g|", log=True, by="step"),
    ),
    figures,
    gpu=False,
)
