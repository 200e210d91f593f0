"""Link prediction: which rating a user gives a movie, by a graph network (the paper's second warm-up).

Users and movies are nodes, ratings edges. Two layers of SAGE, made heterogeneous by PyTorch Geometric, encode
the nodes from the training ratings. A decoder of two layers predicts the rating of an edge from its two
nodes. The whole graph is one batch.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tam
from tam.lab.core.config import TrialConfig, effective_settings
from tam.lab.core.errors import LabError
from tam.lab.core.store import TrialFolder, digest_of, write_whole
from tam.lab.data import files, find, movielens
from tam.lab.models import count_parameters
from tam.lab.training.damping_control import load_source_alignment
from tam.lab.training.factory import make_optimizer
from tam.lab.training.loop import NetworkLearner, Progress, StepRecorder, train_epochs
from tam.lab.training.metrics import grad_norm

EDGES = (("user", "rates", "movie"), ("movie", "rated_by", "user"))
LOWEST, HIGHEST = 0.0, 5.0  # predictions are clamped to these when they are scored
TRAIN, VALIDATION, TEST = range(3)  # parts of the ratings


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """Everything that determines a trial. `options` are the first optimizer's besides lr."""

    data: str  # "movielens" or "generated"
    switch: int | None = None  # the epoch in which Adam takes over, with fresh state
    adam_lr: float = 0.001  # from there on
    hidden: int = 32
    titles: str | None = None  # a file in the output folder with an embedding of every title
    users: int = 20  # of generated ratings

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data not in ("movielens", "generated"):
            raise ValueError(f"data={self.data!r}: must be 'movielens' or 'generated'")
        is_inside = self.switch is None or 0 < self.switch < self.epochs
        if min(self.epochs, self.hidden) < 1 or not is_inside:
            raise ValueError("epochs and hidden must be at least 1, switch an epoch in between")


def generate_ratings(users: int) -> movielens.Ratings:
    """Return ratings by users of a few tastes, to show that everything runs."""
    generator, movies = torch.Generator().manual_seed(0), 2 * users
    taste, kind = (torch.randint(0, 4, (n,), generator=generator) for n in (users, movies))
    is_rated = torch.rand(users, movies, generator=generator) < 0.3
    user, movie = is_rated.nonzero().unbind(1)
    noise = torch.randint(0, 2, (len(user),), generator=generator) / 2
    values = torch.where(taste[user] == kind[movie], 4.5, 2.0) + noise
    return movielens.Ratings(user, movie, values, nn.functional.one_hot(kind, 4).float(), [""] * movies)


@cache
def _load_ratings(folder: Path, data: str, users: int) -> movielens.Ratings:
    return movielens.read(folder) if data == "movielens" else generate_ratings(users)


def resolve_encoder(encoder: str, out: Path, data_folder: Path) -> dict[str, str]:
    """Embed all titles with a sentence encoder. Return the file, which has a digest in its name."""
    if encoder.startswith(("/", ".", "~")) and not Path(encoder).is_dir():  # not a name on the hub
        raise LabError(f"--encoder: no such folder: {encoder}")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise LabError("--encoder needs a package. Run: pip install sentence-transformers") from error
    files.check("movielens", find("movielens", data_folder), data_folder)
    titles = movielens.read(data_folder).titles
    try:
        model = SentenceTransformer(encoder, device="cpu", trust_remote_code=False)
    except Exception as error:  # of many kinds: no such folder, no network, another format
        raise LabError(f"--encoder {encoder} cannot be loaded: {error}") from error
    embeddings = torch.from_numpy(model.encode(titles, show_progress_bar=False)).half()
    name, buffer = _titles_name(embeddings), io.BytesIO()
    torch.save(embeddings, buffer)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / name, buffer.getvalue())
    return {"titles": name}


