"""Warm-up with TAM and mode connectivity (the paper's section 4.4), ResNet18 on CIFAR-10 at a fixed lr.

The paper shows curves: validation accuracy is higher with a warm-up by TAM than with SGDM; a jump of the
gradient norm comes 5 to 10 epochs later with TAM; the maximum loss barrier falls until epoch 50, then rises,
and is lower with TAM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tam.lab.core import controls, presets
from tam.lab.core.registry import ReportExtras
from tam.lab.core.study import Study, Variant
from tam.lab.experiments.images import trial as images
from tam.lab.experiments.images.studies import CHOICES as IMAGES_CHOICES
from tam.lab.experiments.images.studies import DECAY, image_experiment, image_study
from tam.lab.experiments.warmup import figures, forks

TERMS = {
    "the switch": "after sw epochs SGDM at half of TAM's lr replaces TAM. The momentum is kept; 'rescaled' "
    "multiplies it so the step does not dip at the switch. The effective lr stays the same: for TAM at 0.2 "
    "it is that of SGDM at 0.1, for TAM at 0.1 that of SGDM at 0.05.",
    "a jump": "the first epoch whose gradient norm is 1.5 times the median of the ten before it.",
    "forks": "start from the run's state after an epoch, including the optimizer, and have other batches to "
    "the end; at the fixed lr, or with a cosine to 0 over the last fifth. The paper trains them 'until "
    "convergence'.",
    "barrier": "the largest of 11 points on the line, above the mean of its ends, on the training loss, with "
    "batch norm estimated again. If the largest is the loss of an end ('at an end'), it is half the "
    "difference of the ends: no point lies above the higher end. The results and charts also have it on the "
    "validation loss, and with interpolated statistics.",
}
CHOICES = {
    **IMAGES_CHOICES,
    "schedule": "a fixed lr, like in the paper.",
    "lr": "the paper states none. TAM at 0.1 (its default for momentum methods, and SGDM's) and at 0.2 "
    "(SGDM's effective lr) are separate studies.",
    "SGDM, halved": "from 0.1 to 0.05, which the paper compares with the switch. Its effective lr falls "
    "there; that of a warm-up by TAM at 0.2 does not.",
    "sw": "25 and 50 epochs, like in the paper, and 100 in the presets paper, fair, long (TAM at 0.2) and "
    "late (TAM at 0.1).",
    **TERMS,
}
PAPER_SAYS = (
    "TAM, with and without a switch, is better than SGDM; a jump of |g| comes 5 to 10 epochs later with it; "
    "halving SGDM's lr gains most at 50, where the barrier is lowest."
)
PLANNED_LATE = (
    "when the results of the preset long were known, so it has its own comparisons. SGDM and SGDM, halved at "
    "100, are the runs of long, and are compared there."
)
FORKED_AT = (5, 25, 50, 100, 150)
HALF_LR = "SGDM, half its lr"


def study(lr: float, switches: tuple[int, ...] = (25, 50, 100), keep: bool = True, **workload: Any) -> Study:
    """Return the comparison of SGDM, TAM at this lr, and TAM until SGDM replaces it.

    With `keep` the runs write the states that forks start from.
    """
    kept_states = {"keep_at": workload.pop("keep_at", FORKED_AT)} if keep else {}
    tam = Variant("TAM", "tam", (lr,), DECAY, kept_states)
    same_effective_lr = () if lr == 0.2 else (HALF_LR,)  # at 0.2 that is the baseline's
    rescaled_at = 50 if 50 in switches else switches[-1]
    switched = {switch: f"TAM until {switch}, then SGDM" for switch in switches}
    halved = {switch: f"SGDM, halved at {switch}" for switch in switches}
    variants = [
        Variant("SGDM", "sgdm", (0.1,), DECAY, kept_states),
        Variant(HALF_LR, "sgdm", (0.05,), DECAY),
        tam,
        *(Variant(halved[switch], "sgdm", (0.1,), DECAY, {"halve_at": switch}) for switch in switches),
    ]
    for switch in switches:
        against, settings = (halved[switch], *same_effective_lr), {"sgdm_from": switch}
        variants.append(Variant(switched[switch], "tam", (lr,), DECAY, settings, against=against))
    rescaled: dict[str, Any] = {"sgdm_from": rescaled_at, "buffers": "rescale"}
    name, against = f"TAM until {rescaled_at}, rescaled", (switched[rescaled_at],)
    variants += [
        Variant(name, "tam", (lr,), DECAY, rescaled, against=against),
        # Without kept states the control at the effective lr has the trials of HALF_LR.
        *controls.controls(replace(tam, settings={}) if same_effective_lr else tam),
    ]
    workload = {"schedule": "constant", "choices": {"the paper says": PAPER_SAYS}, **workload}
    return image_study(f"tam{lr:g}", f"Warm-up, TAM at {lr:g}", variants, **workload)


def fair_study() -> Study:
    """Return the study with searched lrs. Its grids include both lrs of TAM."""
    without_half = presets.without(study(0.2, keep=False), HALF_LR)
    return presets.fair(replace(without_half, name="fair", title="Warm-up, lrs chosen"))


def fork_study(schedule: str, forked_at: tuple[int, ...] = FORKED_AT, **workload: Any) -> Study:
    """Return the study of the barrier between two forks that start at these epochs."""
    variants = [
        Variant(f"{name} {lr:g}, from {at}", name.lower(), (lr,), DECAY, {"at": at}, versus.format(at))
        for at in forked_at
        for name, lr, versus in (
            ("SGDM", 0.1, ""), ("TAM", 0.1, "SGDM 0.1, from {}"), ("TAM", 0.2, "SGDM 0.1, from {}"),
        )
    ]  # fmt: skip
    fixed = schedule == "constant"
    choices = {
        "the paper says": "the barrier falls until epoch 50, then rises; TAM's is lower.",
        "comparisons": "TAM's forks with SGDM's from the same epoch.",
        "outcome": "the barrier, see below.",
        "schedule": "a fixed lr" if fixed else "a fixed lr, and a cosine over the last fifth",
    }
    title = f"Loss barrier between two forks, {'a fixed lr' if fixed else 'an annealed tail'}"
    return image_study(
        f"copies-{schedule}",  # the name in stored selections
        title, variants, seeds=(0, 1), choices=choices,
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
    return replace(planned, variants=variants, choices={**planned.choices, "planned": PLANNED_LATE})


QUARTER_IMAGES = (
    "10,000 of the 40,000 training images: an epoch has a quarter of the steps, so epoch 50 comes after as "
    "many steps as epoch 12 with all of them."
)
QUARTER: dict[str, Any] = {"limit": 10_000, "epochs": 100, "keep_at": (5, 25, 50)}
SMALL: dict[str, Any] = {
    "data": "digits", "model": "tiny", "batch": 64, "held_out": 300, "limit": 256, "epochs": 5,
    "keep_at": (1, 2),
}  # fmt: skip


def on_a_quarter(*studies: Study) -> tuple[Study, ...]:
    """Return the studies with a note on the number of images."""
    return tuple(replace(one, choices={**one.choices, "images": QUARTER_IMAGES}) for one in studies)


def smoke() -> tuple[Study, ...]:
    studies = (study(0.2, (1, 2), **SMALL), fork_study("tail", (1, 2), **SMALL))
    choices = {**presets.SMALL, **TERMS}
    return tuple(replace(one, seeds=(0, 1), choices=choices, small=True) for one in studies)


def run(config: images.Config, *arguments: Any) -> Any:
    """Train a run, or two forks of one."""
    return (forks if isinstance(config, forks.Config) else images).run(config, *arguments)


def make_config(**settings: Any) -> images.Config:
    """Return the config of a run, or of the forks that start `at` an epoch."""
    return forks.Config(**settings) if "at" in settings else images.Config(**settings)


EXPERIMENT = image_experiment(
    name="warmup", title="Warm-up with TAM and mode connectivity (the paper's section 4.4)",
    run=run, config=make_config, choices=CHOICES, claims=(15, 16, 17, 18),
    presets={
        "paper": (study(0.1), study(0.2), fork_study("constant"), fork_study("tail")),
        "fair": (fair_study(),),
        "quick": on_a_quarter(
            *(study(lr, (25, 50), **QUARTER) for lr in (0.1, 0.2)),
            *(fork_study(schedule, QUARTER["keep_at"], **QUARTER) for schedule in ("constant", "tail")),
        ),
        "long": on_a_quarter(long_study(0.2)),
        "late": on_a_quarter(late_study(), fork_study("constant", (100, 150), limit=10_000)),
        "smoke": smoke(),
    },
    extras=ReportExtras(figures=figures.barrier_charts, lines=figures.report_lines),
)  # fmt: skip
