"""Link prediction with a graph network (the paper's second warm-up): TAM or SGDM first, then Adam."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tam.lab import graph, variants
from tam.lab.experiment import Arm, Curve, Experiment, Study

CHOICES = {
    "data": "MovieLens latest-small; 80% of the ratings to train on, 10% to validate and 10% to test on, "
    "drawn for each seed.",
    "features": "a user's is its number; a movie's are its genres and, with --encoder, its title's "
    "embedding.",
    "network": "two layers of SAGE with 32 channels, a decoder of two layers: about 71,000 parameters with "
    "the 384 numbers of a MiniLM, about 47,000 without; the paper has 80K.",
    "batch": "the whole graph: it fits; the paper follows a notebook that draws neighbours.",
    "weight decay": "none, momentum 0.9.",
    "outcome": "the best validation RMSE of all epochs, as the paper has it; test RMSE with the weights of "
    "that epoch, from the graph with the validation ratings.",
    "the switch": "after so many epochs; Adam begins with fresh state, lr 0.001.",
    "lr": "of TAM and SGDM by the paper's grid for each switch, with another seed.",
    "margin": "0.005.",
}
GRID = (0.1, 0.01, 0.001)
SWITCHES = (10, 50, 100, 200)
ADAM = Arm("Adam", "adam", (0.001,))
TUNED = Arm("Adam, lr tuned", "adam", (0.01, 0.003, 0.001, 0.0003))
PAPER = "the lowest validation RMSE, 0.86, is TAM's at sw = 50; TAM is better than Adam and SGDM at every sw."


def study(switch: int | None, **workload: Any) -> Study:
    """A warm-up of so many epochs; None: each optimizer alone."""
    settings = {} if switch is None else {"switch": switch}
    suffix = "" if switch is None else " warm-up"
    tam, sgdm = (Arm(f"{name.upper()}{suffix}", name, GRID, {}, settings) for name in ("tam", "sgdm"))
    tam, sgdm = replace(tam, against=(sgdm.name, TUNED.name)), replace(sgdm, against=(TUNED.name,))
    return Study(
        "alone" if switch is None else f"sw{switch}",
        "Each optimizer alone" if switch is None else f"Warm-up of {switch} epochs",
        {"data": "movielens", "epochs": 300, "titles": None, **workload},
        (ADAM, TUNED, tam, sgdm, *variants.controls(tam)),
        baseline="Adam",
        seeds=(0, 1, 2, 3, 4),
        tuning_seeds=(100,),
        paper={tam.name: (0.86, None)} if switch == 50 else {},
        outcome="rmse",
        label="best validation RMSE",
        test_label="test RMSE",
        higher=False,
        margin=0.005,
        digits=4,
        choices={"the paper says": PAPER},
    )


STUDIES = tuple(study(switch) for switch in (None, *SWITCHES))


def with_the_papers_lr(made: Study) -> Study:
    """Arms at the one lr the paper has for both, and SGDM at what is then TAM's effective lr."""
    tam, sgdm = (arm for arm in made.arms if arm.lrs == GRID)
    arms = (
        replace(arm, name=f"{arm.name}, {said}the paper's lr", lrs=(lr,), against=(), versus="")
        for arm, lr, said in ((tam, 0.01, ""), (sgdm, 0.01, ""), (sgdm, 0.005, "half "))
    )
    told = (
        "0.01 for both and all switches: where d is 1/2, TAM then has the effective lr of SGDM at half of it."
    )
    return replace(made, arms=(*made.arms, *arms), choices={**made.choices, "the paper's lr": told})


def registered(switch: int, n: int) -> Study:
    """Return a study of claims 19 and 20 in docs/registered.md, with its controls and n fresh seeds."""
    made, settings = study(switch), {"switch": switch}
    sgdm = Arm("SGDM warm-up at 0.005", "sgdm", (0.005,), {}, settings)
    tam = Arm("TAM warm-up at 0.01", "tam", (0.01,), {}, settings, against=(ADAM.name,))
    constant = [one for one in variants.controls(tam) if one.damping == "mean"]
    return replace(
        made,
        arms=(sgdm, ADAM, tam, *constant, variants.another_seeds_damping(tam)),
        baseline=sgdm.name,
        seeds=tuple(range(200, 200 + n)),  # stored trials have 0 to 9, 100 and 101
        tuning_seeds=(),
        paper={},
        choices={**made.choices, "lr": "fixed beforehand: 0.01, the paper's, and half of it for SGDM."},
    )


def smoke() -> Study:
    made = study(10, data="generated")
    arms = tuple(
        replace(arm, lrs=arm.lrs[:1], settings={"switch": 3} if arm.settings else {}) for arm in made.arms
    )
    choices = {"data": "ratings by 20 generated users: they show that everything runs, and mean nothing."}
    return replace(
        made,
        name="sw3",
        title="Warm-up of 3 epochs",
        workload={**made.workload, "epochs": 6},
        arms=arms,
        seeds=(0, 1),
        tuning_seeds=(),
        paper={},
        choices=choices,
        small=True,
    )


EXPERIMENT = Experiment(
    "graph",
    "Link prediction on MovieLens with a graph network (the paper's section 4.4)",
    graph.run,
    graph.config_of,
    {
        "paper": tuple(with_the_papers_lr(one) for one in STUDIES),
        "fair": tuple(variants.fair(variants.without(one, TUNED.name), middle=0.01) for one in STUDIES),
        "registered": tuple(registered(switch, n) for switch, n in ((10, 30), (50, 21), (100, 21))),
        "quick": tuple(replace(study(switch, epochs=60), paper={}) for switch in (None, 10, 50)),
        "smoke": (smoke(),),
    },
    CHOICES,
    (
        Curve("rmse", "Validation RMSE", "RMSE"),
        Curve("loss", "Training loss", "mean square error", log=True),
        Curve("alignment", "Alignment s", "s"),
        Curve("grad_norm", "Gradient norm", "|g|", log=True),
    ),
    check=graph.check,
    gpu=False,
)
