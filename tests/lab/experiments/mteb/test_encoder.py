"""Sentence encoders: mean pooling against a loop over texts, kept vectors, and what cannot be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tam.lab.core.errors import LabError
from tam.lab.experiments.llm.mteb.embeddings import StoredEncoder, TransformerEncoder, text_key
from tests.lab.experiments.mteb.test_local_data import TOPICS

pytest.importorskip("transformers")
CPU = torch.device("cpu")
TEXTS = ["card bank money", "dog", "cell gene tissue blood unheard cell protein", "", "cat river", "dog"]


def tiny(folder: Path, seed: int = 0) -> str:
    """A random BERT whose tokens are the topics' words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(word for topic in TOPICS for word in topic)]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=24, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return str(folder)


def one_by_one(model: Any, tokenizer: Any, texts: list[str], longest: int = 24) -> np.ndarray:
    """The means without batches, padding or masks."""
    found = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        ids = ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]]
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).last_hidden_state[0].mean(0))
    return torch.stack(found).numpy()


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_mean_pooling(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformerEncoder, "batch_size", batch)
    encoder = TransformerEncoder(tiny(tmp_path), CPU)
    found = encoder.vectors(TEXTS)
    assert found.dtype == np.float32 and found.shape == (6, 16)
    expected = one_by_one(encoder.model, encoder.tokenizer, TEXTS)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(np.linalg.norm(found, axis=1), 1)
    assert encoder.vectors([]).shape == (0, 16)


def test_texts_are_cut_where_positions_end(tmp_path: Path) -> None:
    encoder, texts = TransformerEncoder(tiny(tmp_path), CPU), ["dog cat " * 30, "dog"]
    expected = one_by_one(encoder.model, encoder.tokenizer, texts)
    np.testing.assert_allclose(encoder.vectors(texts), expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_off_while_texts_are_encoded(tmp_path: Path) -> None:
    encoder = TransformerEncoder(tiny(tmp_path), CPU)
    assert not encoder.model.training
    np.testing.assert_array_equal(encoder.vectors(TEXTS), encoder.vectors(TEXTS))


def test_vectors_are_looked_up_by_text(tmp_path: Path) -> None:
    encoder = TransformerEncoder(tiny(tmp_path), CPU)
    vectors = encoder.vectors(TEXTS)
    np.testing.assert_array_equal(vectors[1], vectors[5])
    vector_by_key = {text_key(one): row.astype(np.float16) for one, row in zip(TEXTS, vectors, strict=True)}
    lookup = StoredEncoder("a model", [], vector_by_key)
    found = lookup.vectors(["cat river", "dog"])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, vectors[[4, 1]], rtol=1e-3, atol=1e-3)
    with pytest.raises(LabError, match="no embedding of 'another river'"):
        lookup.vectors(["dog", "another river"])


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    whole = Path(tiny(tmp_path / "whole"))
    with pytest.raises(LabError, match=r"model .*/nothing cannot be loaded"):
        TransformerEncoder(str(tmp_path / "nothing"), CPU)
    bare = shutil.copytree(whole, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(LabError, match=r"model .*/bare has no tokenizer"):
        TransformerEncoder(str(bare), CPU)
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(LabError, match=r"whole has no weights for .*layer\.2\..* \(16 tensors are missing\)"):
        TransformerEncoder(str(whole), CPU)
