"""Pretraining: the texts of a run, and what happens if one cannot be used."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tam.lab.core.errors import DataError, LabError
from tam.lab.core.runner import check_trial
from tam.lab.core.store import TrialFolder
from tam.lab.experiments.pretrain import trial as pretrain
from tam.lab.experiments.pretrain.studies import EXPERIMENT
from tests.lab.experiments.test_pretrain import STEPS, config, make_population, train, variant


def write_text(root: Path, **parts: str) -> Path:
    (root / "wikitext-2").mkdir(parents=True, exist_ok=True)
    for part in ("train", "valid", "test"):
        (root / "wikitext-2" / f"wiki.{part}.tokens").write_text(parts.get(part, "a b c\n" * 100))
    return root


def test_a_text_is_read_as_bytes(tmp_path: Path) -> None:
    parts = pretrain.read_bytes("wikitext-2", write_text(tmp_path, train=" é \n\n = x =\n" * 5), 16)
    assert bytes(parts["train"].tolist()).decode() == (" é \n\n = x =\n" * 5).removesuffix("\n")
    assert parts.keys() == {"train", "valid", "test"}
    check_trial(EXPERIMENT, config(data="wikitext-2"), tmp_path)


@pytest.mark.parametrize(
    "parts, message",
    [
        (None, "wikitext-2 is incomplete: 3 of 3 files missing in"),
        ({"valid": ""}, "wiki.valid.tokens is empty"),
        ({"train": " \n \n"}, "wiki.train.tokens is empty"),
        ({"train": "a" * 33}, r"the text wikitext-2 \(train\) has 33 bytes: too short for a context of 16"),
        ({"test": "a"}, r"the text wikitext-2 \(test\) has 1 bytes"),
    ],
)
def test_a_text_that_cannot_be_used(parts: dict[str, str] | None, message: str, tmp_path: Path) -> None:
    """A run says so before any trial starts."""
    assert parts is None or write_text(tmp_path, **parts)
    one = config(data="wikitext-2")
    with pytest.raises(LabError, match=message):
        check_trial(EXPERIMENT, one, tmp_path)
    with pytest.raises(LabError, match=message):
        train(tmp_path, [one], 1)
    assert not TrialFolder(tmp_path, one).metrics()
    with pytest.raises(DataError, match="no text 'novel'"):
        check_trial(EXPERIMENT, config(data="novel"), tmp_path)


def test_pair_entropy_is_a_count_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    train, valid = (torch.randint(97, 101, (n,), generator=generator, dtype=torch.uint8) for n in (300, 80))
    text, other = train.tolist(), [*valid.tolist(), 7, 200]  # the last pairs were never seen
    pairs, firsts = Counter(itertools.pairwise(text)), Counter(text[:-1])
    losses = [-math.log((pairs[a, b] + 1) / (firsts[a] + 256)) for a, b in itertools.pairwise(other)]
    found = pretrain.pair_entropy(train, torch.tensor(other, dtype=torch.uint8))
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def contents(root: Path, one: pretrain.Config) -> list[Tensor]:
    """Return the bytes of every step: what goes in, and what is to be predicted."""
    population, seen = make_population(root, one), []
    losses = population._losses

    def record(network: Any, params: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append(torch.cat([x, y[..., -1:]], -1))
        assert torch.equal(x[..., 1:], y[..., :-1])
        return losses(network, params, x, y, dtype)

    population._losses = record
    for _ in range(one.steps):
        population.step()
    return seen


def test_outliers_change_only_the_steps_that_are_drawn(tmp_path: Path) -> None:
    one = config(outliers=0.3)
    drawn = make_population(tmp_path, one).is_outlier[0].tolist()
    assert 0 < sum(drawn) < STEPS
    whole, plain = contents(tmp_path, one), contents(tmp_path, config())
    for is_outlier, ours, theirs in zip(drawn, whole, plain, strict=True):
        assert torch.equal(ours, theirs) != is_outlier
        assert ours.min() >= 0 and ours.max() < 256


SECOND: dict[str, Any] = {"data": "wikitext-2", "second": "generated", "second_steps": 4}


def test_a_second_text_replaces_the_first_and_validates(tmp_path: Path) -> None:
    write_text(tmp_path, train="x" * 500)
    seen = contents(tmp_path, config(**SECOND))
    assert [bool((step == ord("x")).all()) for step in seen] == [True] * 8 + [False] * 4
    text = bytes(pretrain.read_bytes("generated", tmp_path, 16)["train"].tolist())
    assert all(bytes(row.tolist()) in text for step in seen[8:] for row in step[0])
    population = make_population(tmp_path, config(**SECOND))
    valid = pretrain.read_bytes("generated", tmp_path, 16)["valid"]
    assert torch.equal(population.valid, valid)
    train = pretrain.read_bytes("generated", tmp_path, 16)["train"]
    assert population.pair_entropy == pretrain.pair_entropy(train, valid)


def test_fine_tuning_starts_again_at_a_share_of_the_lr(tmp_path: Path) -> None:
    """With a warm-up of a tenth of its steps, at most that of the first part."""
    parts = {"lr": 2.0, "steps": 120, "epochs": 1, "warmup": 10, "second": "generated", "second_steps": 20}
    lrs = config(**parts, second_lr=0.1).schedule().tolist()
    assert lrs[:100] == config(lr=2.0, steps=100, epochs=1, warmup=10).schedule().tolist()
    assert lrs[100:] == pytest.approx(config(lr=0.2, steps=20, epochs=1, warmup=2).schedule().tolist())
    assert (
        config(**parts).schedule().tolist()
        == config(lr=2.0, steps=120, epochs=1, warmup=10).schedule().tolist()
    )


def test_schedule_free_fine_tuning_has_a_share_of_the_lr_too(tmp_path: Path) -> None:
    write_text(tmp_path)
    goes_on, tuned = (
        make_population(tmp_path, variant("V12", **SECOND, second_lr=share)) for share in (0.0, 0.1)
    )
    for step in range(STEPS):
        for one in (goes_on, tuned):
            one.step()
        pairs = zip(goes_on.stack.params, tuned.stack.params, strict=True)
        assert all(torch.equal(p, q) for p, q in pairs) == (step < 8)
