"""mteb's tasks with the data of `local_data.py` instead of the hub's.

Everything but the data is mteb's own: splits, experiments, samples per label, measures. DIFFERENCES says how
the data differs from the hub's. "None" means that mteb's statistics of its data (number of texts, of
different ones, their lengths, order and counts of labels) are those of the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tam.lab.core.errors import LabError
from tam.lab.experiments.llm.mteb import local_data

DIFFERENCES = {
    "STSBenchmark": "none: the test part, by MTEB's statistics the same 1379 pairs and scores",
    "SICK-R": (
        "the 9840 pairs of SICK as its authors publish it; MTEB has 9927, of which 9842 are different: those "
        "of SemEval 2014, with pairs that come more than once"
    ),
    "BIOSSES": (
        "100 pairs scored 0 to 4, as MTEB has, but by its statistics at least one of them is another: there "
        "92 and 97 sentences differ and the mean score is 2.196, here 93 and 98 and 2.198"
    ),
    "Banking77Classification": "none: by MTEB's statistics the same texts and labels in the same order",
    "EmotionClassification": "none: by MTEB's statistics the same texts and labels in the same order",
    "TwentyNewsgroupsClustering": (
        "other sets of the same titles. MTEB has 10 sets of 59545 titles together, 5242 different ones: as "
        "many as there are subjects of more than 10 letters in the training part, without a leading Re:. Of "
        "these, 10910 with those that come more than once, our 10 sets are a tenth, two tenths and so on, "
        "drawn with a fixed seed; which titles are in each of MTEB's sets is not known"
    ),
    local_data.GENERATED: "MTEB has no such task",
    "SciFact": "none: by MTEB's statistics the same documents, queries and answers",
}


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
        columns = {"sentence1": data.first, "sentence2": data.second, "score": data.scores}
        return DatasetDict(test=table(columns))
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
