"""The data sets of the embedding tasks: small files of the same layouts."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tam.lab.core.errors import DataError, LabError
from tam.lab.experiments.llm.mteb import local_data, scoring

TOPICS = (
    ("card", "bank", "money", "transfer", "account", "payment"),
    ("dog", "cat", "animal", "garden", "tree", "river"),
    ("protein", "cell", "cancer", "gene", "tissue", "blood"),
)
TASKS = (
    "STSBenchmark", "SICK-R", "BIOSSES", "Banking77Classification", "EmotionClassification",
    "TwentyNewsgroupsClustering", "SciFact",
)  # fmt: skip
GROUPS = ("alt.bank", "rec.garden", "sci.cell")


def text(rng: random.Random, topic: int, words: int = 5) -> str:
    """Words of a topic, and one of any."""
    drawn = [rng.choice(TOPICS[topic]) for _ in range(words)]
    return " ".join([*drawn, rng.choice(TOPICS[rng.randrange(3)])])


def put(path: Path, *lines: str, end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode())


def posts(rng: random.Random) -> dict[str, str]:
    """By their paths: some are answers, some of the test part, some have a short subject."""
    found = {}
    for i in range(60):
        part, group = "test" if i % 5 == 4 else "train", GROUPS[i % 3]
        subject = "hm" if i % 7 == 6 else ("RE: " if i % 4 == 3 else "") + text(rng, i % 3)
        found[f"20news-bydate-{part}/{group}/{1000 + i}"] = f"From: a@b\nSubject: {subject}\n\nSubject: no\n"
    return found


def write(data: Path) -> Path:
    """All seven data sets below a data folder."""
    rng, folder = random.Random(0), data / "embedding"
    pairs = [(text(rng, i % 3), text(rng, (i + i // 8) % 3), round(rng.uniform(0, 5), 1)) for i in range(24)]
    more = ("", "\tlicence\tlicence")  # some lines have two more columns
    sts = [f'news\tMSR\t2012\t{i:04d}\t{s}\t"{a}\t{b} {more[i % 2]}' for i, (a, b, s) in enumerate(pairs)]
    put(folder / "stsbenchmark/sts-test.csv", *sts)
    sick = [f"{i}\t{a}\t{b}\tNEUTRAL\t{s}\tTRIAL" for i, (a, b, s) in enumerate(pairs)]
    names = "pair_ID\tsentence_A\tsentence_B\tentailment_label\trelatedness_score\tSemEval_set"
    put(folder / "sick/SICK.txt", names, *sick, end="\r\n")
    biosses = [f'{i},"{a}, so",{b},1,2,{s}' for i, (a, b, s) in enumerate(pairs)]
    put(folder / "biosses/biosses.csv", "pair,sentence1,sentence2,A,B,score", *biosses)
    for part, count in (("train", 60), ("test", 15)):
        labelled = [(text(rng, i % 3), i % 3) for i in range(count)]
        rows = [f'"{x}, {i}",{("zoo", "Bank", "cell")[k]}' for i, (x, k) in enumerate(labelled)]
        put(folder / f"banking77/{part}.csv", "text,category", *rows)
    for part, count in (("train", 150), ("test", 18)):
        rows = [f"{text(rng, i % 3)} {i};{local_data.EMOTIONS[i % 6]}" for i in range(count)]
        put(folder / f"emotion/{part}.txt", *["text;label_name"][: part == "train"], *rows)
    with tarfile.open(_folder(folder / "20newsgroups") / "20news-bydate.tar.xz", "w:xz") as packed:
        for path, post in posts(rng).items():
            member = tarfile.TarInfo(path)
            member.size = len(post)
            packed.addfile(member, io.BytesIO(post.encode()))
    documents = [{"_id": f"d{i}", "title": text(rng, i % 3, 2), "text": text(rng, i % 3)} for i in range(15)]
    documents[0]["title"] = ""
    documents[1]["text"] += " "
    put(folder / "scifact/corpus.jsonl", *map(json.dumps, documents))
    put(
        folder / "scifact/queries.jsonl",
        *(json.dumps({"_id": str(i), "text": text(rng, i % 3)}) for i in range(8)),
    )
    answers = [f"{q}\td{d}\t{s}" for q, d, s in ((1, 1, 1), (1, 4, 2), (2, 2, 1), (5, 8, 1), (6, 3, 1))]
    put(folder / "scifact/qrels/test.tsv", "query-id\tcorpus-id\tscore", *answers)
    return data


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_pairs(tmp_path: Path) -> None:
    write(tmp_path)
    sts, sick, biosses = (
        local_data.read_task(name, tmp_path) for name in ("STSBenchmark", "SICK-R", "BIOSSES")
    )
    assert (
        isinstance(sts, local_data.Pairs)
        and isinstance(sick, local_data.Pairs)
        and isinstance(biosses, local_data.Pairs)
    )
    assert len(sick.scores) == 24 and sts.scores == sick.scores == biosses.scores
    assert sts.first == ['"' + one for one in sick.first] and sts.second == [one + " " for one in sick.second]
    assert biosses.first == [one + ", so" for one in sick.first] and biosses.second == sick.second
    assert local_data.texts_to_encode("SICK-R", tmp_path) == list(dict.fromkeys(sick.first + sick.second))


def test_classes(tmp_path: Path) -> None:
    write(tmp_path)
    banking, emotion = (
        local_data.read_task(f"{name}Classification", tmp_path) for name in ("Banking77", "Emotion")
    )
    assert isinstance(banking, local_data.Classes) and isinstance(emotion, local_data.Classes)
    assert banking.train.labels[:4] == [2, 0, 1, 2]  # zoo, Bank, cell: by the alphabet, whatever their case
    assert len(banking.test.labels) == 15 and banking.test.texts[3].endswith(", 3")
    assert emotion.train.labels[:7] == emotion.test.labels[:7] == [0, 1, 2, 3, 4, 5, 0]
    assert len(emotion.train.labels) == 150 and len(emotion.test.labels) == 18


def test_titles_are_drawn_alike_from_the_archive_and_from_a_folder(tmp_path: Path) -> None:
    found = local_data.read_task("TwentyNewsgroupsClustering", write(tmp_path / "packed"))
    assert isinstance(found, local_data.Clusters)
    train = {path: post for path, post in posts_of(tmp_path / "packed").items() if "-train/" in path}
    subjects = [post.split("\n")[1].removeprefix("Subject: ") for post in train.values()]
    groups = [GROUPS.index(path.split("/")[1]) for path in train]
    titles = [(one.removeprefix("RE: "), k) for one, k in zip(subjects, groups, strict=True) if one != "hm"]
    assert [len(one.texts) for one in found.sets] == [len(titles) * size // 10 for size in range(1, 11)]
    last = found.sets[-1]
    assert sorted(zip(last.texts, last.labels, strict=True)) == sorted(titles)
    for path, post in train.items():
        put(tmp_path / "unpacked/embedding/20newsgroups" / path, post, end="")
    assert local_data.read_task("TwentyNewsgroupsClustering", tmp_path / "unpacked") == found


def posts_of(data: Path) -> dict[str, str]:
    """What is in the archive, by Python's own reader."""
    with tarfile.open(data / "embedding/20newsgroups/20news-bydate.tar.xz") as packed:
        return {one.name: packed.extractfile(one).read().decode() for one in packed}  # type: ignore[union-attr]


