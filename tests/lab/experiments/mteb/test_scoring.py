"""Scores by mteb against direct computation; what is kept of them, and tasks that fail."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.cluster import MiniBatchKMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import v_measure_score

from tam.lab.core.errors import LabError
from tam.lab.experiments.llm.mteb import embeddings, local_data, scoring
from tam.lab.experiments.llm.mteb.embeddings import CosineEncoder, TransformerEncoder, Vectors
from tests.lab.experiments.mteb.test_encoder import tiny
from tests.lab.experiments.mteb.test_local_data import TASKS, TOPICS, write

mteb = pytest.importorskip("mteb")
CPU = torch.device("cpu")
PAIRS = ("STSBenchmark", "SICK-R", "BIOSSES")


class Counting(CosineEncoder):
    """Vectors that count the topics' words, with noise of each text's own; it notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def vectors(self, texts: Sequence[str]) -> Vectors:
        self.asked.update(texts)
        return np.stack([self.vector(one) for one in texts])

    @staticmethod
    def vector(text: str) -> np.ndarray:
        noise = np.random.default_rng(int(embeddings.text_key(text), 16)).standard_normal(6)
        counts = [sum(text.count(word) for word in topic) for topic in TOPICS]
        return (np.array([*counts, 0, 0, 0]) + 2 * noise).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("model"))


def by_mteb(name: str, data: Path) -> float:
    encoder = Counting()
    found = scoring.evaluate_task(name, encoder, data)
    assert encoder.asked == set(local_data.texts_to_encode(name, data))  # neither more nor other texts
    return float(found["score"])


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str, data: Path) -> None:
    found = local_data.read_task(name, data)
    assert isinstance(found, local_data.Pairs)
    first, second = (Counting().vectors(part) for part in (found.first, found.second))
    assert by_mteb(name, data) == pytest.approx(100 * spearmanr(cosines(first, second), found.scores)[0])


@pytest.mark.parametrize("name, per_label", [("Banking77Classification", 8), ("EmotionClassification", 16)])
def test_classes(name: str, per_label: int, data: Path) -> None:
    found = local_data.read_task(name, data)
    assert isinstance(found, local_data.Classes)
    train, test = (Counting().vectors(part.texts) for part in (found.train, found.test))
    labels, order, right = np.array(found.train.labels), np.arange(len(train)), []
    for _ in range(10):
        order = order[np.random.RandomState(42).permutation(len(order))]
        few = np.concatenate([order[labels[order] == k][:per_label] for k in range(max(labels) + 1)])
        few = np.array([i for i in order if i in set(few.tolist())])
        learned = LogisticRegression(max_iter=100, random_state=42).fit(train[few], labels[few])
        right.append(learned.score(test, found.test.labels))
    assert by_mteb(name, data) == pytest.approx(100 * np.mean(right))


def test_clusters(data: Path) -> None:
    found = local_data.read_task("TwentyNewsgroupsClustering", data)
    assert isinstance(found, local_data.Clusters)
    scores = []
    for one in found.sets:
        means = MiniBatchKMeans(len(set(one.labels)), batch_size=500, n_init="auto", random_state=42)
        scores.append(v_measure_score(one.labels, means.fit_predict(Counting().vectors(one.texts))))
    assert by_mteb("TwentyNewsgroupsClustering", data) == pytest.approx(100 * np.mean(scores))


def test_search(data: Path) -> None:
    found = local_data.read_task("SciFact", data)
    assert isinstance(found, local_data.Search)
    documents = np.stack([Counting.vector(f"{one.title} {one.text}".strip()) for one in found.documents])
    scores = []
    for query, relevant in found.relevant.items():
        near = np.argsort(-cosines(Counting.vector(found.queries[query])[None], documents))[:10]
        gains = [relevant.get(found.documents[i].id, 0) for i in near]
        best = sorted(relevant.values(), reverse=True)
        scores.append(discounted(gains) / discounted(best))
    assert by_mteb("SciFact", data) == pytest.approx(100 * np.mean(scores), abs=1e-3)  # mteb rounds


def discounted(gains: Sequence[float]) -> float:
    return sum(gain / math.log2(place + 2) for place, gain in enumerate(gains))


def test_end_to_end_and_from_embeddings(model: str, data: Path, tmp_path: Path) -> None:
    """An STS score by hand from the model, and all scores again from vectors in half precision."""
    found = scoring.score_model(model, TASKS, data, tmp_path / "out", CPU)
    assert tuple(found) == TASKS
    encoder, pairs = TransformerEncoder(model, CPU), local_data.read_task("STSBenchmark", data)
    assert isinstance(pairs, local_data.Pairs)
    first, second = encoder.vectors(pairs.first), encoder.vectors(pairs.second)
    assert found["STSBenchmark"] == pytest.approx(100 * spearmanr(cosines(first, second), pairs.scores)[0])
    kept = json.loads((tmp_path / "out" / "STSBenchmark.json").read_text())
    assert (
        kept["score"] == found["STSBenchmark"] == pytest.approx(100 * kept["scores"]["test"][0]["main_score"])
    )
    assert (kept["how"], kept["mteb"]) == ("end to end", mteb.__version__)
    scoring.embed_tasks(model, TASKS, data, tmp_path / "embeddings", CPU)
    again = scoring.score_model("elsewhere", TASKS, data, tmp_path / "again", CPU, tmp_path / "embeddings")
    assert again == pytest.approx(found, abs=1)
    kept = json.loads((tmp_path / "again" / "SciFact.json").read_text())
    assert (kept["how"], kept["model"]) == ("from embeddings", scoring.model_identity(model))


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("evaluated again")


