"""Keys of trials: those of the published results, and that no default of a class is part of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tam.lab.core import config
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import PACKED_FILE, load_results
from tam.lab.experiments.images import trial as images
from tam.lab.optimizers import rule_of
from tam.lab.optimizers.rule import Rule

RESULTS = Path(__file__).parents[3] / "results"
PUBLISHED = 965  # before 2026-11-17; later trials must keep their keys, too
# Recorded with a trial, and no part of its config: they depend on the device or are an attribute of the run.
RULE = {field.name for field in fields(Rule)}
NOT_OF_THE_CONFIG = {"fused", "foreach", "capturable", "initial_lr", "decoupled_weight_decay"}


@cache
def published() -> tuple[tuple[str, str, str, dict[str, Any], dict[str, Any]], ...]:
    """Return experiment, date, key, config and recorded optimizer options of every published trial."""
    found = []
    for path in sorted(RESULTS.glob(f"**/{PACKED_FILE}")):
        for record in load_results(path):
            options = record.result.get("settings", {}).get("options", {})
            if "damping" in record.config or "warmup_step" in options:  # recorded of a control, or afterwards
                options = {}
            names = options.keys() - NOT_OF_THE_CONFIG
            if path.parent.name == "sgd_ladder":  # its config refuses what the lab's rules do not have
                names &= RULE
            recorded = {k: options[k] for k in names}
            date = record.result["timing"].get("date", "")
            found.append((path.parent.name, date, record.key, record.config, recorded))
    return tuple(found)


def key_of(experiment: str, config: dict[str, Any]) -> str:
    return get_experiment(experiment).config(**config).key


def renamed() -> list[str]:
    """Return the published trials that would be stored under another key today.

    A trial's key must follow from its stored config, and also from that config with every option spelled out
    as the optimizer had it in the run.
    """
    return [
        f"{name}/{key}"
        for name, _, key, config, recorded in published()
        for options in ({}, recorded)
        if get_experiment(name).config(**{**config, "options": {**config.get("options", {}), **options}}).key
        != key
    ]


def test_every_published_trial_keeps_its_key() -> None:
    assert sum(date < "2026-11-17" for _, date, *_ in published()) == PUBLISHED
    assert sum(bool(recorded) for *_, recorded in published()) > 200
    assert renamed() == []


@pytest.mark.parametrize(
    "optimizer, option, value",
    [("sgdm", "momentum", 0.0), ("tam", "smoothing", 0.5), ("adatamw", "bias_correction", True),
     ("adamw", "weight_decay", 0.0), ("adam", "eps", 1e-6)],
)  # fmt: skip
def test_a_changed_default_would_rename_published_trials(
    optimizer: str, option: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above sees it."""
    table: Mapping[str, Any] = config.CANONICAL_DEFAULTS
    changed = {**table, optimizer: {**table[optimizer], option: value}}
    monkeypatch.setattr(config, "CANONICAL_DEFAULTS", changed)
    assert renamed()


SAME = {"weight_decay": 0, "maximize": False, "differentiable": False, "foreach": None}
SGD = {**SAME, "dampening": 0, "nesterov": False, "fused": None}
ADAM = {**SAME, "betas": (0.9, 0.999), "eps": 1e-8, "capturable": False}
TORQUE = {"smoothing": 0.9, "floor": 1e-8, "scope": "global", "max_grad_norm": None, "gain": 1.0,
          "capturable": False, "fused": None}  # fmt: skip
ADATAM = {**ADAM, **TORQUE, "ema": False, "bias_correction": False}
# On 2026-11-17; and gain, whose default is the rule as it was before.
DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {**SGD, "momentum": 0},
    "sgdm": {**SGD, "momentum": 0.9},
    "tam": {**SAME, **TORQUE, "momentum": 0.9},
    "adam": {**ADAM, "amsgrad": False, "fused": None, "decoupled_weight_decay": False},
    "adamw": {**ADAM, "amsgrad": False, "fused": None, "weight_decay": 0.01},
    "angulargrad": {**ADAM, "method": "cos", "vote": False},
    "adatam": ADATAM,
    "adatamw": {**ADATAM, "weight_decay": 0.01},
}
BOUNDS = {"min_damping": 0.0, "max_damping": 1.0, "soft_restart": False}
STUDIED: dict[str, dict[str, Any]] = {  # on 2026-11-19
    "tam-variant": {
        "momentum": 0.9, "smoothing": 0.9, "floor": 1e-8, "scope": "global", "gain": 1.0, "capturable": True,
        "weight_decay": 0.0, **BOUNDS,
    },
    "adatamw-variant": {
        "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "smoothing": 0.9, "floor": 1e-8,
        "scope": "global", "gain": 1.0, "preconditioned": False, "bias_correction": False, **BOUNDS,
    },
    "c-adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "hypergradient-adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "hyper_lr": 0.02},
    "schedule-free-adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
}  # fmt: skip


@pytest.mark.parametrize("optimizer", [*DEFAULTS, *STUDIED])
def test_options_at_their_default_are_no_part_of_a_key(optimizer: str) -> None:
    """The defaults of the classes do not matter; any other value is part of it."""
    defaults = {**DEFAULTS, **STUDIED}[optimizer]

    def key(**options: Any) -> str:
        trial = {"data": "digits", "model": "tiny", "optimizer": optimizer, "lr": 0.1, "seed": 0, "epochs": 1}
        return images.Config(**trial, options=options).key

    assert key(**defaults) == key()
    others = {name: "another" if isinstance(value, str) else 7 for name, value in defaults.items()}
    keys = {key(**{name: value}) for name, value in others.items()}
    assert len(keys | {key()}) == len(others) + 1


@pytest.mark.parametrize("optimizer", STUDIED)
def test_the_options_left_out_are_the_defaults_of_the_rule(optimizer: str) -> None:
    assert {**config.CANONICAL_DEFAULTS[optimizer]} == json.loads(json.dumps(STUDIED[optimizer]))
    options = {name: value for name, value in STUDIED[optimizer].items() if name != "capturable"}
    assert rule_of(optimizer, options) == rule_of(optimizer, {})


@pytest.mark.parametrize("optimizer", ["adatam", "adatamw"])
def test_no_bias_correction_has_two_spellings(optimizer: str) -> None:
    trial = {"data": "digits", "model": "tiny", "optimizer": optimizer, "lr": 0.1, "seed": 0, "epochs": 1}
    none, false, true = (
        images.Config(**trial, options={"bias_correction": value}).key for value in (None, False, True)
    )
    assert none == false != true
