"""Link prediction: which rating a user gives a movie, by a graph network (the paper's second warm-up).

Users and movies are nodes, ratings edges. Two layers of SAGE, made heterogeneous by PyTorch Geometric, encode
the nodes from the ratings to train on; a decoder of two layers predicts the rating of an edge from its two
nodes. The whole graph is one batch.
"""

from __future__ import annotations

import importlib.util
import io
import math
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tam
from tam import registry
from tam.lab.damping import (
    check_damping,
    check_length,
    given_alignment,
    keep_alignment,
    replace_alignment,
    watched,
)
from tam.lab.data import files, find, movielens
from tam.lab.making import make_optimizer
from tam.lab.models import parameters
from tam.lab.store import LabError, TrialFolder, digest_of, write_whole
from tam.lab.trial import Progress, by_epochs, resolved, told

EDGES = (("user", "rates", "movie"), ("movie", "rated_by", "user"))
LEAST, MOST = 0.0, 5.0  # predictions are clamped to, when they are scored


@dataclass(frozen=True)
class Config:
    """All that determines a trial. `options` are the first optimizer's besides lr."""

    optimizer: str
    lr: float
    seed: int
    epochs: int
    data: str  # "movielens", or "generated"
    switch: int | None = None  # the epoch from which Adam is at work, with fresh state
    adam_lr: float = 0.001  # from there on
    hidden: int = 32
    titles: str | None = None  # a file beside the trials with an embedding of every title
    users: int = 20  # that generate ratings
    options: dict[str, Any] = field(default_factory=dict)
    damping: str | None = None
    damping_of: str | None = None
    test: bool = False

    def __post_init__(self) -> None:
        registry.get(self.optimizer)
        if self.data not in ("movielens", "generated"):
            raise ValueError(f"data={self.data!r}: must be 'movielens' or 'generated'")
        if min(self.epochs, self.hidden) < 1 or (
            self.switch is not None and not 0 < self.switch < self.epochs
        ):
            raise ValueError("epochs and hidden must be at least 1, switch an epoch in between")
        check_damping(self)


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**options))


def check(trial: dict[str, Any], data_folder: Path) -> None:
    """Raises where ratings or packages are missing."""
    if importlib.util.find_spec("torch_geometric") is None:
        raise LabError("graph needs the package torch_geometric: pip install 'torque-aware-momentum[graph]'")
    if Config(**trial).data == "movielens":
        files.check("movielens", find("movielens", data_folder), data_folder)


def generate(users: int, seed: int = 0) -> movielens.Ratings:
    """Ratings by users of few tastes, to see that everything runs."""
    generator = torch.Generator().manual_seed(seed)
    movies = 2 * users
    taste, kind = (torch.randint(0, 4, (n,), generator=generator) for n in (users, movies))
    pairs = torch.rand(users, movies, generator=generator) < 0.3
    who, what = pairs.nonzero().unbind(1)
    noise = torch.randint(0, 2, (len(who),), generator=generator) / 2
    values = torch.where(taste[who] == kind[what], 4.5, 2.0) + noise
    return movielens.Ratings(who, what, values, nn.functional.one_hot(kind, 4).float(), [""] * movies)


# ---------------------------------------------------------------------- titles


def embed_titles(encoder: str, data_folder: Path, root: Path) -> str:
    """Embeds all titles by a sentence encoder; the name of the file with them, which has their digest."""
    if encoder.startswith(("/", ".", "~")) and not Path(encoder).is_dir():  # no name on the hub
        raise LabError(f"--encoder {encoder}: no such folder")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise LabError("--encoder needs a package: pip install sentence-transformers") from error
    files.check("movielens", find("movielens", data_folder), data_folder)
    titles = movielens.read(data_folder).titles
    try:
        model = SentenceTransformer(encoder, device="cpu")
    except Exception as error:  # of many kinds: no such folder, no network, another format
        raise LabError(f"--encoder {encoder} cannot be loaded: {error}") from error
    found = torch.from_numpy(model.encode(titles, show_progress_bar=False)).half()
    name = _file_of(found)
    root.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(found, buffer)
    write_whole(root / name, buffer.getvalue())
    return name


def _titles(path: Path, count: int) -> Tensor:
    try:
        found: Tensor = torch.load(path, weights_only=True)
        name = _file_of(found)
    except Exception as error:  # it is missing, or torch raises whatever its reader meets
        raise LabError(f"{path} with the titles' embeddings cannot be read: give --encoder again") from error
    if path.name != name:
        raise LabError(f"{path} has not the titles' embeddings it was made with: give --encoder again")
    if len(found) != count:
        raise LabError(f"{path} has {len(found)} embeddings for {count} movies")
    return found.float()


def _file_of(titles: Tensor) -> str:
    return f"titles-{digest_of(titles.numpy().tobytes())}.pt"


# ---------------------------------------------------------------------- the network


class Encoder(nn.Module):
    """Two layers, for one kind of node; `to_hetero` makes it one for users and movies."""

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

    def to(self, device: torch.device) -> Graph:
        return Graph(
            {k: x.to(device) for k, x in self.features.items()},
            {k: x.to(device) for k, x in self.edges.items()},
        )


def graph_of(ratings: movielens.Ratings, rows: Tensor, titles: Tensor | None) -> Graph:
    """A user's features are its number; a movie's its genres and, where given, its title's embedding."""
    from torch_geometric.utils import to_torch_csr_tensor

    n, m = ratings.counts
    movies = ratings.genres if titles is None else torch.cat([ratings.genres, titles], dim=1)
    to_movie = torch.stack([ratings.movies[rows], ratings.users[rows]])
    with warnings.catch_warnings():  # of torch's: such matrices are new to it, and not checked
        warnings.filterwarnings("ignore", "Sparse (invariant checks|CSR tensor support)", UserWarning)
        adjacency = {
            EDGES[0]: to_torch_csr_tensor(to_movie, size=(m, n)),
            EDGES[1]: to_torch_csr_tensor(to_movie.flip(0), size=(n, m)),
        }
    return Graph({"user": torch.eye(n), "movie": movies}, adjacency)


