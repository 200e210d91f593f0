"""Link prediction: the ratings' files, the network by dense matrices, a trial against a loop written out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.core.errors import DataError, LabError
from tam.lab.core.registry import get_experiment
from tam.lab.core.runner import check_trial
from tam.lab.core.store import TrialFolder, digest_of
from tam.lab.data import movielens
from tam.lab.experiments.graph import trial as graph
from tests.lab.experiments.test_images import outcome

CPU = torch.device("cpu")
pytest.importorskip("torch_geometric")


def config(**more: Any) -> graph.Config:
    given = {"optimizer": "sgdm", "lr": 0.02, "seed": 0, "epochs": 6, "data": "generated", "test": True}
    return graph.Config(**{**given, **more})


def run(root: Path, steps: int | None = None, **more: Any) -> TrialFolder:
    torch.set_num_threads(1)
    folder = TrialFolder(root, config(**more))
    with folder.at_work():
        for _ in itertools.islice(graph.run(config(**more), folder, root, CPU, 0.0), steps):
            pass
    return folder


def write(folder: Path, ratings: str, movies: str) -> None:
    (folder / "ml-latest-small").mkdir(parents=True, exist_ok=True)
    (folder / "ml-latest-small" / "ratings.csv").write_text(ratings, encoding="utf-8")
    (folder / "ml-latest-small" / "movies.csv").write_text(movies, encoding="utf-8")


MOVIES = 'movieId,title,genres\n7,"Café, The (1995)",Comedy|Drama\n3,Heat (1995),Drama\n9,Empty,Action\n'
RATINGS = "userId,movieId,rating,timestamp\n2,3,4.5,1\n2,7,1.0,2\n11,7,3.0,3\n"


def test_ratings_are_read_from_the_official_files(tmp_path: Path) -> None:
    write(tmp_path, RATINGS, MOVIES)
    found = movielens.read(tmp_path)
    assert found.users.tolist() == [0, 0, 1] and found.movies.tolist() == [1, 0, 0]
    assert found.values.tolist() == [4.5, 1.0, 3.0] and found.counts == (2, 3)
    assert found.titles == ["Café, The (1995)", "Heat (1995)", "Empty"]
    assert found.genres.tolist() == [[0, 1, 1], [0, 0, 1], [1, 0, 0]]  # Action, Comedy, Drama


@pytest.mark.parametrize(
    "ratings, movies, message",
    [
        (RATINGS.replace("4.5", "good"), MOVIES, "does not hold ratings"),
        (RATINGS.replace("11,7", "11,8"), MOVIES, "does not hold ratings"),
        ("userId,rating\n1,2\n", MOVIES, r"ratings.csv cannot be read: KeyError\('movieId'\)"),
    ],
)
def test_other_files_are_named(ratings: str, movies: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, ratings, movies)
    with pytest.raises(DataError, match=message):
        movielens.read(tmp_path)
    with pytest.raises(DataError, match=r"ml-latest-small/ratings.csv is damaged or not the official file"):
        check_trial(get_experiment("graph"), config(data="movielens"), tmp_path)


def dense(training: graph.Training) -> dict[str, torch.Tensor]:
    """The encoder by dense matrices: a node's new features are A(own) + B(mean of its neighbours)."""
    ratings, rows = training.ratings, training.parts[0]
    n, m = ratings.counts
    edges = torch.zeros(m, n, dtype=torch.float64)
    edges[ratings.movies[rows], ratings.users[rows]] = 1
    nodes = {k: x.double() for k, x in training.graph.features.items()}
    weights = {k: v.double() for k, v in training.network.encoder.state_dict().items()}
    for layer in ("first", "second"):
        found = {}
        for name, other, matrix, kind in (
            ("movie", "user", edges, "user__rates__movie"),
            ("user", "movie", edges.T, "movie__rated_by__user"),
        ):
            mean = matrix @ nodes[other] / matrix.sum(1, keepdim=True).clamp(min=1)
            part = f"{layer}.{kind}.lin_"
            found[name] = mean @ weights[part + "l.weight"].T + weights[part + "l.bias"]
            found[name] = found[name] + nodes[name] @ weights[part + "r.weight"].T
        nodes = {k: x.relu() if layer == "first" else x for k, x in found.items()}
    return nodes


