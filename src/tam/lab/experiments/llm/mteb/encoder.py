"""Encoders with mteb's interface: a transformer whose last hidden states are averaged, or stored vectors.

`load_encoder` and `embed_texts` do not need mteb.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tam.lab.core.errors import LabError
from tam.lab.experiments.llm.mteb.embeddings import text_key
from tam.lab.models.language import check_missing_weights, load_tokenizer, position_count, transformers
from tam.lab.training.metrics import autocast

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Vectors = NDArray[np.float32]  # [n, d]


def load_encoder(model: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a transformer and its tokenizer, from a folder or by their name on the hub."""
    try:
        network, report = transformers().AutoModel.from_pretrained(model, output_loading_info=True)
    except Exception as error:  # of many kinds: no such folder, no network, another format
        raise LabError(f"model {model} cannot be loaded: {error}") from error
    # The pooler's result is not used, and masked-LM checkpoints have none.
    check_missing_weights(model, [key for key in report["missing_keys"] if "pooler" not in key])
    return network.to(device, torch.float32), load_tokenizer(model, needs_mask=False)


@torch.inference_mode()
def embed_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], device: torch.device,
    batch: int = 64, max_length: int | None = None,
) -> Vectors:  # fmt: skip
    """Return the mean of each text's last hidden states, without dropout.

    Texts are cut after `max_length` tokens, or where the tokenizer or the model's positions end.
    """
    length = max_length or min(tokenizer.model_max_length, position_count(model.config))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)  # needs little padding
    vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
    was_training = model.training
    model.train(False)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        tokens = tokenizer(
            [texts[i] for i in rows], padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(device)
        with autocast(device):
            states = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(2)
        vectors[rows] = ((states.float() * mask).sum(1) / mask.sum(1)).cpu().numpy()
    model.train(was_training)
    return vectors


class CosineEncoder(ABC):
    """What mteb asks of an encoder whose vectors are compared by their cosine."""

    @abstractmethod
    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return one vector per text."""

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, task_metadata: Any, hf_split: str, hf_subset: str,
        prompt_type: Any = None, **kwargs: Any,
    ) -> Vectors:  # fmt: skip
        """Return the vectors of all batches' texts."""
        return self.vectors([text for batch in inputs for text in batch["text"]])

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        return _mteb("similarity_functions").cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        return _mteb("similarity_functions").pairwise_cos_sim(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> Any:
        """Nothing: mteb needs it for its own records, which are not kept."""
        return _mteb("models").ModelMeta.create_empty()


def _mteb(module: str) -> Any:
    return importlib.import_module(f"mteb.{module}")


class TransformerEncoder(CosineEncoder):
    """A transformer."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.model, self.tokenizer = load_encoder(model, device)
        self.device = device

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return one vector per text. A text that comes more than once is encoded once."""
        row_by_text = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        rows = embed_texts(self.model, self.tokenizer, list(row_by_text), self.device)
        return rows[[row_by_text[text] for text in texts]]


class StoredEncoder(CosineEncoder):
    """Vectors that were stored, by the keys of their texts."""

    def __init__(self, vector_by_key: Mapping[str, NDArray[np.float16]]) -> None:
        self.vector_by_key = vector_by_key

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return one vector per text. Raise LabError if one is not stored."""
        for text in texts:
            if text_key(text) not in self.vector_by_key:
                raise LabError(f"there is no embedding of {text!r}")
        return np.stack([self.vector_by_key[text_key(text)] for text in texts]).astype(np.float32)
