"""Text as tokens: blocks, and what of them is masked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tam.lab.core.errors import LabError
from tam.lab.data import text
from tam.lab.experiments.llm import tokens
from tam.lab.models import language

pytest.importorskip("transformers")


def labels_of_all(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every token's label, of a batch that has those to be predicted alone."""
    found, real = torch.full((batch["input_ids"].numel(),), -100), batch["labels"] != -100
    found[batch["places"][real]] = batch["labels"][real]
    return found.view_as(batch["input_ids"])


def test_masks(tmp_path: Path) -> None:
    tokenizer = language.load_tokenizer(language.locate_model("tiny-bert", tmp_path))
    masks, rows = tokens.MaskingCollator(tokenizer), 400
    ids = torch.randint(10, len(tokenizer), (rows, 32), generator=torch.Generator().manual_seed(0))
    special = torch.zeros(rows, 32, dtype=torch.bool)
    special[:, 0] = True
    given = [tokens.Row(ids[i], special[i], 1000 + i) for i in range(rows)]
    made, again = masks(given), [masks(given[i : i + 7]) for i in range(0, rows, 7)]
    labels = labels_of_all(made)  # of a row they are the same, whatever its company
    assert torch.equal(labels, torch.cat([labels_of_all(some) for some in again]))
    assert torch.equal(made["input_ids"], torch.cat([some["input_ids"] for some in again]))
    assert not torch.equal(labels_of_all(masks([row._replace(mask_seed=8) for row in given])), labels)
    chosen = labels != -100
    assert not chosen[:, 0].any() and torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(made["input_ids"][~chosen], ids[~chosen])
    share = float(chosen[:, 1:].float().mean())
    hidden = float((made["input_ids"][chosen] == tokenizer.mask_token_id).float().mean())
    kept = float((made["input_ids"][chosen] == ids[chosen]).float().mean())
    # 12,400 tokens, some 1,860 of them chosen: three standard deviations.
    assert share == pytest.approx(0.15, abs=0.01)
    assert hidden == pytest.approx(0.8, abs=0.03) and kept == pytest.approx(0.1 + 0.1 / 80, abs=0.03)


def test_a_batch_has_room_for_a_quarter_more_than_is_masked() -> None:
    labels = torch.full((4096,), -100)
    for count, room in ((0, 768), (614, 768), (768, 768), (769, 1536)):
        labels[:count] = 7
        assert len(tokens.select_masked(labels)[0]) == room


@pytest.mark.parametrize("share", [0.0, 0.15, 0.3, 0.9])
def test_what_is_to_be_predicted_has_few_shapes(share: float) -> None:
    labels = torch.where(torch.rand(128, generator=torch.Generator().manual_seed(0)) < share, 7, -100)
    places, chosen = tokens.select_masked(labels)
    assert len(places) == len(chosen) in (24, 48, 72, 96, 120, 144)
    assert len(places) - int((labels != -100).sum()) < 24 or len(places) == 24
    assert torch.equal(labels_of_all({"input_ids": labels, "places": places, "labels": chosen}), labels)


def test_text_is_cut_into_blocks_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = language.load_tokenizer(language.locate_model("tiny-bert", tmp_path))
    given = ("generated", tokenizer, 32, 8, tmp_path, tmp_path)
    blocks = tokens.load_blocks(*given)
    lines = text.read("generated", tmp_path)["valid"]
    plain = [token for line in lines for token in tokenizer(line)["input_ids"]]
    assert blocks["valid"].ids.flatten().tolist() == plain[: len(plain) // 32 * 32]
    cls = blocks["valid"].ids == tokenizer.cls_token_id
    sep = blocks["valid"].ids == tokenizer.sep_token_id
    assert torch.equal(blocks["valid"].special, cls | sep)
    (kept,) = tmp_path.glob("tokens-*.pt")
    again = tokens.load_blocks(*given)
    assert torch.equal(again["train"].ids, blocks["train"].ids)
    many = len(blocks["valid"]) + 1  # a batch is for training alone
    assert len(tokens.load_blocks("generated", tokenizer, 32, many, tmp_path, tmp_path)["valid"]) < many
    monkeypatch.setattr(text, "PARTS", {"train": 300, "valid": 100, "test": 60})
    other = tokens.load_blocks(*given)  # the same text, split otherwise
    assert len(other["valid"]) > len(blocks["valid"])
    monkeypatch.undo()
    kept.write_bytes(b"half")
    with pytest.raises(LabError, match="is damaged"):
        tokens.load_blocks(*given)


def test_what_is_drawn_differs_by_seed_place_and_purpose() -> None:
    """A generator does not read all bits of a number."""
    found = {
        tuple(
            torch.rand(
                4, generator=torch.Generator().manual_seed(tokens.draw_seed(seed, place, what))
            ).tolist()
        )
        for seed in (0, 1, 100)
        for place in (0, 1, 2**20)
        for what in (tokens.MASKS, tokens.DROPOUT, tokens.EVALUATION)
    }
    assert len(found) == 27
