"""The networks have the sizes their papers give, and those of the paper where it fits."""

from __future__ import annotations

import pytest
import torch

from tam.lab.models import MODELS, get_model, parameters


@pytest.mark.parametrize(
    "name, classes, expected",
    [("resnet18", 10, 11173962), ("resnet34", 10, 21282122), ("mobilenet", 10, 3217226),
     ("resnet50", 1000, 25557032)],
)  # fmt: skip
def test_parameters(name: str, classes: int, expected: int) -> None:
    with torch.device("meta"):
        model = get_model(name).make(classes)
    assert parameters(model) == expected


def test_outputs() -> None:
    for name in ("resnet18", "mobilenet"):
        model = get_model(name).make(10).eval()
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert get_model("tiny").make(10)(torch.zeros(2, 3, 8, 8)).shape == (2, 10)


def test_where_the_papers_figure_does_not_fit_is_said() -> None:
    assert "13M fits neither" in MODELS["mobilenet"].note and "ViT-B/32" in MODELS["vit"].note
    with pytest.raises(ValueError, match="model 'resnet19': must be one of resnet18, "):
        get_model("resnet19")
