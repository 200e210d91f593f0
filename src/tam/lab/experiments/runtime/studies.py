"""What AdaTAMW costs compared with AdamW (the paper's running times: 1.12 times AdamW on BERT-large)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from tam import registry
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, ReportExtras
from tam.lab.core.study import Curve, Metric, Study, Table, Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.runtime import trial

NOTES = read_toml(Path(__file__).with_name("notes.toml"))
NO_DECAY: dict[str, Any] = {"weight_decay": 0.0}


def study(batch: int, length: int, model: str = "BERT-large", rounds: int = 7) -> Study:
    minutes = NOTES["paper_minutes"]
    ratio = mean(with_tam / without for with_tam, without in zip(*minutes.values(), strict=True))
    return Study(
        f"{batch}x{length}",
        f"{model}, {batch} rows of {length} tokens",
        {"model": model, "batch": batch, "length": length, "epochs": rounds},
        (Variant("AdamW", "adamw", (1e-5,), NO_DECAY), Variant("AdaTAMW", "adatamw", (2e-6,), NO_DECAY)),
        baseline="AdamW", seeds=(0, 1, 2), paper={"AdaTAMW": (round(ratio, 3), None)}, outcome="ratio",
        label="time of a step, AdamW's = 1", higher=False, margin=0.02, digits=3, controls=False,
    )  # fmt: skip


def time_tables(plan: Plan) -> list[Table]:
    """Return step times and tokens per second."""
    rows = []
    for outcome in plan.outcomes():
        own, adamw, speed = (
            list(outcome.values(key).values()) for key in ("step_ms", "adamw_ms", "tokens_per_second")
        )
        if own:
            times = [f"{value:.2f}" for value in (mean(own), min(own), max(own), mean(adamw))]
            rows.append([outcome.variant.name, *times, f"{mean(speed):,.0f}", str(len(own))])
    header = [
        "variant",
        "ms per step",
        "lowest",
        "highest",
        "AdamW, same process (ms)",
        "tokens per second",
        "n",
    ]
    return [Table(header, rows)] if rows else []


FRESH = tuple(range(3, 13))  # seeds that no stored trial has: those have 0 to 2


def compare_memory() -> tuple[bool, str, str]:
    """Return whether TAM and AdaTAM keep what SGDM and Adam keep and one scalar more (claim 22)."""

    def state_bytes(name: str) -> int:
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))
        network(torch.ones(2, 64)).sum().backward()
        optimizer = registry.get(name).create(network.parameters(), lr=1e-4)
        optimizer.step()
        states = (value for state in optimizer.state.values() for value in state.values())
        return sum({id(x): x.nbytes for x in states if isinstance(x, torch.Tensor)}.values())

    extra = [state_bytes(ours) - state_bytes(other) for ours, other in (("tam", "sgdm"), ("adatam", "adam"))]
    return max(extra) <= 4, f"{extra[0]} and {extra[1]} bytes more", "One scalar more than SGDM and Adam"


EXPERIMENT = Experiment(
    name="runtime",
    title="Running time (the paper's appendix)",
    config=trial.Config, run=trial.run,
    presets={
        "paper": (study(8, 512), study(32, 512), study(8, 128)),
        "fair": (study(8, 512),),
        # Of claim 11 in registered.md.
        "registered": tuple(replace(study(batch, 512), seeds=FRESH, margin=0.05) for batch in (8, 32)),
        "quick": (study(8, 512, rounds=3),),
        "smoke": (replace(study(2, 16, "tiny-bert", rounds=2), seeds=(0, 1), paper={}, small=True),),
    },
    choices=NOTES["choices"],
    curves=tuple(Curve(**curve) for curve in NOTES["curves"]),
    metrics=(Metric("ratio", higher_is_better=False),),
    claims=(11, 22), computed={"memory": compare_memory}, runs_alone=True,
    extras=ReportExtras(tables=time_tables),
)  # fmt: skip
