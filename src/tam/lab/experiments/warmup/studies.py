"""Warm-up with TAM and mode connectivity (the paper's section 4.4), ResNet18 on CIFAR-10 at a fixed lr."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tam.lab.core import controls, presets
from tam.lab.core.registry import ReportExtras
from tam.lab.core.study import Study, Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.images import trial as images
from tam.lab.experiments.images.studies import CHOICES, DECAY, image_experiment, image_study
from tam.lab.experiments.warmup import figures, forks

NOTES = read_toml(Path(__file__).with_name("notes.toml"))
FORKED_AT = (5, 25, 50, 100, 150)
HALF_LR = "SGDM, half its lr"


def study(lr: float, switches: tuple[int, ...] = (25, 50, 100), keep: bool = True, **workload: Any) -> Study:
    """Return the comparison of SGDM, TAM at this lr, and TAM until SGDM replaces it.

    With `keep` the runs write the states that forks start from.
    """
    kept_states = {"keep_at": workload.pop("keep_at", FORKED_AT)} if keep else {}
    tam = Variant("TAM", "tam", (lr,), DECAY, kept_states)
    same_effective_lr = () if lr == 0.2 else (HALF_LR,)  # at 0.2 that is the baseline's
    variants = [Variant("SGDM", "sgdm", (0.1,), DECAY, kept_states), Variant(HALF_LR, "sgdm", (0.05,), DECAY)]
    halved = [Variant(f"SGDM, halved at {at}", "sgdm", (0.1,), DECAY, {"halve_at": at}) for at in switches]
    variants += [tam, *halved]
    for at, sgdm in zip(switches, halved, strict=True):
        name, against = f"TAM until {at}, then SGDM", (sgdm.name, *same_effective_lr)
        variants.append(Variant(name, "tam", (lr,), DECAY, {"sgdm_from": at}, against=against))
    rescaled_at = 50 if 50 in switches else switches[-1]
    name, against = f"TAM until {rescaled_at}, rescaled", (f"TAM until {rescaled_at}, then SGDM",)
    settings = {"sgdm_from": rescaled_at, "buffers": "rescale"}
    variants.append(Variant(name, "tam", (lr,), DECAY, settings, against=against))
    # Without kept states the control at the effective lr has the trials of HALF_LR.
    variants += controls.controls(replace(tam, settings={}) if same_effective_lr else tam)
    workload = {"schedule": "constant", "choices": NOTES["switched"], **workload}
    return image_study(f"tam{lr:g}", f"Warm-up, TAM at {lr:g}", variants, **workload)


def fair_study() -> Study:
    """Return the study with searched lrs. Its grids include both lrs of TAM."""
    without_half = presets.without(study(0.2, keep=False), HALF_LR)
    return presets.fair(replace(without_half, name="fair", title="Warm-up, lrs chosen"))


def fork_study(schedule: str, forked_at: tuple[int, ...] = FORKED_AT, **workload: Any) -> Study:
    """Return the study of the barrier between two forks that start at these epochs."""
    variants = []
    for at in forked_at:
        sgdm = f"SGDM 0.1, from {at}"
        variants.append(Variant(sgdm, "sgdm", (0.1,), DECAY, {"at": at}, versus=""))
        for lr in (0.1, 0.2):
            variants.append(Variant(f"TAM {lr}, from {at}", "tam", (lr,), DECAY, {"at": at}, versus=sgdm))
    choices = {**NOTES["forked"], "schedule": NOTES["fork_schedules"][schedule]}
    return image_study(
        f"copies-{schedule}",  # the name in stored selections
        NOTES["fork_titles"][schedule], variants, seeds=(0, 1), choices=choices,
        outcome="barrier", label="barrier (training loss)", higher=False, digits=4, controls=False,
        margin=0.0,  # nobody knows how large a barrier matters
        **{"schedule": schedule, "keep_at": forked_at, **workload},
    )  # fmt: skip


def long_study(lr: float, *more_variants: str) -> Study:
    """Return the study of a switch at epoch 100 of 200, without forks."""
    names = ("TAM", "SGDM, halved at 100", "TAM until 100, then SGDM", *more_variants)
    selected = study(lr, (100,), keep=False, limit=10_000).only(names, None)
    return replace(selected, title=f"Warm-up, TAM at {lr:g}, 200 epochs")


def late_study() -> Study:
    """Return the study that was planned after the preset long; it repeats no comparison of that one."""
    planned = long_study(0.1, HALF_LR, "SGDM at TAM's effective lr")
    halved = planned.variant("SGDM, halved at 100")
    variants = tuple(replace(one, versus="") if one is halved else one for one in planned.variants)
    return replace(planned, variants=variants, choices={**planned.choices, **NOTES["late"]})


def registered(with_controls: bool = False) -> tuple[Study, ...]:
    """Return the studies of claims 15 to 18 in registered.md. `with_controls` adds replayed damping."""
    whole = study(0.1, (25, 50), keep=False, epochs=100)
    names = ("TAM", HALF_LR, "SGDM, halved at 25", "SGDM, halved at 50",
             "TAM until 25, then SGDM", "TAM until 50, then SGDM")  # fmt: skip
    warmups = whole.only(names, None)
    for tam in [one for one in warmups.variants if one.optimizer == "tam"] if with_controls else ():
        constant = [one for one in controls.controls(tam) if one.damping == "mean"]
        added = (*constant, controls.another_seeds_damping(tam))
        warmups = replace(warmups, variants=(*warmups.variants, *added))
    forked = [
        Variant(f"{name} {lr}, from {at}", name.lower(), (lr,), DECAY, {"at": at}, versus)
        for at in (5, 50)
        for name, lr, versus in (
            ("SGDM", 0.1, ""), ("SGDM", 0.05, ""), ("TAM", 0.1, f"SGDM 0.05, from {at}"),
        )
    ]  # fmt: skip
    barriers = fork_study("tail", (5, 50), **{**QUARTER, "keep_at": (5, 50)})
    barriers = replace(barriers, name="claim-17", variants=tuple(forked), baseline=forked[0].name)
    seeds = tuple(range(3, 11))  # stored trials have 0 to 2
    warmups = replace(warmups, name="claims-15-16-18", title="Warm-up, TAM at 0.1, all images", margin=0.5)
    return tuple(replace(one, seeds=seeds) for one in (warmups, barriers))


QUARTER: dict[str, Any] = {"limit": 10_000, "epochs": 100, "keep_at": (5, 25, 50)}
SMALL: dict[str, Any] = {
    "data": "digits", "model": "tiny", "batch": 64, "held_out": 300, "limit": 256, "epochs": 5,
    "keep_at": (1, 2),
}  # fmt: skip


def on_a_quarter(*studies: Study) -> tuple[Study, ...]:
    """Return the studies with a note on the number of images."""
    return tuple(replace(one, choices={**one.choices, **NOTES["quarter"]}) for one in studies)


def smoke() -> tuple[Study, ...]:
    studies = (study(0.2, (1, 2), **SMALL), fork_study("tail", (1, 2), **SMALL))
    choices = {**presets.SMALL, **NOTES["terms"]}
    return tuple(replace(one, seeds=(0, 1), choices=choices, small=True) for one in studies)


def run(config: images.Config, *arguments: Any) -> Any:
    """Train a run, or two forks of one."""
    return (forks if isinstance(config, forks.Config) else images).run(config, *arguments)


def make_config(**settings: Any) -> images.Config:
    """Return the config of a run, or of the forks that start `at` an epoch."""
    return forks.Config(**settings) if "at" in settings else images.Config(**settings)


EXPERIMENT = image_experiment(
    name="warmup", title="Warm-up with TAM and mode connectivity (the paper's section 4.4)",
    choices={**CHOICES, **NOTES["choices"], **NOTES["terms"]},
    run=run, config=make_config, claims=(15, 16, 17, 18),
    presets={
        "paper": (study(0.1), study(0.2), fork_study("constant"), fork_study("tail")),
        "fair": (fair_study(),),
        "quick": on_a_quarter(
            *(study(lr, (25, 50), **QUARTER) for lr in (0.1, 0.2)),
            *(fork_study(schedule, QUARTER["keep_at"], **QUARTER) for schedule in ("constant", "tail")),
        ),
        "long": on_a_quarter(long_study(0.2)),
        "registered": registered(), "registered-controls": registered(with_controls=True),
        "late": on_a_quarter(late_study(), fork_study("constant", (100, 150), limit=10_000)),
        "smoke": smoke(),
    },
    extras=ReportExtras(
        figures=figures.barrier_charts, lines=figures.report_lines, tables=figures.report_tables
    ),
)  # fmt: skip
