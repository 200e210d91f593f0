"""Scores of an encoder by mteb: at once, or from embeddings that were made where mteb is not."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tam.lab.data import DataError
from tam.lab.embedding import files, local, tasks
from tam.lab.embedding.encoder import Cosine, Encoder, Lookup, load, mean_pooled
from tam.lab.store import LabError, digest_of, digest_of_folder, write_whole


def evaluate(trial: Path, names: Sequence[str], data_folder: Path, device: torch.device) -> None:
    """Of a trial's network; where mteb is not installed, the embeddings scores can be had from elsewhere.

    What was embedded is looked up, and the network need not be here.
    """
    model, embeddings, out = str(trial / "model"), trial / "embeddings", trial / "mteb"
    if not names:
        return
    if importlib.util.find_spec("mteb") is None:
        embed(model, names, data_folder, embeddings, device)
        return
    embedded = files.index_of(embeddings)["tasks"] if (embeddings / files.INDEX).exists() else []
    looked_up, others = [n for n in names if n in embedded], [n for n in names if n not in embedded]
    if looked_up:
        score(model, looked_up, data_folder, out, device, embeddings)
    if others and not Path(model).is_dir():
        raise LabError(f"{trial} has neither its network nor embeddings for {', '.join(others)}")
    if others:
        score(model, others, data_folder, out, device)


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
    kept: dict[str, float | None] = dict.fromkeys(names)
    for name in names:
        with suppress(DataError):  # it is told of where the task is run
            kept[name] = _kept(out / f"{name}.json", {"model": who, **_data(name, data_folder)})
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
            if "CUDA error" in str(error):
                raise  # the process can do no more on that device
            (out / f"{name}.json").unlink(missing_ok=True)  # it is of another model, or damaged
            tell(f"{name} has no score: {error!r}")
    return {name: found for name, found in kept.items() if found is not None}


def found(out: Path) -> dict[str, float]:
    """The main scores that are there, by task."""
    kept = {path.stem: _kept(path, {}) for path in sorted(out.glob("*.json"))}
    return {name: score for name, score in kept.items() if score is not None}


def identity(model: str) -> str:
    """A digest of a folder's files, as other weights may come to lie there; of others the name."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    return digest_of_folder(folder)


def _embedded_by(embeddings: Path, model: str) -> str:
    """Who made them; raises where the model is here and it is another."""
    who = str(files.index_of(embeddings)["model"])
    if Path(model).is_dir() and identity(model) != who:
        raise LabError(f"{embeddings} has embeddings by another model than {model}: make them again")
    return who


def _data(name: str, data_folder: Path) -> dict[str, str]:
    """Where the data is from, which it is, and how it differs from MTEB's."""
    if not local.has(name, data_folder):
        return {"data": "hub", "difference": "none: the hub's data"}
    digest = digest_of(repr(local.read(name, data_folder)).encode())
    return {"data": "files", "digest": digest, "difference": tasks.DIFFERENCES[name]}


def _kept(path: Path, about: dict[str, str]) -> float | None:
    """A score, if it is there and of that; a damaged file is made anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        same = all(found[key] == value for key, value in about.items())
        return float(found["score"]) if same else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _evaluate(name: str, encoder: Cosine, data_folder: Path) -> dict[str, Any]:
    """Without mteb's own records of results, which would take one checkpoint for another."""
    task = tasks.get(name, data_folder)
    import mteb

    logging.getLogger("mteb").setLevel(logging.ERROR)  # it tells of newer versions of a task, each time
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*superseded.*")
        found = mteb.evaluate(
            encoder, task, cache=None, co2_tracker=False, show_progress_bar=False, public_only=False
        ).task_results[0]
    main = 100 * float(found.get_score())
    if not math.isfinite(main):
        raise LabError(f"mteb's score is {main}")
    about = {**_data(name, data_folder), "mteb": version("mteb")}
    return {"task": name, "score": main, **about, "scores": found.scores}
