"""Encoders as mteb asks for them: a transformer whose last hidden states are averaged, or vectors it left.

`load` and `mean_pooled` do without mteb.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tam.lab.embedding.files import key_of
from tam.lab.models.language import check_missing, load_tokenizer, positions, transformers
from tam.lab.store import LabError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Vectors = NDArray[np.float32]  # [n, d]


def load(model: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A transformer and its tokenizer, from a folder or by their name on the hub."""
    package = transformers()
    try:
        network, report = package.AutoModel.from_pretrained(model, output_loading_info=True)
    except Exception as error:  # of many kinds: no such folder, no network, another format
        raise LabError(f"model {model} cannot be loaded: {error}") from error
    # The pooler's result is not used, and masked-LM checkpoints have none.
    check_missing(model, [key for key in report["missing_keys"] if "pooler" not in key])
    return network.to(device, torch.float32), load_tokenizer(model, masks=False)


@torch.inference_mode()
def mean_pooled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    device: torch.device,
    batch: int = 64,
    max_length: int | None = None,
) -> Vectors:
    """Of each text the mean of its tokens' last hidden states; without dropout.

    Texts are cut after `max_length` tokens, or where the tokenizer or the model's positions end.
    """
    length = max_length or min(tokenizer.model_max_length, positions(model.config))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)  # little is padded
    found = np.empty((len(texts), model.config.hidden_size), np.float32)
    training = model.training
    model.train(False)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        tokens = tokenizer(
            [texts[i] for i in rows], padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(2)
        found[rows] = ((states.float() * mask).sum(1) / mask.sum(1)).cpu().numpy()
    model.train(training)
    return found


class Cosine(ABC):
    """What mteb asks of an encoder whose vectors are compared by the angle between them."""

    @abstractmethod
    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Of each text its vector."""

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> Vectors:
        """The vectors of all batches' texts, whatever they are for."""
        return self.vectors([text for batch in inputs for text in batch["text"]])

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Of all pairs."""
        from mteb.similarity_functions import cos_sim

        return cos_sim(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Of each with its like."""
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> Any:
        """Nothing: mteb's records, which need it, are not kept."""
        from mteb.models import ModelMeta

        return ModelMeta.create_empty()


class Encoder(Cosine):
    """A transformer."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.model, self.tokenizer = load(model, device)
        self.device = device

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Of each text its vector; a text that comes often is encoded once."""
        place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        found = mean_pooled(self.model, self.tokenizer, list(place), self.device)
        return found[[place[text] for text in texts]]


class Lookup(Cosine):
    """Vectors that were kept, by their texts' digests."""

    def __init__(self, kept: Mapping[str, NDArray[np.float16]]) -> None:
        self.kept = kept

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Of each text its vector; raises where one was not kept."""
        for text in texts:
            if key_of(text) not in self.kept:
                raise LabError(f"there is no embedding of {text!r}")
        return np.stack([self.kept[key_of(text)] for text in texts]).astype(np.float32)
