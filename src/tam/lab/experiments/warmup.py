"""Warm-up with TAM and mode connectivity (the paper's section 4.4), ResNet18 on CIFAR-10 at a fixed lr.

The paper shows curves: validation accuracy is higher with a warm-up by TAM than with SGDM; a jump of the
gradient norm comes 5 to 10 epochs later with TAM; the maximum loss barrier falls until epoch 50, then rises,
and is lower with TAM.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from tam.lab import connectivity, images, variants
from tam.lab.charts import Series, line_chart
from tam.lab.connectivity import first_jump
from tam.lab.experiment import Arm, Experiment, Plan, Study
from tam.lab.experiments.images import CHOICES as IMAGES
from tam.lab.outcome import Outcome, outcomes, twins

CHOICES = {
    **IMAGES,
    "schedule": "a fixed lr, as the paper has it.",
    "lr": "the paper states none: TAM at 0.1 (its default for momentum methods, SGDM's too) and at 0.2 "
    "(SGDM's effective lr) are studies of their own.",
    "the switch": "after sw epochs TAM hands over to SGDM at half of TAM's lr, the momentum kept as it is; "
    "'rescaled' has it multiplied so that the step does not dip at the switch. The effective lr stays: for "
    "TAM at 0.2 it is that of SGDM at 0.1 all along, for TAM at 0.1 that of SGDM at 0.05.",
    "SGDM, halved": "from 0.1 to 0.05, which the paper sets beside the switch; its effective lr falls there, "
    "and that of a warm-up by TAM at 0.2 does not.",
    "sw": "25 and 50 epochs, as in the paper, and 100, ours, in the presets paper, fair, long (TAM at 0.2) "
    "and late (TAM at 0.1).",
    "a jump": "the first epoch whose gradient norm is 1.5 times the median of the ten before it.",
    "copies": "begin from the run's state after an epoch, optimizer and all, and have other batches to the "
    "end; at the fixed lr, or with a cosine to 0 over the last fifth. The paper trains them 'until "
    "convergence'.",
    "barrier": "the largest of 11 points on the line, above the mean of its ends; on the training loss with "
    "batch norm estimated anew. Where the largest is an end's own loss ('at an end'), it is half the "
    "difference of the two: no point lies above the higher end. On validation loss, and with the "
    "statistics as interpolated, it is in the results and drawn, too.",
}
DECAY: dict[str, Any] = {"weight_decay": 1e-4}
SWITCHES = (25, 50, 100)
SPAWNED = (5, 25, 50, 100, 150)
WORKLOAD: dict[str, Any] = {
    "data": "cifar10", "model": "resnet18", "epochs": 200, "batch": 128, "schedule": "constant",
}  # fmt: skip


def study(lr: float, switches: tuple[int, ...] = SWITCHES, keep: bool = True, **workload: Any) -> Study:
    """TAM at this lr, and what becomes of it when SGDM takes over."""
    kept = {"keep_at": workload.pop("keep_at", SPAWNED)} if keep else {}  # for the copies
    tam = Arm("TAM", "tam", (lr,), DECAY, kept)
    like_tam = "SGDM" if lr == 0.2 else "SGDM, half its lr"  # of TAM's effective lr
    at = 50 if 50 in switches else switches[-1]  # where it is once rescaled
    until = {sw: f"TAM until {sw}, then SGDM" for sw in switches}
    rescaled = {"sgdm_from": at, "buffers": "rescale"}
    arms = [
        Arm("SGDM", "sgdm", (0.1,), DECAY, kept),
        Arm("SGDM, half its lr", "sgdm", (0.05,), DECAY),
        tam,
        *(Arm(f"SGDM, halved at {sw}", "sgdm", (0.1,), DECAY, {"halve_at": sw}) for sw in switches),
    ]
    for sw in switches:
        against = (f"SGDM, halved at {sw}", *([like_tam] if like_tam != "SGDM" else []))
        arms.append(Arm(until[sw], "tam", (lr,), DECAY, {"sgdm_from": sw}, against=against))
    arms += [
        Arm(f"TAM until {at}, rescaled", "tam", (lr,), DECAY, rescaled, against=(until[at],)),
        *variants.controls(tam if like_tam == "SGDM" else replace(tam, settings={})),  # like_tam's own runs
    ]
    return Study(
        f"tam{lr:g}",
        f"Warm-up, TAM at {lr:g}",
        {**WORKLOAD, **workload},
        tuple(arms),
        baseline="SGDM",
        seeds=(0, 1, 2),
        choices={
            "the paper says": "TAM, with and without a switch, is better than SGDM; a jump of |g| comes 5 to "
            "10 epochs later with it; halving SGDM's lr gains most at 50, where the barrier is lowest."
        },
    )


def fair() -> Study:
    """Both lrs are in the grids: one study."""
    made = variants.without(study(0.2, keep=False), "SGDM, half its lr")
    return variants.fair(replace(made, name="fair", title="Warm-up, lrs chosen"))


def copies(schedule: str, spawned: tuple[int, ...] = SPAWNED, **workload: Any) -> Study:
    """The barrier between two copies that begin at chosen epochs."""
    sgdm = "SGDM 0.1, from {}"
    arms = [
        Arm(f"{name} {lr:g}, from {at}", name.lower(), (lr,), DECAY, {"at": at}, versus.format(at))
        for at in spawned
        for name, lr, versus in (("SGDM", 0.1, ""), ("TAM", 0.1, sgdm), ("TAM", 0.2, sgdm))
    ]
    return Study(
        f"copies-{schedule}",
        f"Loss barrier between two copies, {'a fixed lr' if schedule == 'constant' else 'an annealed tail'}",
        {**WORKLOAD, "keep_at": spawned, **workload, "schedule": schedule},
        tuple(arms),
        baseline=arms[0].name,
        seeds=(0, 1),
        outcome="barrier",
        label="barrier (training loss)",
        higher=False,
        margin=0.0,  # how large a barrier matters, nobody knows
        digits=4,
        controls=False,
        choices={
            "the paper says": "the barrier falls until epoch 50, then rises; TAM's is lower.",
            "comparisons": "TAM's copies with SGDM's from the same epoch.",
            "outcome": "the barrier, as below.",
            "schedule": "a fixed lr"
            if schedule == "constant"
            else "a fixed lr, and a cosine over the last fifth",
        },
    )


def figures(plan: Plan) -> list[str]:
    """The barriers against the epoch at which copies begin."""
    found = [outcome for outcome in outcomes(plan) if outcome.folders]
    return _barriers(found) if found and plan.study.outcome == "barrier" else []


def jumps(plan: Plan) -> list[str]:
    """Of the gradient norm, seed by seed, and the step's at a switch; of copies, all barriers."""
    if plan.study.outcome == "barrier":
        return _all_barriers(plan)
    lines, calm, again = _dips(plan), [], twins(plan)
    for outcome in outcomes(plan):
        if outcome.arm.name in again:
            continue
        norms = [[row["grad_norm"] for row in folder.metrics()] for folder in outcome.folders.values()]
        found = [first_jump(one) for one in norms if len(one) > 10]  # fewer cannot be judged
        told = ["none" if jump is None else f"epoch {jump.epoch} (x {jump.size:.2f})" for jump in found]
        if any(found):
            lines.append(f"{outcome.arm.name}: first jump of |g| at {', '.join(told)}.")
        calm += [outcome.arm.name] if found and not any(found) else []
    return [*lines, *([f"No jump of |g| in any seed: {'; '.join(calm)}."] if calm else [])]


