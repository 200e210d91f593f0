"""Link prediction with a graph network (the paper's second warm-up): TAM or SGDM first, then Adam."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tam.lab.core import controls, presets
from tam.lab.core.registry import Experiment, RunOption
from tam.lab.core.study import Curve, Metric, Study, Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.graph import trial

NOTES = read_toml(Path(__file__).with_name("notes.toml"))
GRID = (0.1, 0.01, 0.001)
ADAM = Variant("Adam", "adam", (0.001,))
TUNED = Variant("Adam, lr tuned", "adam", (0.01, 0.003, 0.001, 0.0003))


def study(switch: int | None, **workload: Any) -> Study:
    """Return the study of a warm-up of so many epochs. None: each optimizer alone."""
    settings = {} if switch is None else {"switch": switch}
    suffix = "" if switch is None else " warm-up"
    tam, sgdm = (Variant(f"{name.upper()}{suffix}", name, GRID, {}, settings) for name in ("tam", "sgdm"))
    tam, sgdm = replace(tam, against=(sgdm.name, TUNED.name)), replace(sgdm, against=(TUNED.name,))
    return Study(
        "alone" if switch is None else f"sw{switch}",
        "Each optimizer alone" if switch is None else f"Warm-up of {switch} epochs",
        {"data": "movielens", "epochs": 300, "titles": None, **workload},
        (ADAM, TUNED, tam, sgdm, *controls.controls(tam)),
        baseline="Adam", seeds=(0, 1, 2, 3, 4), tuning_seeds=presets.TUNING_SEEDS,
        paper={tam.name: (0.86, None)} if switch == 50 else {}, outcome="rmse", label="best validation RMSE",
        test_label="test RMSE", higher=False, margin=0.005, digits=4, choices=NOTES["study"],
    )  # fmt: skip


STUDIES = tuple(study(switch) for switch in (None, 10, 50, 100, 200))


def with_paper_lr(whole: Study) -> Study:
    """Add variants at the one lr the paper has for both, and SGDM at what is then TAM's effective lr."""
    tam, sgdm = (variant for variant in whole.variants if variant.lrs == GRID)
    variants = (
        replace(variant, name=f"{variant.name}, {share}the paper's lr", lrs=(lr,), against=(), versus="")
        for variant, lr, share in ((tam, 0.01, ""), (sgdm, 0.01, ""), (sgdm, 0.005, "half "))
    )
    choices = {**whole.choices, **NOTES["paper_lr"]}
    return replace(whole, variants=(*whole.variants, *variants), choices=choices)


def registered(switch: int, n: int) -> Study:
    """Return a study of claims 19 and 20 in registered.md, with its controls and n fresh seeds."""
    whole, settings = study(switch), {"switch": switch}
    sgdm = Variant("SGDM warm-up at 0.005", "sgdm", (0.005,), {}, settings)
    tam = Variant("TAM warm-up at 0.01", "tam", (0.01,), {}, settings, against=(ADAM.name,))
    constant = [one for one in controls.controls(tam) if one.damping == "mean"]
    return replace(
        whole, variants=(sgdm, ADAM, tam, *constant, controls.another_seeds_damping(tam)), baseline=sgdm.name,
        seeds=tuple(range(200, 200 + n)),  # stored trials have 0 to 9, 100 and 101
        tuning_seeds=(), paper={}, choices={**whole.choices, **NOTES["registered"]},
    )  # fmt: skip


def smoke() -> Study:
    whole = study(10, data="generated", epochs=6)
    variants = tuple(
        replace(variant, lrs=variant.lrs[:1], settings={"switch": 3} if variant.settings else {})
        for variant in whole.variants
    )
    return replace(
        whole, name="sw3", title="Warm-up of 3 epochs", variants=variants, seeds=(0, 1), tuning_seeds=(),
        paper={}, choices=NOTES["smoke"], small=True,
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="graph",
    title="Link prediction on MovieLens with a graph network (the paper's section 4.4)",
    config=trial.Config, run=trial.run,
    presets={
        "paper": tuple(map(with_paper_lr, STUDIES)),
        "fair": tuple(presets.fair(presets.without(one, TUNED.name), middle=0.01) for one in STUDIES),
        "registered": tuple(registered(switch, n) for switch, n in ((10, 30), (50, 21), (100, 21))),
        "quick": tuple(replace(study(switch, epochs=60), paper={}) for switch in (None, 10, 50)),
        "smoke": (smoke(),),
    },
    choices=NOTES["choices"],
    curves=tuple(Curve(**curve) for curve in NOTES["curves"]),
    metrics=(Metric("loss"), Metric("rmse", ".4f", higher_is_better=False), Metric("alignment", "+.3f")),
    options=(
        RunOption(name="encoder", help="A sentence encoder that embeds the movies' titles.",
                  metavar="FOLDER|NAME", resolve=trial.resolve_encoder),
    ),
    data_fields=("data",), modules=("torch_geometric",), claims=(19, 20), cpu_presets=None,
)  # fmt: skip