@cache
def _ratings(folder: Path, data: str, users: int) -> movielens.Ratings:
    return movielens.read(folder) if data == "movielens" else generate(users)


# ---------------------------------------------------------------------- a trial


class Training:
    """A network and its optimizer on the ratings of a seed's split: 80% to train on, 10% to validate on."""

    def __init__(self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device) -> None:
        self.config, self.device = config, device
        self.ratings = _ratings(data_folder, config.data, config.users)
        titles = None
        if config.titles is not None:
            titles = _titles(folder.path.parent.parent / config.titles, len(self.ratings.titles))
        n = len(self.ratings.values)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(config.seed))
        self.parts = torch.split(order, [n - 2 * (n // 10), n // 10, n // 10])
        graph = graph_of(self.ratings, self.parts[0], titles)
        torch.manual_seed(config.seed)
        self.network = Network(config.hidden)
        with torch.no_grad():
            self.network(graph)  # layers learn their sizes, and draw their weights: of any device the same
        self.network.to(device)
        self.graph = graph.to(device)
        self.later: Graph | None = None
        if config.test:
            self.later = graph_of(self.ratings, torch.cat(self.parts[:2]), titles).to(device)
        self.given = given_alignment(config, folder)
        check_length(self.given, config.switch or config.epochs)
        if self.given is not None:
            self.given = self.given.to(device)
        self.optimizer = first = make_optimizer(config, self.network.parameters(), config.lr)
        if config.switch is not None:
            self.optimizer = tam.Warmup(first, self._adam, config.switch)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)
        self.alignments: list[float] = []
        self.nodes: dict[str, Tensor] | None = None  # what the encoder says, with the graph to learn from it
        self.best, self.weights = math.inf, self.network.state_dict()  # the least validation error, and whose

    def _adam(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=self.config.adam_lr)

    def pairs(self, part: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.parts[part]
        users, movies, values = (
            x[rows] for x in (self.ratings.users, self.ratings.movies, self.ratings.values)
        )
        return users.to(self.device), movies.to(self.device), values.to(self.device)

    def loss(self, nodes: dict[str, Tensor], part: int) -> Tensor:
        users, movies, values = self.pairs(part)
        return (self.network.rate(nodes, users, movies) - values).square().mean()

    @torch.no_grad()
    def rmse(self, nodes: dict[str, Tensor], part: int) -> float:
        users, movies, values = self.pairs(part)
        found = self.network.rate(nodes, users, movies).clamp(LEAST, MOST)
        return float((found - values).square().mean().sqrt())

    def step(self, nodes: dict[str, Tensor]) -> tuple[float, float]:
        """Learns from what the encoder said; the loss and |g|."""
        self.optimizer.zero_grad()
        loss = self.loss(nodes, 0)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([p.grad.norm() for p in self.network.parameters() if p.grad is not None]).norm()
        s = watched(self.optimizer)
        if self.given is not None and s:
            replace_alignment(s, self.given, self.taken)
        self.optimizer.step()
        if s:
            self.alignments.append(float(torch.stack(s).mean()))
        self.taken += 1
        return float(loss.detach()), float(norm)

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any]]:
        """A step. What the encoder says after it serves to validate, and to learn from in the next one."""
        loss, norm = self.step(self.network(self.graph) if self.nodes is None else self.nodes)
        self.nodes = self.network(self.graph)
        rmse = self.rmse(self.nodes, 1)
        if rmse < self.best:
            self.best = rmse
            self.weights = {k: v.clone() for k, v in self.network.state_dict().items()}
        row = {"epoch": epoch + 1, "loss": loss, "grad_norm": norm, "rmse": rmse, "best": self.best}
        yield None
        return {**row, "alignment": self.alignments[-1]} if len(self.alignments) == epoch + 1 else row

    def state_dict(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(), "optimizer": self.optimizer.state_dict(),
            "taken": self.taken, "alignments": torch.tensor(self.alignments, dtype=torch.float64),
            "best": self.best, "weights": self.weights,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.taken.copy_(state["taken"])
        self.alignments = state["alignments"].tolist()
        self.best, self.weights = float(state["best"]), state["weights"]


def run(
    config: dict[str, Any],
    folder: TrialFolder,
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Trains, from the last checkpoint where there is one."""
    settings = Config(**config)
    training = Training(settings, folder, data_folder, device)
    seconds = yield from by_epochs(training, folder, device, settings.epochs, save_every)
    if training.alignments and settings.switch in (None, len(training.alignments)):
        keep_alignment(folder, torch.tensor(training.alignments, dtype=torch.float64))
    last = folder.rows[-1]
    result = {
        "rmse": training.best, "last": last["rmse"], "at": _at(folder), "epochs": len(folder.rows),
        "diverged": not math.isfinite(last["loss"] + last["rmse"]),  # the loss is of before the last step
        "parameters": parameters(training.network), "settings": resolved(settings, training.optimizer),
    }  # fmt: skip
    if training.later is not None:
        training.network.load_state_dict(training.weights)
        with torch.no_grad():
            result["test"] = training.rmse(training.network(training.later), 2)
    folder.finish(result, seconds, device)


def _at(folder: TrialFolder) -> int:
    """The epoch of the best validation."""
    return int(min(folder.rows, key=lambda row: row["rmse"])["epoch"])
