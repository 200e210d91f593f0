"""The networks have the sizes their papers give, and those of the paper where it fits."""

from __future__ import annotations

import pytest
import torch

from tam.lab.models import MODELS, count_parameters, get_model


@pytest.mark.parametrize(
    "name, classes, expected",
    [("resnet18", 10, 11173962), ("resnet34", 10, 21282122), ("mobilenet", 10, 3217226),
     ("resnet50", 1000, 25557032), ("mlp", 10, 1841162)],
)  # fmt: skip
def test_numbers_of_parameters(name: str, classes: int, expected: int) -> None:
    with torch.device("meta"):
        model = get_model(name).make(classes)
    assert count_parameters(model) == expected


def test_shapes_of_outputs() -> None:
    for name in ("resnet18", "mobilenet", "mlp"):
        model = get_model(name).make(10).eval()
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    for name in ("tiny", "tiny-mlp"):
        assert get_model(name).make(10)(torch.zeros(2, 3, 8, 8)).shape == (2, 10)


def test_a_note_says_where_the_papers_number_does_not_fit() -> None:
    assert "13M fits neither" in MODELS["mobilenet"].note and "ViT-B/32" in MODELS["vit"].note
    with pytest.raises(ValueError, match=r"model must be one of resnet18, .*, got 'resnet19'"):
        get_model("resnet19")
