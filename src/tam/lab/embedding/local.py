"""Seven of MTEB's data sets, read from their official files below DATA/embedding; nothing here needs mteb.

    stsbenchmark/sts-test.csv           STSBenchmark
    sick/SICK.txt                       SICK-R
    biosses/biosses.csv                 BIOSSES
    banking77/{train,test}.csv          Banking77Classification
    emotion/{train,test}.txt            EmotionClassification
    20newsgroups/20news-bydate.tar.xz   TwentyNewsgroupsClustering; or unpacked, 20news-bydate-train/
    scifact/{corpus,queries}.jsonl, qrels/test.tsv   SciFact

`tasks.py` makes mteb's tasks of them and says where they differ from what MTEB has on the hub.
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
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from tam.lab.data import DataError, text
from tam.lab.store import LabError

EMOTIONS = ("sadness", "joy", "love", "anger", "fear", "surprise")  # in the order of MTEB's numbers
EXPERIMENTS, SEED = 10, 42  # mteb's, of every classification
SETS = 10  # of titles to cluster
PROBLEMS = (OSError, EOFError, ValueError, KeyError, TypeError)  # of a file that is not what it should be


@dataclass(frozen=True)
class Pairs:
    """Sentences whose likeness was scored by people."""

    first: list[str]
    second: list[str]
    scores: list[float]

    def asked(self) -> list[str]:
        """The texts an encoder is asked for."""
        return self.first + self.second


@dataclass(frozen=True)
class Labelled:
    """Texts, each of a class."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Classes:
    """Texts to classify, and others from which a few of each class are drawn to learn from."""

    train: Labelled
    test: Labelled
    per_label: int

    def asked(self) -> list[str]:
        """The test's texts, and those that mteb draws: few of the many to learn from."""
        order, drawn = list(range(len(self.train.labels))), set()
        for _ in range(EXPERIMENTS):
            np.random.RandomState(SEED).shuffle(order)  # anew shuffled, by the same numbers
            count: Counter[int] = Counter()
            for i in order:
                label = self.train.labels[i]
                if count[label] < self.per_label:
                    drawn.add(i)
                    count[label] += 1
        return [self.train.texts[i] for i in sorted(drawn)] + self.test.texts


@dataclass(frozen=True)
class Clusters:
    """Sets of texts to find the classes of."""

    sets: list[Labelled]

    def asked(self) -> list[str]:
        """The texts an encoder is asked for."""
        return [text for one in self.sets for text in one.texts]


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

    def asked(self) -> list[str]:
        """The queries, and the documents as mteb joins their two parts."""
        return [f"{one.title} {one.text}".strip() for one in self.documents] + list(self.queries.values())


Data = Pairs | Classes | Clusters | Search


def has(name: str, data_folder: Path) -> bool:
    """Whether a task is read from files here: where there are none it is the hub's."""
    return name == GENERATED or (name in LOCAL and (data_folder / "embedding").is_dir())


def sentences(name: str, data_folder: Path) -> list[str]:
    """Every text mteb asks an encoder for, each once, as it passes it."""
    return list(dict.fromkeys(read(name, data_folder).asked()))


@cache
def read(name: str, data_folder: Path) -> Data:
    """The data of a task."""
    if name not in LOCAL:
        raise LabError(f"task {name!r}: must be one of {', '.join(LOCAL)}")
    return LOCAL[name](data_folder / "embedding")