def _dips(plan: Plan) -> list[str]:
    """How long the first step after a switch is, as a share of those before it."""
    lines = []
    for outcome in outcomes(plan):
        rows = [folder.metrics() for folder in outcome.folders.values()]
        lengths = [[row["update_norm"] for row in run if "update_norm" in row] for run in rows]
        both = [one for one in lengths if len(one) == 2 and one[0] > 0]
        found = [f"{after / before:.2f}" for before, after in both]
        if found:
            told = f"the first step after the switch has {', '.join(found)} of the length of those before it"
            lines.append(f"{outcome.arm.name}: {told}.")
    return lines


def _all_barriers(plan: Plan) -> list[str]:
    lines = []
    for outcome in outcomes(plan):
        told = []
        for key, title in BARRIERS.items():
            values = outcome.values(key)
            lines_of = [(outcome.folders[seed].result or {}).get(LINES[key]) for seed in values]
            told += [f"{title} {mean(values.values()):.4f}{_at_an_end(lines_of)}"] if values else []
        apart = list(outcome.values("apart").values())
        told += [f"copies {mean(apart):.2g} of their norm apart"] if apart else []
        lines += [f"{outcome.arm.name}: {', '.join(told)}."] if told else []
    return lines


def _at_an_end(lines: list[list[float] | None]) -> str:
    """In how many pairs no point lies above the higher end."""
    known = [line for line in lines if line is not None]  # results of old have none
    ends = sum(max(line) in (line[0], line[-1]) for line in known)
    return f" (at an end in {ends} of {len(known)})" if known else ""


