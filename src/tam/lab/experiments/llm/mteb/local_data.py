"""Seven of MTEB's datasets, read from their official files below DATA/embedding. Nothing here needs mteb.

`scoring.py` turns them into mteb's tasks. `notes.toml` says where they differ from MTEB's data on the hub.
Stored scores carry a digest of the data's repr, so the names of these classes and of their fields must not
change.
"""

from __future__ import annotations

import csv
import json
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from tam.lab.core.errors import DataError, LabError
from tam.lab.data import text

EMOTIONS = ("sadness", "joy", "love", "anger", "fear", "surprise")  # in the order of MTEB's labels
EXPERIMENTS, SEED = 10, 42  # mteb's, of every classification
CLUSTERINGS = 10  # sets of titles to cluster
GENERATED = "GeneratedSTS"  # needs no files


@dataclass(frozen=True)
class Pairs:
    """Sentences whose similarity was scored by people."""

    first: list[str]
    second: list[str]
    scores: list[float]

    def texts_to_encode(self) -> list[str]:
        return self.first + self.second


@dataclass(frozen=True)
class Labelled:
    """Texts, each with the number of its class."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Classes:
    """Texts to classify, and others from which a few of each class are drawn to learn from."""

    train: Labelled
    test: Labelled
    per_label: int

    def texts_to_encode(self) -> list[str]:
        """Return the few training texts that mteb draws, and all test texts."""
        order, sample = list(range(len(self.train.labels))), set()
        for _ in range(EXPERIMENTS):
            np.random.RandomState(SEED).shuffle(order)  # mteb shuffles the last order again, by the same seed
            count: Counter[int] = Counter()
            for i in order:
                label = self.train.labels[i]
                if count[label] < self.per_label:
                    sample.add(i)
                    count[label] += 1
        return [self.train.texts[i] for i in sorted(sample)] + self.test.texts


@dataclass(frozen=True)
class Clusters:
    """Sets of texts and their classes, which a clustering must find."""

    sets: list[Labelled]

    def texts_to_encode(self) -> list[str]:
        return [text for labelled in self.sets for text in labelled.texts]


@dataclass(frozen=True)
class Document:
    """A document to find."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Search:
    """Queries, and which of the documents answer them."""

    documents: list[Document]
    queries: dict[str, str]
    relevant: dict[str, dict[str, int]]

    def texts_to_encode(self) -> list[str]:
        """Return the documents, title and text joined as mteb joins them, and the queries."""
        return [f"{one.title} {one.text}".strip() for one in self.documents] + list(self.queries.values())


Data = Pairs | Classes | Clusters | Search
Columns = tuple[str, ...] | tuple[int, ...]


def is_local(task: str, data_folder: Path) -> bool:
    """Return True if a task is read from files here. Otherwise its data is the hub's."""
    return task == GENERATED or (task in READERS and (data_folder / "embedding").is_dir())


def texts_to_encode(task: str, data_folder: Path) -> list[str]:
    """Return every text that mteb passes to an encoder, each once."""
    return list(dict.fromkeys(read_task(task, data_folder).texts_to_encode()))


