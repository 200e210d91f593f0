"""mteb's tasks, with the data of `local.py` in the place of the hub's.

Everything but the data is mteb's own: splits, experiments, samples per label, measures. DIFFERENCES says how
the data differs from the hub's; where it says none, the statistics that mteb has of its data (how many texts,
how many different ones, their lengths, the labels' order and counts) are those of the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tam.lab.embedding import local
from tam.lab.store import LabError

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
    local.GENERATED: "MTEB has no such task",
    "SciFact": "none: by MTEB's statistics the same documents, queries and answers",
}


def check(names: Iterable[str], data_folder: Path) -> None:
    """Raises where a task is not known, or its files are missing or damaged."""
    for name in names:
        if local.has(name, data_folder):
            local.read(name, data_folder)
        else:
            _on_the_hub(name)


def get(name: str, data_folder: Path) -> Any:
    """The task; one that is not read from files is the hub's, as MTEB's English benchmark has it."""
    if not local.has(name, data_folder):
        return _on_the_hub(name)
    task = _generated() if name == local.GENERATED else _mteb().get_task(name)
    task.dataset, task.data_loaded = _dataset(local.read(name, data_folder)), True
    return task


def _mteb() -> Any:
    try:
        import mteb
    except ImportError as error:
        raise LabError("scores need a package: pip install 'torque-aware-momentum[llm]'") from error
    return mteb


def _on_the_hub(name: str) -> Any:
    mteb = _mteb()
    english = {task.metadata.name: task for task in mteb.get_benchmark("MTEB(eng, v1)").tasks}
    try:
        return english[name] if name in english else mteb.get_task(name)
    except KeyError as error:
        files = [known for known in local.LOCAL if known != local.GENERATED]
        near = [known for known in files if known.lower() == name.lower()]
        meant = f"; {near[0]} is meant?" if near else f"; files are read of {', '.join(files)}"
        raise LabError(f"task {name!r}: MTEB has none of that name{meant}") from error


def _generated() -> Any:
    """A task of its own, to show that everything runs."""
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Generated(AbsTaskSTS):
        """Sentences that share some of their words."""

        metadata = TaskMetadata(
            name=local.GENERATED, description="Generated sentences that share some of their words.",
            dataset={"path": "generated", "revision": "1"}, type="STS", category="t2t",
            modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"], main_score="cosine_spearman",
        )  # fmt: skip
        min_score, max_score = 0, 1

    return Generated()


def _dataset(data: local.Data) -> Any:
    """As mteb's loaders leave it; their types differ from kind to kind."""
    from datasets import Dataset, DatasetDict  # type: ignore[import-untyped]

    table = Dataset.from_dict
    if isinstance(data, local.Pairs):
        columns = {"sentence1": data.first, "sentence2": data.second, "score": data.scores}
        return DatasetDict(test=table(columns))
    if isinstance(data, local.Classes):
        parts = {"train": data.train, "test": data.test}
        return DatasetDict({k: table({"text": x.texts, "label": x.labels}) for k, x in parts.items()})
    if isinstance(data, local.Clusters):
        sets = data.sets
        columns = {"sentences": [one.texts for one in sets], "labels": [one.labels for one in sets]}
        return DatasetDict(test=table(columns))
    test = {
        "corpus": Dataset.from_list([vars(one) for one in data.documents]),
        "queries": table({"id": list(data.queries), "text": list(data.queries.values())}),
        "relevant_docs": data.relevant,
        "top_ranked": None,
    }
    return {"default": {"test": test}}
