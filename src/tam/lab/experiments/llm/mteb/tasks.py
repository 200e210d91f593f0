"""mteb's tasks with the data of `local_data.py` instead of the hub's.

Everything but the data is mteb's own: splits, experiments, samples per label, measures. DIFFERENCES says how
the data differs from the hub's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tam.lab.core.errors import LabError
from tam.lab.core.toml import read_toml
from tam.lab.experiments.llm.mteb import local_data

DIFFERENCES: dict[str, str] = read_toml(Path(__file__).parents[1] / "notes.toml")["mteb_differences"]


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
    task = _generated_task() if name == local_data.GENERATED else _mteb().get_task(name)
    task.dataset, task.data_loaded = to_dataset(local_data.read_task(name, data_folder)), True
    return task


def _mteb() -> Any:
    try:
        import mteb
    except ImportError as error:
        raise LabError("scores need a package: pip install 'torque-aware-momentum[llm]'") from error
    return mteb


def _hub_task(name: str) -> Any:
    mteb = _mteb()
    english = {task.metadata.name: task for task in mteb.get_benchmark("MTEB(eng, v1)").tasks}
    try:
        return english[name] if name in english else mteb.get_task(name)
    except KeyError as error:
        local = [task for task in local_data.READERS if task != local_data.GENERATED]
        similar = [task for task in local if task.lower() == name.lower()]
        hint = f"did you mean {similar[0]}?" if similar else f"files can be read for {', '.join(local)}"
        raise LabError(f"MTEB has no task {name!r}; {hint}") from error


def _generated_task() -> Any:
    """Return a small task that shows that everything runs."""
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Generated(AbsTaskSTS):
        """Sentences that share some of their words."""

        metadata = TaskMetadata(
            name=local_data.GENERATED, description="Generated sentences that share some of their words.",
            dataset={"path": "generated", "revision": "1"}, type="STS", category="t2t",
            modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"], main_score="cosine_spearman",
        )  # fmt: skip
        min_score, max_score = 0, 1

    return Generated()


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
        texts, labels = zip(*((one.texts, one.labels) for one in data.sets), strict=True)
        return DatasetDict(test=table({"sentences": list(texts), "labels": list(labels)}))
    test = {
        "corpus": Dataset.from_list([vars(one) for one in data.documents]),
        "queries": table({"id": list(data.queries), "text": list(data.queries.values())}),
        "relevant_docs": data.relevant,
        "top_ranked": None,
    }
    return {"default": {"test": test}}