@cache
def read_task(task: str, data_folder: Path) -> Data:
    """Return the data of a task."""
    if task not in READERS:
        raise LabError(f"task {task!r}: must be one of {', '.join(READERS)}")
    return READERS[task](data_folder / "embedding")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise what goes wrong inside as a DataError that names the file."""
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, TypeError, tarfile.TarError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _read_columns(path: Path, separator: str, columns: Columns) -> list[list[str]]:
    """Return columns of a table: by name, or by number if the first line has no names."""
    import pandas

    with _naming(path):
        table = pandas.read_csv(
            path, sep=separator, usecols=list(columns), dtype=str, keep_default_na=False,
            header=None if isinstance(columns[0], int) else 0, index_col=False,
            # Only in files with commas is a quotation mark more than a letter.
            quoting=csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE,
        )  # fmt: skip
        if table.empty:
            raise ValueError("no rows")
        empty = (table == "").any(axis=1)  # pandas fills in missing cells
        if empty.any():
            raise ValueError(f"row {int(empty.idxmax()) + 1} has an empty cell")
        return [table[column].tolist() for column in columns]


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one per line."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    if not rows:
        raise ValueError("no rows")
    return rows


def _read_pairs(name: str, separator: str, columns: Columns, folder: Path) -> Pairs:
    first, second, scores = _read_columns(folder / name, separator, columns)
    with _naming(folder / name):
        return Pairs(first, second, [float(score) for score in scores])


def _read_classes(
    per_label: int, name: str, separator: str, columns: Columns, classes: Sequence[str], folder: Path
) -> Classes:
    """Return training and test texts. Without `classes`, they are the training labels in alphabetic order."""
    parts = []
    for path in (folder / name.format("train"), folder / name.format("test")):
        texts, labels = _read_columns(path, separator, columns)
        first = int(labels[0] == "label_name")  # some copies of emotion begin with a line of names
        classes = classes or sorted(set(labels), key=str.lower)
        with _naming(path):
            number = {label: i for i, label in enumerate(classes)}
            parts.append(Labelled(texts[first:], [number[label] for label in labels[first:]]))
    return Classes(parts[0], parts[1], per_label)


def _read_twentynewsgroups(folder: Path) -> Clusters:
    """Return titles of more than ten letters, in sets of a tenth of them, two tenths, and so on."""
    posts = sorted(_read_posts(folder / "20newsgroups").items())
    titles = [(title, path.split("/")[0]) for path, post in posts if len(title := _title(post)) > 10]
    if len(titles) < CLUSTERINGS:
        raise DataError(f"{folder / '20newsgroups'} has {len(titles)} posts with a title")
    number = {group: i for i, group in enumerate(sorted({group for _, group in titles}))}
    generator, sets = np.random.RandomState(SEED), []
    for size in range(1, CLUSTERINGS + 1):
        sample = [titles[i] for i in generator.permutation(len(titles))[: len(titles) * size // CLUSTERINGS]]
        sets.append(Labelled([title for title, _ in sample], [number[group] for _, group in sample]))
    return Clusters(sets)


def _read_posts(folder: Path) -> dict[str, bytes]:
    """Return the posts of the training part, by group and number."""
    part, archive = folder / "20news-bydate-train", folder / "20news-bydate.tar.xz"
    if part.is_dir():
        with _naming(part):
            return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in part.glob("*/*")}
    with _naming(archive), tarfile.open(archive) as packed:
        return {
            member.name.partition("/")[2]: cast(IO[bytes], packed.extractfile(member)).read()
            for member in packed
            if member.isfile() and member.name.startswith(part.name)
        }


def _title(post: bytes) -> str:
    """Return the subject of a post, without the mark of an answer."""
    head = post.decode("latin-1").partition("\n\n")[0].split("\n")
    subject = next((line.removeprefix("Subject:") for line in head if line.startswith("Subject:")), "")
    return re.sub("^re:", "", subject.strip(), flags=re.IGNORECASE).strip()


def _read_scifact(folder: Path) -> Search:
    relevant: dict[str, dict[str, int]] = {}
    path = folder / "scifact/qrels/test.tsv"
    columns = _read_columns(path, "\t", ("query-id", "corpus-id", "score"))
    with _naming(path):
        for query, document, score in zip(*columns, strict=True):
            relevant.setdefault(query, {})[document] = int(score)
    with _naming(path := folder / "scifact/corpus.jsonl"):
        documents = [Document(row["_id"], row["title"], row["text"]) for row in _read_json_lines(path)]
        _check_ids({one.id for one in documents}, {key for one in relevant.values() for key in one})
    with _naming(path := folder / "scifact/queries.jsonl"):
        queries = {row["_id"]: row["text"] for row in _read_json_lines(path) if row["_id"] in relevant}
        _check_ids(set(queries), set(relevant))
    return Search(documents, queries, relevant)


def _check_ids(present: set[str], required: set[str]) -> None:
    if missing := sorted(required - present):
        raise ValueError(f"{missing[0]} is not in it")


def _generate_pairs(folder: Path) -> Pairs:
    """Return sentences and copies with some words changed. The score is the share of unchanged words."""
    first, others = text.generate(40, 10), text.generate(40, 11)
    second, scores = [], []
    for i, (line, other) in enumerate(zip(first, others, strict=True)):
        unchanged = i % len(line.split())
        second.append(" ".join([*line.split()[:unchanged], *other.split()[unchanged:]]))
        scores.append(unchanged / len(line.split()))
    return Pairs(first, second, scores)


READERS: Mapping[str, Callable[[Path], Data]] = {
    "STSBenchmark": partial(_read_pairs, "stsbenchmark/sts-test.csv", "\t", (5, 6, 4)),
    "SICK-R": partial(_read_pairs, "sick/SICK.txt", "\t", ("sentence_A", "sentence_B", "relatedness_score")),
    "BIOSSES": partial(_read_pairs, "biosses/biosses.csv", ",", ("sentence1", "sentence2", "score")),
    "Banking77Classification": partial(_read_classes, 8, "banking77/{}.csv", ",", ("text", "category"), ()),
    "EmotionClassification": partial(_read_classes, 16, "emotion/{}.txt", ";", (0, 1), EMOTIONS),
    "TwentyNewsgroupsClustering": _read_twentynewsgroups,
    "SciFact": _read_scifact,
    GENERATED: _generate_pairs,
}
TASKS = tuple(task for task in READERS if task != GENERATED)