def test_scores_are_kept_for_the_same_model(
    model: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = scoring.score_model(model, PAIRS[:2], data, tmp_path, CPU)
    (tmp_path / "SICK-R.json").write_text("{")  # damaged
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(mteb, "evaluate", refuse)
        assert scoring.score_model(model, PAIRS[:2], data, tmp_path, CPU) == {
            "STSBenchmark": found["STSBenchmark"]
        }
        assert capsys.readouterr().out == "SICK-R has no score: AssertionError('evaluated again')\n"
        other = tiny(tmp_path / "model", seed=1)
        assert scoring.score_model(other, PAIRS[:1], data, tmp_path, CPU) == {}
    assert scoring.score_model(model, PAIRS[:2], data, tmp_path, CPU) == found
    scoring.embed_tasks(model, PAIRS[:1], data, tmp_path / "embeddings", CPU)
    with pytest.raises(LabError, match="embeddings by another model than"):
        scoring.score_model(other, PAIRS[:1], data, tmp_path, CPU, tmp_path / "embeddings")


def test_scores_of_other_data_are_not_taken_for_these(model: str, data: Path, tmp_path: Path) -> None:
    shorter, path = tmp_path / "data", "embedding/stsbenchmark/sts-test.csv"
    (shorter / path).parent.mkdir(parents=True)
    (shorter / path).write_text("".join((data / path).read_text().splitlines(keepends=True)[:-2]))
    found, other, again = (
        scoring.score_model(model, PAIRS[:1], where, tmp_path / "out", CPU) for where in (data, shorter, data)
    )
    assert found == again != other


def test_a_task_that_fails_is_told_of_and_tried_again(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path)
    file = data / "embedding/biosses/biosses.csv"
    content = file.read_bytes()
    file.unlink()
    names = ("BIOSSES", "STS-None", "SICK-R")
    capsys.readouterr()
    first = scoring.score_model(model, names, data, tmp_path / "out", CPU)
    heard = capsys.readouterr().out.splitlines()
    assert list(first) == ["SICK-R"] and len(heard) == 2
    assert heard[0].startswith("BIOSSES has no score: DataError") and "biosses.csv cannot be read" in heard[0]
    assert heard[1].startswith("STS-None has no score") and "MTEB has no task" in heard[1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["SICK-R.json"]
    file.write_bytes(content)
    again = scoring.score_model(model, names, data, tmp_path / "out", CPU)
    assert list(again) == ["BIOSSES", "SICK-R"] and again["SICK-R"] == first["SICK-R"]
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_text_without_an_embedding_is_told(
    model: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scoring.embed_tasks(model, ["SICK-R"], data, tmp_path / "embeddings", CPU)
    capsys.readouterr()
    found = scoring.score_model(model, PAIRS, data, tmp_path, CPU, tmp_path / "embeddings")
    heard = capsys.readouterr().out.splitlines()
    assert list(found) == ["SICK-R"] and len(heard) == 2
    assert f"there is no embedding of {local_data.texts_to_encode('BIOSSES', data)[0]!r}" in heard[1]


def test_other_tasks_are_the_hubs_as_the_english_benchmark_has_them(
    model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = scoring.make_task("STS22", data)
    assert (list(news.hf_subsets), list(news.eval_splits)) == (["en"], ["test"])

    def load_data(task: Any, **kwargs: Any) -> None:
        task.dataset, task.data_loaded = scoring.to_dataset(local_data.read_task("SICK-R", data)), True

    monkeypatch.setattr(type(mteb.get_task("STS12")), "load_data", load_data)
    found = scoring.score_model(model, ["STS12", "SICK-R"], data, tmp_path, CPU)
    assert found["STS12"] == found["SICK-R"]
    assert json.loads((tmp_path / "STS12.json").read_text())["difference"] == "none: the hub's data"


def test_a_score_that_is_no_number_is_none(model: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "vectors", lambda self, texts: np.ones((len(texts), 4), np.float32))
    with pytest.raises(LabError, match="mteb's score is nan"):
        scoring.evaluate_task("BIOSSES", Counting(), data)


def test_bad_input(model: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="task 'STS12': must be one of"):
        scoring.embed_tasks(model, ["STS12"], data, tmp_path, CPU)
    with pytest.raises(LabError, match=r"model .*none cannot be loaded"):
        scoring.score_model(str(tmp_path / "none"), PAIRS, data, tmp_path / "out", CPU)
    with pytest.raises(LabError, match=r"embeddings.npz is missing"):
        scoring.score_model(model, PAIRS, data, tmp_path / "out", CPU, tmp_path / "none")
