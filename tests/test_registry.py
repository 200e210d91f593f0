"""The registry against the paper's tables."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import pickle

import pytest
import torch

from tam import registry
from tests.helpers import parameters, train

# Tables "Details on grid search" and "Best learning rate", column CIFAR10 / ResNet18, of the paper.
PAPER = {
    "sgd": (0.1, (0.1, 0.01, 0.001, 0.0001)),
    "sgdm": (0.1, (0.1, 0.01, 0.001, 0.0001)),
    "tam": (0.2, (0.2, 0.02, 0.002, 0.0002)),
    "adam": (0.001, (0.1, 0.01, 0.001, 0.0001)),
    "angulargrad": (0.001, (0.1, 0.01, 0.001, 0.0001)),
    "adatam": (0.0001, (0.1, 0.01, 0.001, 0.0001)),
    "adamw": (None, (5e-6, 1e-5, 5e-5)),
    "adatamw": (None, (5e-6, 1e-5, 5e-5)),
}


def test_it_has_the_papers_figures() -> None:
    found = {name: (info.lr, info.lr_grid) for name, info in registry.OPTIMIZERS.items()}
    assert {name: found[name] for name in PAPER} == PAPER


@pytest.mark.parametrize("name", registry.OPTIMIZERS)
def test_every_entry_makes_an_optimizer_that_steps(name: str) -> None:
    info = registry.get(name)
    optimizer = info.create(parameters([(3,)]), lr=0.01)
    assert type(optimizer) is info.cls and optimizer.param_groups[0]["lr"] == 0.01
    train(optimizer, 2)
    assert hasattr(optimizer, "alignment") == info.has_alignment
    assert info.has_alignment == (name in ("tam", "adatam", "adatamw")) or name not in PAPER
    if info.lr is not None:
        assert info.create(parameters([(3,)])).param_groups[0]["lr"] == info.lr
    else:
        with pytest.raises(ValueError, match="states no lr but a grid"):
            info.create(parameters([(3,)]))


def test_the_baselines_are_torchs() -> None:
    sgdm = registry.get("sgdm").create(parameters([(3,)]))
    assert isinstance(sgdm, torch.optim.SGD) and sgdm.param_groups[0]["momentum"] == 0.9
    assert registry.get("sgd").create(parameters([(3,)])).param_groups[0]["momentum"] == 0


def test_entries_are_frozen() -> None:
    info = registry.get("tam")
    assert isinstance(info, registry.OptimizerInfo)
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.lr = 1.0  # type: ignore[misc]
    assert hash(info) == hash(copy.deepcopy(info))
    assert pickle.loads(pickle.dumps(info)) == info
    with pytest.raises(TypeError):
        registry.OPTIMIZERS["tam"] = info  # type: ignore[index]


def test_the_example_in_the_docstring_runs() -> None:
    results = doctest.testmod(registry)
    assert results.attempted > 0 and results.failed == 0


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'nosuch': must be one of sgd, sgdm, tam"):
        registry.get("nosuch")
