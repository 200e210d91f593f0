"""The registry against the paper's tables."""

from __future__ import annotations

import copy
import dataclasses
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
    assert {name: (r.lr, r.lr_grid) for name, r in registry.OPTIMIZERS.items()} == PAPER


@pytest.mark.parametrize("name", registry.OPTIMIZERS)
def test_every_record_makes_an_optimizer_that_steps(name: str) -> None:
    record = registry.get(name)
    optimizer = record.create(parameters([(3,)]), lr=0.01)
    assert type(optimizer) is record.cls and optimizer.param_groups[0]["lr"] == 0.01
    train(optimizer, 2)
    assert hasattr(optimizer, "alignment") == record.has_alignment == (name in ("tam", "adatam", "adatamw"))
    if record.lr is not None:
        assert record.create(parameters([(3,)])).param_groups[0]["lr"] == record.lr
    else:
        with pytest.raises(ValueError, match="states no lr but a grid"):
            record.create(parameters([(3,)]))


def test_the_baselines_are_torchs() -> None:
    sgdm = registry.get("sgdm").create(parameters([(3,)]))
    assert isinstance(sgdm, torch.optim.SGD) and sgdm.param_groups[0]["momentum"] == 0.9
    assert registry.get("sgd").create(parameters([(3,)])).param_groups[0]["momentum"] == 0


def test_records_are_frozen() -> None:
    record = registry.get("tam")
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.lr = 1.0  # type: ignore[misc]
    assert hash(record) == hash(copy.deepcopy(record))
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(TypeError):
        registry.OPTIMIZERS["tam"] = record  # type: ignore[index]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lion': must be one of sgd, sgdm, tam"):
        registry.get("lion")