def test_the_encoder_is_sage(tmp_path: Path) -> None:
    training = graph.Training(config(), TrialFolder(tmp_path, config()), tmp_path, CPU)
    with torch.no_grad():
        found = training.network(training.graph)
    for name, expected in dense(training).items():
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_warm_up_is_sgdm_and_then_a_fresh_adam(tmp_path: Path) -> None:
    """Losses, best validation and its test against torch's own optimizers."""
    folder = run(tmp_path, switch=3, adam_lr=0.01)
    training = graph.Training(config(), TrialFolder(tmp_path, config()), tmp_path, CPU)
    params = list(training.network.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9)
    # To predict the test ratings it sees those to train on and those to validate on.
    later = graph.make_graph(training.ratings, torch.cat([training.parts[0], training.parts[1]]), None, CPU)
    losses, scores, tests = [], [], []
    for epoch in range(6):
        if epoch == 3:
            optimizer = torch.optim.Adam(params, lr=0.01)
        optimizer.zero_grad()
        users, movies, values = training.pairs(0)
        loss = (training.network.rate(training.network(training.graph), users, movies) - values).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            for part, nodes, to in ((1, training.graph, scores), (2, later, tests)):
                users, movies, values = training.pairs(part)
                rated = training.network.rate(training.network(nodes), users, movies).clamp(0, 5)
                to.append((rated - values).pow(2).mean().sqrt().item())
    assert [row["loss"] for row in folder.metrics()] == pytest.approx(losses, rel=1e-4)
    assert [row["rmse"] for row in folder.metrics()] == pytest.approx(scores, rel=1e-4)
    result = folder.read_result()
    assert result is not None and result["rmse"] == pytest.approx(min(scores), rel=1e-4)
    assert result["test"] == pytest.approx(tests[scores.index(min(scores))], rel=1e-4)
    assert result["at"] == scores.index(min(scores)) + 1


def test_scores_are_of_ratings_there_are(tmp_path: Path) -> None:
    """Who predicts more than five stars, or fewer than none, is scored as if it were five, or none."""
    training = graph.Training(config(), TrialFolder(tmp_path, config()), tmp_path, CPU)
    with torch.no_grad():
        nodes, (_, _, values) = training.network(training.graph), training.pairs(1)
        for bias, shown in ((100.0, 5.0), (-100.0, 0.0)):
            training.network.decoder[-1].bias.fill_(bias)
            expected = (values - shown).square().mean().sqrt()
            assert training.rmse(nodes, 1) == pytest.approx(float(expected), rel=1e-5)


def test_a_run_whose_last_step_ends_in_no_number_has_diverged(tmp_path: Path) -> None:
    result = run(tmp_path, lr=1e30, epochs=1).read_result()
    assert result is not None and result["diverged"]


@pytest.mark.parametrize("more", [{"optimizer": "tam", "switch": 3}, {"optimizer": "adam", "lr": 0.01}])
def test_a_killed_trial_ends_with_the_same_bits(more: dict[str, Any], tmp_path: Path) -> None:
    whole = outcome(run(tmp_path / "whole", **more))
    for steps in (2, 5):  # before and after the switch
        run(tmp_path / str(steps), steps, **more)
        assert outcome(run(tmp_path / str(steps), **more)) == whole


def test_d_replaced_by_its_own_sequence_is_the_same_run(tmp_path: Path) -> None:
    for switch in (None, 3):
        source = run(tmp_path, optimizer="tam", switch=switch)
        control = {"optimizer": "tam", "switch": switch, "damping_of": source.key}
        assert outcome(run(tmp_path, damping="same", **control)) == outcome(source)
        assert outcome(run(tmp_path, damping="mean", **control)) != outcome(source)


@pytest.mark.parametrize("optimizer, option", [("tam", "smoothing"), ("sgdm", "dampening")])
def test_a_warm_up_records_the_options_of_its_first_optimizer(
    optimizer: str, option: str, tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", optimizer=optimizer, switch=3)
    run(tmp_path / "parts", 5, optimizer=optimizer, switch=3)  # killed after the switch
    for folder in (whole, run(tmp_path / "parts", optimizer=optimizer, switch=3)):
        result = folder.read_result()
        assert result is not None and result["settings"]["optimizer"] == optimizer
        options = result["settings"]["options"]
        assert options["momentum"] == 0.9 and option in options and "betas" not in options


def test_titles_are_features(tmp_path: Path) -> None:
    titles = torch.randn(40, 8).half()
    name = f"titles-{digest_of(titles.numpy().tobytes())}.pt"
    for path in (tmp_path / name, tmp_path / "titles-x.pt"):
        torch.save(titles, path)
    with pytest.raises(LabError, match=r"titles-x.pt is damaged or has other embeddings"):
        run(tmp_path, titles="titles-x.pt")
    torch.save({"titles": titles}, tmp_path / "titles-x.pt")
    with pytest.raises(LabError, match=r"titles-x.pt with the titles' embeddings cannot be read"):
        run(tmp_path, titles="titles-x.pt")
    more = outcome(run(tmp_path, titles=name))[0]["parameters"]
    assert more - outcome(run(tmp_path))[0]["parameters"] == 2 * 8 * 32  # both directions read them


@pytest.mark.parametrize("mistake", [{"data": "ml"}, {"switch": 6}, {"switch": 0}, {"epochs": 0}])
def test_mistakes(mistake: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        config(**mistake)
