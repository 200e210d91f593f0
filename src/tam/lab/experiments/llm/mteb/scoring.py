"""Scores of an encoder by mteb: directly, or from embeddings that were made where mteb is not installed.

Where there are files, tasks have the data of `local_data.py` instead of the hub's. Everything but the data is
mteb's own: splits, experiments, samples per label, measures.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tam.lab.core.errors import DataError, LabError, missing_package
from tam.lab.core.store import SCORES_FOLDER, digest_of, digest_of_folder, refuse_links, write_whole
from tam.lab.core.toml import read_toml
from tam.lab.experiments.llm.mteb import embeddings, local_data
from tam.lab.experiments.llm.mteb.embeddings import CosineEncoder, TransformerEncoder

# How local data differs from the hub's, by task.
DIFFERENCES: dict[str, str] = read_toml(Path(__file__).parents[1] / "notes.toml")["mteb_differences"]


def score_trial(trial: Path, names: Sequence[str], data_folder: Path, device: torch.device) -> None:
    """Score the network in a trial's folder on these tasks. Without mteb, write embeddings to score later.

    Tasks with stored embeddings are scored from these, and do not need the network.
    """
    model, stored, out = str(trial / "model"), trial / "embeddings", trial / SCORES_FOLDER
    if not names:
        return
    refuse_links(trial.parent, trial, stored, out)
    if importlib.util.find_spec("mteb") is None:
        embed_tasks(model, names, data_folder, stored, device)
        return
    embedded = embeddings.read_embeddings(stored).tasks if (stored / embeddings.FILE).exists() else []
    with_embeddings = [name for name in names if name in embedded]
    others = [name for name in names if name not in embedded]
    if with_embeddings:
        score_model(model, with_embeddings, data_folder, out, device, stored)
    if others and not Path(model).is_dir():
        raise LabError(f"{trial} has neither its network nor embeddings for {', '.join(others)}")
    if others:
        score_model(model, others, data_folder, out, device)


def embed_tasks(model: str, names: Sequence[str], data_folder: Path, out: Path, device: torch.device) -> None:
    """Write the embeddings of all texts of the tasks, each text once."""
    every = [text for name in names for text in local_data.texts_to_encode(name, data_folder)]
    texts = list(dict.fromkeys(every))
    vectors = TransformerEncoder(model, device).vectors(texts)
    embeddings.write_embeddings(texts, vectors, out, model_identity(model), names)


def score_model(
    model: str, names: Sequence[str], data_folder: Path, out: Path, device: torch.device,
    stored: Path | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the main scores in percent, by task.

    TASK.json in `out` stores mteb's result, which is not computed again for the same model and data. A task
    that fails is reported and left out. With embeddings in the folder `stored` the model need not be here.
    mteb seeds the generators of torch, numpy and Python.
    """
    identity, how = model_identity(model), "end to end"
    encoder: CosineEncoder | None = None
    if stored is not None:
        encoder = lookup = embeddings.read_embeddings(stored)
        if Path(model).is_dir() and identity != lookup.model:
            raise LabError(f"{stored} has embeddings by another model than {model}: make them again")
        identity, how = lookup.model, "from embeddings"
    scores: dict[str, float] = {}
    for name in names:
        path = out / f"{name}.json"
        score = _stored_score(path, identity, name, data_folder)
        if score is None:
            out.mkdir(parents=True, exist_ok=True)
            encoder = encoder or TransformerEncoder(model, device)
            try:
                result = {"model": identity, "how": how, **evaluate_task(name, encoder, data_folder)}
                write_whole(path, json.dumps(result, indent=1).encode() + b"\n")
                score = result["score"]
            except Exception as error:  # of mteb, the data or the network: the other tasks continue
                if "CUDA error" in str(error):
                    raise  # the process cannot use that device any more
                path.unlink(missing_ok=True)  # it is of another model, or damaged
                print(f"{name} has no score: {error!r}")
                continue
        scores[name] = score
    return scores


def model_identity(model: str) -> str:
    """Return a digest of a folder's files, since its weights can change, or a hub model's name."""
    return digest_of_folder(Path(model)) if Path(model).is_dir() else model