def test_search(tmp_path: Path) -> None:
    found = local_data.read_task("SciFact", write(tmp_path))
    assert isinstance(found, local_data.Search)
    assert found.relevant == {"1": {"d1": 1, "d4": 2}, "2": {"d2": 1}, "5": {"d8": 1}, "6": {"d3": 1}}
    assert list(found.queries) == ["1", "2", "5", "6"] and len(found.documents) == 15
    first, second = found.documents[:2]
    asked = local_data.texts_to_encode("SciFact", tmp_path)
    assert asked[0] == first.text and asked[1] == f"{second.title} {second.text}"[:-1]


@pytest.mark.parametrize(
    "path, content, name, message",
    [
        ("stsbenchmark/sts-test.csv", None, "STSBenchmark", "No such file"),
        ("stsbenchmark/sts-test.csv", b"", "STSBenchmark", "EmptyDataError"),
        ("stsbenchmark/sts-test.csv", b"news\tMSR\t2012\n", "STSBenchmark", "ParserError"),
        (
            "stsbenchmark/sts-test.csv",
            b"n\tm\t1\t2\t3\ta\tb\nn\tm\t1\n",
            "STSBenchmark",
            "row 2 has an empty cell",
        ),
        ("sick/SICK.txt", b"sentence_A\tsentence_B\trelatedness_score\n", "SICK-R", "no rows"),
        ("stsbenchmark/sts-test.csv", b"n\tm\t1\t2\tgood\ta\tb\n", "STSBenchmark", "could not convert"),
        ("sick/SICK.txt", b"pair_ID\tsentence_A\n1\tx\n", "SICK-R", "sentence_B"),
        ("biosses/biosses.csv", b"sentence1,sentence2,score\n\xff,b,1\n", "BIOSSES", "can't decode byte"),
        (
            "banking77/test.csv",
            b"text,category\nx,other\n",
            "Banking77Classification",
            "KeyError: 'other'",
        ),
        ("emotion/train.txt", b"x;sad\n", "EmotionClassification", "KeyError: 'sad'"),
        ("20newsgroups/20news-bydate.tar.xz", None, "TwentyNewsgroupsClustering", "No such file"),
        ("20newsgroups/20news-bydate.tar.xz", b"x", "TwentyNewsgroupsClustering", "ReadError"),
        ("scifact/corpus.jsonl", b"{\n", "SciFact", "JSONDecodeError"),
        ("scifact/corpus.jsonl", b"[1]\n", "SciFact", "TypeError"),
        ("scifact/corpus.jsonl", b'{"_id": "d1", "title": "", "text": ""}\n', "SciFact", "d2 is not in it"),
        ("scifact/queries.jsonl", b"\n", "SciFact", "no rows"),
        ("scifact/qrels/test.tsv", b"query-id\tcorpus-id\tscore\n1\td1\tyes\n", "SciFact", "invalid literal"),
    ],
)
def test_bad_files_are_named(
    path: str, content: bytes | None, name: str, message: str, tmp_path: Path
) -> None:
    file = write(tmp_path) / "embedding" / path
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} cannot be read: .*{message}"):
        scoring.check_tasks([name], tmp_path)