BARRIERS = {
    "barrier_train": "training loss",
    "barrier_validation": "validation loss",
    "barrier_train_as_they_are": "training loss, statistics as interpolated",
    "barrier_validation_as_they_are": "validation loss, statistics as interpolated",
}
LINES = {key: key.replace("barrier", "line") for key in BARRIERS}  # the losses each is the largest of


def _barriers(found: list[Outcome]) -> list[str]:
    charts = []
    for key, title in BARRIERS.items():
        lines: dict[str, dict[float, list[float]]] = {}  # by arm and epoch
        for outcome in found:
            name, at = outcome.arm.name.split(",")[0], float(outcome.arm.settings["at"])
            lines.setdefault(name, {})[at] = list(outcome.values(key).values())
        series = []
        for name, by_epoch in lines.items():
            kept = {epoch: values for epoch, values in by_epoch.items() if values}
            columns = list(kept.values())
            middle, low, high = [*map(mean, columns)], [*map(min, columns)], [*map(max, columns)]
            series.append(Series(name, list(kept), middle, low, high))
        charts.append(line_chart(series, f"Barrier: {title}", "epoch at which copies begin", "barrier"))
    return charts


def run(config: dict[str, Any], *arguments: Any) -> Any:
    """A run, or two copies of one."""
    return (connectivity if "at" in config else images).run(config, *arguments)


def config_of(**options: Any) -> dict[str, Any]:
    return connectivity.config_of(**options) if "at" in options else images.config_of(**options)


def check(trial: dict[str, Any], *arguments: Any) -> None:
    (connectivity if "at" in trial else images).check(trial, *arguments)


FIXED, TAIL = copies("constant"), copies("tail")
QUARTERED = (
    "10,000 of the 40,000 to train on: an epoch has a quarter of the steps, so that epoch 50 comes after "
    "as many steps as epoch 12 with all of them."
)


def _quartered(*studies: Study) -> tuple[Study, ...]:
    return tuple(replace(one, choices={**one.choices, "images": QUARTERED}) for one in studies)


QUARTER: dict[str, Any] = {"limit": 10_000, "epochs": 100, "keep_at": (5, 25, 50)}

LATE = (
    "when the preset long was known, so that it has comparisons of its own; SGDM and SGDM, halved at 100, "
    "are the runs of long, and are compared there."
)


def _long(lr: float, *more: str) -> Study:
    """A switch at 100, of 200 epochs."""
    arms = ("TAM", "SGDM, halved at 100", "TAM until 100, then SGDM", *more)
    made = study(lr, (100,), keep=False, limit=10_000).only(arms, None)
    return replace(made, title=f"Warm-up, TAM at {lr:g}, 200 epochs")


def _late() -> Study:
    made = _long(0.1, "SGDM, half its lr", "SGDM at TAM's effective lr")
    halved = "SGDM, halved at 100"
    arms = (replace(arm, versus="") if arm.name == halved else arm for arm in made.arms)
    return replace(made, arms=tuple(arms), choices={**made.choices, "planned": LATE})


TERMS = {term: CHOICES[term] for term in ("the switch", "a jump", "copies", "barrier")}
SMALL: dict[str, Any] = {
    "data": "digits", "model": "tiny", "batch": 64, "held_out": 300, "limit": 256, "epochs": 5,
    "keep_at": (1, 2),
}  # fmt: skip

EXPERIMENT = Experiment(
    "warmup",
    "Warm-up with TAM and mode connectivity (the paper's section 4.4)",
    run,
    config_of,
    {
        "paper": (study(0.1), study(0.2), FIXED, TAIL),
        "fair": (fair(),),
        "quick": _quartered(
            *(study(lr, (25, 50), **QUARTER) for lr in (0.1, 0.2)),
            *(copies(schedule, QUARTER["keep_at"], **QUARTER) for schedule in ("constant", "tail")),
        ),
        "long": _quartered(_long(0.2)),
        "late": _quartered(_late(), copies("constant", (100, 150), limit=10_000)),
        "smoke": tuple(
            replace(one, seeds=(0, 1), choices={**variants.SMALL, **TERMS}, small=True)
            for one in (study(0.2, (1, 2), **SMALL), copies("tail", (1, 2), **SMALL))
        ),
    },
    CHOICES,
    variants.CURVES,
    figures,
    check,
    says=jumps,
)
