"""Embeddings of texts: the mean of a transformer's last hidden states, or vectors stored in a file.

The file holds the model, the tasks, keys of texts, and vectors in half precision. Embeddings can be made and
stored without mteb.
"""

from __future__ import annotations

import importlib
import io
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tam.lab.core.errors import LabError
from tam.lab.core.store import digest_of, write_whole
from tam.lab.models.language import load_network, load_tokenizer, position_count
from tam.lab.training.metrics import autocast

FILE = "embeddings.npz"
Vectors = NDArray[np.float32]  # [n, d]


class CosineEncoder(ABC):
    """What mteb asks of an encoder whose vectors are compared by their cosine."""

    @abstractmethod
    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return one vector per text."""

    def encode(self, inputs: Iterable[Mapping[str, Any]], **kwargs: Any) -> Vectors:
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
    """A transformer and its tokenizer, from a folder or by their name on the hub."""

    batch_size = 64

    def __init__(self, model: str, device: torch.device) -> None:
        network, _ = load_network(model, "AutoModel")
        self.model, self.device = network.to(device).eval(), device
        self.tokenizer = load_tokenizer(model, needs_mask=False)
        self.max_length = min(self.tokenizer.model_max_length, position_count(network.config))

    @torch.inference_mode()
    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return one vector per text. A text that comes more than once is encoded once."""
        unique_texts = sorted(dict.fromkeys(texts), key=len, reverse=True)  # needs little padding
        vectors = np.empty((len(unique_texts), self.model.config.hidden_size), np.float32)
        for start in range(0, len(unique_texts), self.batch_size):
            batch = unique_texts[start : start + self.batch_size]
            tokens = self.tokenizer(
                batch, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
            ).to(self.device)
            with autocast(self.device):
                states = self.model(**tokens).last_hidden_state
            mask = tokens["attention_mask"].unsqueeze(2)
            vectors[start : start + len(batch)] = ((states.float() * mask).sum(1) / mask.sum(1)).cpu().numpy()
        row_by_text = {text: i for i, text in enumerate(unique_texts)}
        return vectors[[row_by_text[text] for text in texts]]


@dataclass(frozen=True)
class StoredEncoder(CosineEncoder):
    """Vectors by the keys of their texts, the model that made them, and the tasks they are for."""

    model: str
    tasks: list[str]
    vector_by_key: Mapping[str, NDArray[np.float16]]

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return one vector per text. Raise LabError if one is not stored."""
        if missing := [text for text in texts if text_key(text) not in self.vector_by_key]:
            raise LabError(f"there is no embedding of {missing[0]!r}")
        return np.stack([self.vector_by_key[text_key(text)] for text in texts]).astype(np.float32)


def text_key(text: str) -> str:
    """Return the key that a text's vector is stored under."""
    return digest_of(text.encode())


def write_embeddings(
    texts: Sequence[str], vectors: Vectors, folder: Path, model: str, tasks: Sequence[str]
) -> None:
    """Write the vectors of different texts. They replace the embeddings in the folder."""
    with np.errstate(over="ignore"):
        half = vectors.astype(np.float16)
    if not np.isfinite(half).all():
        raise LabError(f"an embedding by {model} is not finite in half precision")
    buffer, keys = io.BytesIO(), [text_key(text) for text in texts]
    np.savez(buffer, model=model, tasks=np.array(tasks, str), keys=np.array(keys, "S16"), vectors=half)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, buffer.getvalue())


def read_embeddings(folder: Path) -> StoredEncoder:
    """Return the embeddings in a folder."""
    path = folder / FILE
    try:
        with np.load(path) as stored:
            keys, vectors = stored["keys"].astype(str).tolist(), stored["vectors"]
            if not np.isfinite(vectors).all():
                raise ValueError("a vector is not finite")
            by_key = dict(zip(keys, vectors, strict=True))
            return StoredEncoder(str(stored["model"]), stored["tasks"].tolist(), by_key)
    except FileNotFoundError as error:
        raise LabError(f"{path} is missing: make the embeddings again") from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise LabError(f"{path} is damaged: make the embeddings again") from error