def test_an_archive_cut_short_and_one_of_something_else_are_named(tmp_path: Path) -> None:
    file = write(tmp_path) / "embedding/20newsgroups/20news-bydate.tar.xz"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"20news-bydate.tar.xz cannot be read"):
        scoring.check_tasks(["TwentyNewsgroupsClustering"], tmp_path)
    with tarfile.open(file, "w:xz"):
        pass
    with pytest.raises(DataError, match=r"20newsgroups has 0 posts with a title"):
        scoring.check_tasks(["TwentyNewsgroupsClustering"], tmp_path)


def test_unknown_tasks_are_named(tmp_path: Path) -> None:
    scoring.check_tasks(TASKS, write(tmp_path))
    scoring.check_tasks(["SICK-R", "STS12"], tmp_path)  # the hub has it
    with pytest.raises(LabError, match=r"MTEB has no task 'STS-None'; files can be read for STSBenchmark"):
        scoring.check_tasks(["SICK-R", "STS-None"], tmp_path)
    with pytest.raises(LabError, match="did you mean BIOSSES"):
        scoring.check_tasks(["biosses"], tmp_path)
    with pytest.raises(LabError, match=r"task 'STS12': must be one of STSBenchmark, SICK-R, BIOSSES, Bank"):
        local_data.read_task("STS12", tmp_path)


def test_texts_are_embedded_without_mteb() -> None:
    without = "import sys; sys.modules |= {'mteb': None, 'datasets': None}"
    without += "; import tam.lab.experiments.llm.mteb.scoring"
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", without], check=True, env={**os.environ, "PYTHONPATH": path})