def _data_fields(name: str, data_folder: Path) -> dict[str, str]:
    """Return where a task's data is from, its digest, and how it differs from MTEB's."""
    if not local_data.is_local(name, data_folder):
        return {"data": "hub", "difference": "none: the hub's data"}
    digest = digest_of(repr(local_data.read_task(name, data_folder)).encode())
    return {"data": "files", "digest": digest, "difference": DIFFERENCES[name]}


def _stored_score(path: Path, identity: str, name: str, data_folder: Path) -> float | None:
    """Return a stored score of this model and data. None if there is none, or the file is damaged."""
    try:
        fields = {"model": identity, **_data_fields(name, data_folder)}
        result = json.loads(path.read_text(encoding="utf-8"))
        return float(result["score"]) if fields.items() <= result.items() else None
    except (DataError, FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged data is reported when the task is run


def evaluate_task(name: str, encoder: CosineEncoder, data_folder: Path) -> dict[str, Any]:
    """Return mteb's result for a task, without its own cache, which would confuse two checkpoints."""
    task = make_task(name, data_folder)
    logging.getLogger("mteb").setLevel(logging.ERROR)  # it reports newer versions of a task, each time
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*superseded.*")
        result = (
            _mteb()
            .evaluate(
                encoder, task, cache=None, co2_tracker=False, show_progress_bar=False, public_only=False
            )
            .task_results[0]
        )
    score = 100 * float(result.get_score())
    if not math.isfinite(score):
        raise LabError(f"mteb's score is {score}")
    fields = {**_data_fields(name, data_folder), "mteb": version("mteb")}
    return {"task": name, "score": score, **fields, "scores": result.scores}


def check_tasks(names: Iterable[str], data_folder: Path) -> None:
    """Raise an error if a task is not known, or its files are missing or damaged."""
    for name in names:
        if local_data.is_local(name, data_folder):
            local_data.read_task(name, data_folder)
        else:
            _hub_task(name)


def make_task(name: str, data_folder: Path) -> Any:
    """Return the task. Without files it is the hub's, as in MTEB's English benchmark."""
    if not local_data.is_local(name, data_folder):
        return _hub_task(name)
    # The generated pairs show that everything runs. They are scored like those of STSBenchmark.
    task = _mteb().get_task("STSBenchmark" if name == local_data.GENERATED else name)
    task.dataset, task.data_loaded = to_dataset(local_data.read_task(name, data_folder)), True
    return task


def _mteb() -> Any:
    try:
        import mteb
    except ImportError as error:
        raise missing_package("a score", "mteb") from error
    return mteb


def _hub_task(name: str) -> Any:
    mteb = _mteb()
    english = {task.metadata.name: task for task in mteb.get_benchmark("MTEB(eng, v1)").tasks}
    try:
        return english[name] if name in english else mteb.get_task(name)
    except KeyError as error:
        similar = [task for task in local_data.TASKS if task.lower() == name.lower()]
        known = ", ".join(local_data.TASKS)
        hint = f"did you mean {similar[0]}?" if similar else f"files can be read for {known}"
        raise LabError(f"MTEB has no task {name!r}; {hint}") from error


def to_dataset(data: local_data.Data) -> Any:
    """Return the data as mteb's loaders leave it. Their types differ between kinds of tasks."""
    from datasets import Dataset, DatasetDict  # type: ignore[import-untyped]

    table = Dataset.from_dict
    if isinstance(data, local_data.Pairs):
        test = table({"sentence1": data.first, "sentence2": data.second, "score": data.scores})
        return DatasetDict(test=test)
    if isinstance(data, local_data.Classes):
        parts = {"train": data.train, "test": data.test}
        return DatasetDict({k: table({"text": x.texts, "label": x.labels}) for k, x in parts.items()})
    if isinstance(data, local_data.Clusters):
        texts, labels = [one.texts for one in data.sets], [one.labels for one in data.sets]
        return DatasetDict(test=table({"sentences": texts, "labels": labels}))
    test = {
        "corpus": Dataset.from_list([vars(one) for one in data.documents]),
        "queries": table({"id": list(data.queries), "text": list(data.queries.values())}),
        "relevant_docs": data.relevant,
        "top_ranked": None,
    }
    return {"default": {"test": test}}