def _load_titles(path: Path, count: int) -> Tensor:
    try:
        embeddings: Tensor = torch.load(path, weights_only=True)
        name = _titles_name(embeddings)
    except Exception as error:  # it is missing, or torch raises any error of its reader
        raise LabError(f"{path} with the titles' embeddings cannot be read: give --encoder again") from error
    if path.name != name:
        raise LabError(f"{path} is damaged or has other embeddings: give --encoder again")
    if len(embeddings) != count:
        raise LabError(f"{path} has {len(embeddings)} embeddings for {count} movies")
    return embeddings.float()


def _titles_name(embeddings: Tensor) -> str:
    return f"titles-{digest_of(embeddings.numpy().tobytes())}.pt"


class Encoder(nn.Module):
    """Two layers for one kind of node. `to_hetero` makes them layers for users and movies."""

    def __init__(self, hidden: int) -> None:
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.first, self.second = (SAGEConv((-1, -1), hidden) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)  # type: ignore[no-any-return]


class Network(nn.Module):
    """Encoder and decoder."""

    def __init__(self, hidden: int) -> None:
        from torch_geometric.nn import to_hetero

        super().__init__()
        self.encoder = to_hetero(Encoder(hidden), (["user", "movie"], list(EDGES)), aggr="sum")
        self.decoder = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, graph: Graph) -> dict[str, Tensor]:
        return self.encoder(graph.features, graph.edges)  # type: ignore[no-any-return]

    def rate(self, nodes: dict[str, Tensor], users: Tensor, movies: Tensor) -> Tensor:
        pair = torch.cat([nodes["user"][users], nodes["movie"][movies]], dim=1)
        return self.decoder(pair).squeeze(1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Graph:
    """What the encoder sees: features of all nodes, and some of the ratings as edges."""

    features: dict[str, Tensor]
    edges: dict[tuple[str, str, str], Tensor]  # as sparse matrices: rows receive


def make_graph(
    ratings: movielens.Ratings, rows: Tensor, titles: Tensor | None, device: torch.device
) -> Graph:
    """Return the graph of some ratings. A user's features are its number, a movie's its genres and title."""
    from torch_geometric.utils import to_torch_csr_tensor

    n, m = ratings.counts
    movies = ratings.genres if titles is None else torch.cat([ratings.genres, titles], dim=1)
    to_movie = torch.stack([ratings.movies[rows], ratings.users[rows]])
    with warnings.catch_warnings():  # torch's: such matrices are new to it, and not checked
        warnings.filterwarnings("ignore", "Sparse (invariant checks|CSR tensor support)", UserWarning)
        edges = {
            EDGES[0]: to_torch_csr_tensor(to_movie, size=(m, n)).to(device),
            EDGES[1]: to_torch_csr_tensor(to_movie.flip(0), size=(n, m)).to(device),
        }
    return Graph({"user": torch.eye(n).to(device), "movie": movies.to(device)}, edges)


class Training(NetworkLearner):
    """A network and its optimizer on the ratings of a seed's split: 80% to train, 10% to validate."""

    def __init__(self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device) -> None:
        self.config, self.device = config, device
        self.ratings = _load_ratings(data_folder, config.data, config.users)
        self.titles = None
        if config.titles is not None:
            path = folder.path.parent.parent / config.titles
            self.titles = _load_titles(path, len(self.ratings.titles))
        n = len(self.ratings.values)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(config.seed))
        self.parts = torch.split(order, [n - 2 * (n // 10), n // 10, n // 10])
        torch.manual_seed(config.seed)
        self.network = Network(config.hidden)
        with torch.no_grad():  # layers learn their sizes and draw their weights, on the CPU for any device
            self.network(make_graph(self.ratings, self.parts[TRAIN], self.titles, torch.device("cpu")))
        self.network.to(device)
        self.graph = make_graph(self.ratings, self.parts[TRAIN], self.titles, device)
        self.optimizer = make_optimizer(config, self.network.parameters(), config.lr)
        self.settings = effective_settings(config, self.optimizer)  # without those of the warm-up
        if config.switch is not None:
            make_adam = partial(torch.optim.Adam, lr=config.adam_lr)
            self.optimizer = tam.Warmup(self.optimizer, make_adam, config.switch)
        source = load_source_alignment(config, folder, self.optimizer)
        self.recorder = StepRecorder(
            config.epochs, device, source, source_name=config.damping_of, aligned_steps=config.switch,
            measurements=2, dtype=torch.float64,
        )  # fmt: skip
        self.nodes: dict[str, Tensor] | None = None  # the encoder's output, with its autograd graph
        self.best_rmse, self.best_weights = math.inf, self.network.state_dict()

    def pairs(self, part: int) -> tuple[Tensor, ...]:
        """Return users, movies and ratings of a part."""
        columns = (self.ratings.users, self.ratings.movies, self.ratings.values)
        return tuple(column[self.parts[part]].to(self.device) for column in columns)

    @torch.no_grad()
    def rmse(self, nodes: dict[str, Tensor], part: int) -> float:
        users, movies, values = self.pairs(part)
        predicted = self.network.rate(nodes, users, movies).clamp(LOWEST, HIGHEST)
        return float((predicted - values).square().mean().sqrt())

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any]]:
        """Train one step. The encoder's output after it serves to validate, and for the next step."""
        nodes = self.network(self.graph) if self.nodes is None else self.nodes
        self.optimizer.zero_grad()
        users, movies, values = self.pairs(TRAIN)
        error = (self.network.rate(nodes, users, movies) - values).square().mean()
        error.backward()  # type: ignore[no-untyped-call]
        self.recorder.step(self.optimizer, error, grad_norm(self.network))
        self.nodes = self.network(self.graph)
        rmse = self.rmse(self.nodes, VALIDATION)
        if rmse < self.best_rmse:
            self.best_rmse = rmse
            self.best_weights = {k: v.clone() for k, v in self.network.state_dict().items()}
        loss, norm, alignment = self.recorder.values[epoch].tolist()
        row = {"epoch": epoch + 1, "loss": loss, "grad_norm": norm, "rmse": rmse, "best": self.best_rmse}
        yield None
        return row if math.isnan(alignment) else {**row, "alignment": alignment}

    @torch.no_grad()
    def test_rmse(self) -> float:
        """Return the test RMSE of the best weights. They see the training and the validation ratings."""
        rows = torch.cat([self.parts[TRAIN], self.parts[VALIDATION]])
        self.network.load_state_dict(self.best_weights)
        return self.rmse(self.network(make_graph(self.ratings, rows, self.titles, self.device)), TEST)

    def result(self, metrics: list[dict[str, Any]]) -> dict[str, Any]:
        last, best = metrics[-1], min(metrics, key=lambda row: row["rmse"])
        result = {
            "rmse": self.best_rmse, "last": last["rmse"], "at": best["epoch"], "epochs": len(metrics),
            "diverged": not math.isfinite(last["loss"] + last["rmse"]),  # the loss is of before the last step
            "parameters": count_parameters(self.network),
        }  # fmt: skip
        return {**result, "test": self.test_rmse()} if self.config.test else result

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("network", "optimizer", "recorder")}
        return {**parts, "best": self.best_rmse, "weights": self.best_weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("network", "optimizer", "recorder"):
            getattr(self, name).load_state_dict(state[name])
        self.best_rmse, self.best_weights = float(state["best"]), state["weights"]


def run(
    config: Config, folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float = 60.0
) -> Iterator[Progress | None]:
    """Train from the last checkpoint, if there is one."""
    training = Training(config, folder, data_folder, device)
    seconds = yield from train_epochs(training, folder, device, config.epochs, save_every)
    if len(folder.rows) >= (config.switch or 0):  # a warm-up that ended before its switch is no source
        training.recorder.write_alignment(folder)
    folder.finish({**training.result(folder.rows), "settings": training.settings}, seconds, device)
