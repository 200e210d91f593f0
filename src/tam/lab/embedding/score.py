"""Scores of an encoder by mteb: at once, or from embeddings that were made where mteb is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tam.lab.embedding import files, local, tasks
from tam.lab.embedding.encoder import Cosine, Encoder, Lookup, load, mean_pooled
from tam.lab.store import LabError, digest_of, write_whole


def embed(
    model: str,
    names: Sequence[str],
    data_folder: Path,
    out: Path,
    device: torch.device,
    file_size: int = files.SIZE,
) -> None:
    """Writes the embeddings of all that the tasks ask for, each text once."""
    texts = list(dict.fromkeys(text for name in names for text in local.sentences(name, data_folder)))
    vectors = mean_pooled(*load(model, device), texts, device)
    files.write(texts, vectors, out, identity(model), names, file_size)


def score(
    model: str,
    names: Sequence[str],
    data_folder: Path,
    out: Path,
    device: torch.device,
    embeddings: Path | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, float]:
    """The main scores in percent, by task.

    `out` keeps what mteb gives in TASK.json, which is not computed again for the same model. A task that
    fails is told of and left out. From embeddings the model need not be here. mteb seeds the generators of
    torch, numpy and Python.
    """
    who = identity(model) if embeddings is None else _embedded_by(embeddings, model)
    kept = {name: _kept(out / f"{name}.json", who) for name in names}
    waiting = [name for name, found in kept.items() if found is None]
    if waiting:
        out.mkdir(parents=True, exist_ok=True)
        encoder = Encoder(model, device) if embeddings is None else Lookup(files.read(embeddings))
        about = {"model": who, "how": "end to end" if embeddings is None else "from embeddings"}
    for name in waiting:
        try:
            result = {**about, **_evaluate(name, encoder, data_folder)}
            write_whole(out / f"{name}.json", json.dumps(result, indent=1).encode() + b"\n")
            kept[name] = result["score"]
        except Exception as error:  # whatever mteb, the data or the network meet: the other tasks go on
            tell(f"{name} has no score: {error!r}")
    return {name: found for name, found in kept.items() if found is not None}


def found(out: Path) -> dict[str, float]:
    """The main scores that are there, by task."""
    kept = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))}
    return {name: float(one["score"]) for name, one in kept.items()}


def identity(model: str) -> str:
    """A digest of a folder's files, as other weights may come to lie there; of others the name."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    there = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return digest_of("".join(f"{path.name} {digest_of(path.read_bytes())}\n" for path in there).encode())


def _embedded_by(embeddings: Path, model: str) -> str:
    """Who made them; raises where the model is here and it is another."""
    who = str(files.index_of(embeddings)["model"])
    if Path(model).is_dir() and identity(model) != who:
        raise LabError(f"{embeddings} has embeddings by another model than {model}: make them again")
    return who


def _kept(path: Path, who: str) -> float | None:
    """A model's score, if it is there; a damaged file is made anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return float(found["score"]) if found["model"] == who else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _evaluate(name: str, encoder: Cosine, data_folder: Path) -> dict[str, Any]:
    """Without mteb's own records of results, which would take one checkpoint for another."""
    task = tasks.get(name, data_folder)
    import mteb

    found = mteb.evaluate(
        encoder, task, cache=None, co2_tracker=False, show_progress_bar=False, public_only=False
    ).task_results[0]
    main = 100 * float(found.get_score())
    if not math.isfinite(main):
        raise LabError(f"mteb's score is {main}")
    about = {"difference": tasks.DIFFERENCES.get(name, "none: the hub's data"), "mteb": version("mteb")}
    return {"task": name, "score": main, **about, "scores": found.scores}