# ---------------------------------------------------------------------- files


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Inside, whatever is wrong is told with the file's name."""
    try:
        yield
    except (*PROBLEMS, csv.Error, tarfile.TarError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class Plain(csv.excel):
    """Columns between which a quotation mark is a letter like others."""

    quoting = csv.QUOTE_NONE


def _columns(
    path: Path, names: Sequence[str], delimiter: str = ",", header: Sequence[str] | None = None
) -> list[list[str]]:
    """The columns of these names; `header` is of a file whose first line does not have them."""
    form: type[csv.Dialect] = csv.excel if delimiter == "," else Plain
    with _reading(path):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, header, dialect=form, delimiter=delimiter))
        for row in rows:
            if any(row[name] is None for name in names):
                raise ValueError(f"a line without {' or '.join(names)}: {row}")
        if not rows:
            raise ValueError("there is nothing in it")
        return [[row[name] for row in rows] for name in names]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one on every line."""
    with _reading(path):
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if not found:
            raise ValueError("there is nothing in it")
        return found


# ---------------------------------------------------------------------- pairs


def _pairs(path: Path, columns: list[list[str]]) -> Pairs:
    first, second, scores = columns
    with _reading(path):
        return Pairs(first, second, [float(score) for score in scores])


def _stsbenchmark(folder: Path) -> Pairs:
    path = folder / "stsbenchmark" / "sts-test.csv"
    header = ("genre", "file", "year", "number", "score", "sentence1", "sentence2")
    return _pairs(path, _columns(path, ("sentence1", "sentence2", "score"), "\t", header))


def _sick(folder: Path) -> Pairs:
    path = folder / "sick" / "SICK.txt"
    return _pairs(path, _columns(path, ("sentence_A", "sentence_B", "relatedness_score"), "\t"))


def _biosses(folder: Path) -> Pairs:
    path = folder / "biosses" / "biosses.csv"
    return _pairs(path, _columns(path, ("sentence1", "sentence2", "score")))


# ---------------------------------------------------------------------- classes


def _labelled(path: Path, columns: list[list[str]], known: Sequence[str]) -> Labelled:
    texts, names = columns
    number = {name: i for i, name in enumerate(known)}
    with _reading(path):
        return Labelled(texts, [number[name] for name in names])


def _banking77(folder: Path) -> Classes:
    paths = [folder / "banking77" / f"{part}.csv" for part in ("train", "test")]
    train, test = (_columns(path, ("text", "category")) for path in paths)
    known = sorted(set(train[1]), key=str.lower)
    return Classes(_labelled(paths[0], train, known), _labelled(paths[1], test, known), per_label=8)


def _emotion(folder: Path) -> Classes:
    train, test = (_emotions(folder / "emotion" / f"{part}.txt") for part in ("train", "test"))
    return Classes(train, test, per_label=16)


def _emotions(path: Path) -> Labelled:
    header = ("text", "label_name")
    columns = _columns(path, header, ";", header)
    first = int(columns[1][0] == header[1])  # some copies begin with a line of names
    return _labelled(path, [column[first:] for column in columns], EMOTIONS)


# ---------------------------------------------------------------------- clusters


def _twentynewsgroups(folder: Path) -> Clusters:
    """Titles of more than ten letters, in sets of a tenth of them, two tenths, and so on."""
    posts = sorted(_posts(folder / "20newsgroups").items())
    titles = [(title, path.split("/")[0]) for path, post in posts if len(title := _title(post)) > 10]
    if len(titles) < SETS:
        raise DataError(f"{folder / '20newsgroups'} has {len(titles)} posts with a title")
    number = {group: i for i, group in enumerate(sorted({group for _, group in titles}))}
    drawing, sets = np.random.RandomState(SEED), []
    for size in range(1, SETS + 1):
        drawn = [titles[i] for i in drawing.permutation(len(titles))[: len(titles) * size // SETS]]
        sets.append(Labelled([title for title, _ in drawn], [number[group] for _, group in drawn]))
    return Clusters(sets)


def _posts(folder: Path) -> dict[str, bytes]:
    """The posts to train on, by group and number."""
    part, archive = folder / "20news-bydate-train", folder / "20news-bydate.tar.xz"
    if part.is_dir():
        with _reading(part):
            return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in part.glob("*/*")}
    with _reading(archive), tarfile.open(archive) as packed:
        return {
            one.name.partition("/")[2]: cast(IO[bytes], packed.extractfile(one)).read()
            for one in packed
            if one.isfile() and one.name.startswith(part.name)
        }


def _title(post: bytes) -> str:
    """Its subject, without the mark of an answer."""
    head = post.decode("latin-1").partition("\n\n")[0].split("\n")
    subject = next((line.removeprefix("Subject:") for line in head if line.startswith("Subject:")), "")
    return re.sub("^re:", "", subject.strip(), flags=re.IGNORECASE).strip()


# ---------------------------------------------------------------------- search


def _scifact(folder: Path) -> Search:
    corpus, asked, answers = (
        folder / "scifact" / name for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv")
    )
    relevant: dict[str, dict[str, int]] = {}
    rows = zip(*_columns(answers, ("query-id", "corpus-id", "score"), "\t"), strict=True)
    with _reading(answers):
        for query, document, score in rows:
            relevant.setdefault(query, {})[document] = int(score)
    with _reading(corpus):
        documents = [Document(row["_id"], row["title"], row["text"]) for row in _lines(corpus)]
        _all_in({one.id for one in documents}, {key for found in relevant.values() for key in found})
    with _reading(asked):
        queries = {row["_id"]: row["text"] for row in _lines(asked) if row["_id"] in relevant}
        _all_in(set(queries), set(relevant))
    return Search(documents, queries, relevant)


def _all_in(there: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - there):
        raise ValueError(f"{missing[0]} is not in it")


# ---------------------------------------------------------------------- what needs no files


GENERATED = "GeneratedSTS"


def _generated(folder: Path) -> Pairs:
    """Sentences, each beside itself with some words changed; the score is the share of those that are not."""
    first, others = text.generate(40, 10), text.generate(40, 11)
    second, scores = [], []
    for i, (line, other) in enumerate(zip(first, others, strict=True)):
        kept = i % len(line.split())
        second.append(" ".join([*line.split()[:kept], *other.split()[kept:]]))
        scores.append(kept / len(line.split()))
    return Pairs(first, second, scores)


LOCAL: Mapping[str, Callable[[Path], Data]] = {
    "STSBenchmark": _stsbenchmark,
    "SICK-R": _sick,
    "BIOSSES": _biosses,
    "Banking77Classification": _banking77,
    "EmotionClassification": _emotion,
    "TwentyNewsgroupsClustering": _twentynewsgroups,
    "SciFact": _scifact,
    GENERATED: _generated,
}
