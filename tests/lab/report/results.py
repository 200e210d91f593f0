"""Made-up results of one study, in memory, and what to read from a report."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tam.lab.core.config import TrialConfig
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment
from tam.lab.core.results import Results, TrialRecord
from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Curve, Study, Variant
from tam.lab.experiments.images.trial import Config

SGDM, TAM, LESS = (
    [90.0, 90.2, 90.1, 90.4, 90.3],
    [92.0, 92.3, 92.2, 92.3, 92.1],
    [91.0, 91.1, 91.3, 91.2, 91.0],
)
ALL = {"SGDM": SGDM, "TAM": TAM, "TAM, shuffled damping": LESS, "TAM, constant damping": LESS}
VARIANTS = (
    Variant("SGDM", "sgdm", (0.1,)),
    Variant("TAM", "tam", (0.2,)),
    Variant("TAM, shuffled damping", "tam", control_of="TAM", damping="shuffled"),
    Variant("TAM, constant damping", "tam", control_of="TAM", damping="mean"),
    Variant("SGDM at TAM's effective lr", "sgdm", control_of="TAM", lr_ratio=0.5),
)
WORKLOAD = {"data": "digits", "model": "tiny", "epochs": 1}


def plan_for(
    seeds: int = 5,
    *,
    results: Results | None = None,
    experiment: Mapping[str, Any] | None = None,
    **more: Any,
) -> Plan:
    """Return a plan of one study. `more` are fields of the study, `experiment` those of the experiment."""
    fields = {"name": "digits", "title": "Digits", "workload": WORKLOAD, "variants": VARIANTS}
    study = Study(**{**fields, "baseline": "SGDM", "seeds": tuple(range(seeds)), **more})
    declared = {
        "config": Config,
        "choices": {},
        "curves": (Curve("loss", "Loss", "loss"),),
        **(experiment or {}),
    }
    made = Experiment(
        name="images", title="", run=lambda *_: iter(()), presets={"paper": (study,)}, **declared
    )
    return Plan(made, study, Results() if results is None else results, "paper")


def finish(plan: Plan, trial: TrialConfig, validation: float, **more: Any) -> None:
    """Add a finished trial. `more` are entries of its result."""
    timing, machine = {"seconds": 1.0, "together": 1, "date": "2026-01-01"}, {"hardware": "CPU"}
    result = {"validation": validation, "diverged": False, "timing": timing, "machine": machine, **more}
    record = TrialRecord(trial.key, result)
    record.metrics = [{"epoch": epoch, "loss": 1 / epoch} for epoch in (1, 2, 3)]
    record.alignment = None
    plan.results.records.setdefault(trial.key, record)


def group_with(outcomes: Mapping[str, Sequence[float]], seeds: int = 5, **more: Any) -> PresetGroup:
    """Return a study with these outcomes, seed by seed. A NaN is a run that diverged.

    The baseline at half TAM's lr has the baseline's outcomes.
    """
    plan = plan_for(seeds, **more)
    for name, values in outcomes.items():
        for trial, value in zip(plan.comparison_trials(plan.study.variant(name)) or [], values, strict=False):
            finish(plan, trial, value, diverged=math.isnan(value))
    return PresetGroup([plan], ())


def looks_of(chart: str) -> dict[str, str]:
    """Return the style of each name in a chart's legend."""
    entries = re.findall(r'<path class="line (s\d+)" d="[^"]*"></path>\s*<text[^>]*>([^<]*)</text>', chart)
    return {html.unescape(name): style for style, name in entries}
