"""Online learning under label flips: a whole population of small networks trained as one program.

A trial is one network: an MLP that learns one task after the other, whose labels are those of the task before
with some of them changed. Each batch is predicted before it is learned. The networks are tiny, so that trials
of one kind (depth, width, tasks) run together: parameters are stacked, a step is a few batched matrix
products and one update of all, on a GPU as one CUDA graph. A member computes what it would alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from tam import functional
from tam.lab.damping import check_damping, check_length, given_alignment, keep_alignment
from tam.lab.data import files, find, load, split
from tam.lab.graphed import Graphed
from tam.lab.images import Progress, normalise, told
from tam.lab.store import LabError, TrialFolder

OPTIMIZERS = ("sgd", "sgdm", "tam")


@dataclass(frozen=True)
class Config:
    """All that determines a trial. What the lab calls an epoch is a task here."""

    depth: int  # hidden layers
    delta: int  # percent of the labels that change from task to task
    optimizer: str
    lr: float
    seed: int
    epochs: int  # tasks
    passes: int = 40  # through the data, a task
    batch: int = 128
    width: int = 128
    reading: str = "classes"  # whose labels are permuted among themselves; or "samples", that get new ones
    data: str = "cifar10"
    held_out: int = 10000
    options: dict[str, Any] = field(default_factory=dict)  # none
    damping: str | None = None
    damping_of: str | None = None
    test: bool = False  # there is nothing to test on

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")
        if self.reading not in ("classes", "samples"):
            raise ValueError(f"reading={self.reading!r}: must be 'classes' or 'samples'")
        if (
            min(self.depth, self.epochs, self.passes, self.batch, self.width) < 1
            or not 0 <= self.delta <= 100
        ):
            raise ValueError("depth, epochs, passes, batch and width must be at least 1, delta in 0 to 100")
        if self.options:
            raise ValueError(f"options={self.options}: a population's members have those of the paper")
        check_damping(self)

    @property
    def momentum(self) -> float:
        return 0.0 if self.optimizer == "sgd" else 0.9


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**options))


def kind_of(trial: dict[str, Any]) -> str:
    """Trials of one kind can be one population."""
    config = Config(**trial)
    named = ("depth", "width", "epochs", "passes", "batch", "data", "held_out")
    return ", ".join(f"{name} {getattr(config, name)}" for name in named)


def check(trial: dict[str, Any], data_folder: Path) -> None:
    """Raises where the data is not there."""
    config = Config(**trial)
    files.check(config.data, find(config.data, data_folder), data_folder)


def network(features: int, classes: int, config: Config) -> nn.Sequential:
    """A member as a module: what it begins with."""
    torch.manual_seed(config.seed)
    sizes = [features, *[config.width] * config.depth]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def labels_of(task: int, labels: Tensor, classes: int, config: Config) -> Tensor:
    """Of a task, the first being 0, which has the true ones. Every task changes those of the one before."""
    generator = torch.Generator().manual_seed(config.seed * 1009 + config.delta)
    for _ in range(task):
        if config.reading == "classes":
            some = torch.randperm(classes, generator=generator)[: round(classes * config.delta / 100)]
            names = torch.arange(classes)
            names[some] = some.roll(1)  # in a ring of random order: none keeps its own
            labels = names[labels]
        else:
            some = torch.randperm(len(labels), generator=generator)[: len(labels) * config.delta // 100]
            labels = labels.clone()
            labels[some] = torch.randint(0, classes, (len(some),), generator=generator)
    return labels


PLAIN, TORQUE, GIVEN = 0, 1, 2  # the rules members follow: SGD with momentum, TAM, TAM with another's d


class Block:
    """Members that follow one rule, as many of each seed: those of a seed share their batches.

    The first layer's weights are [seeds, inputs, members, width], so that a seed's batch meets all of its
    members in one matrix product, without a copy for each; all others are [seeds, members, in, out].
    """

    def __init__(self, rule: int, members: Sequence[Sequence[int]], configs: Sequence[Config]) -> None:
        self.rule, self.members = rule, members  # by seed
        self.configs = [[configs[i] for i in row] for row in members]
        self.lr, self.momentum = (
            torch.tensor([[getattr(one, key) for one in row] for row in self.configs])
            for key in ("lr", "momentum")
        )
        self.alignment = torch.zeros(self.lr.shape)
        self.params: list[Tensor] = []
        self.momenta: list[Tensor] = []

    def make(self, networks: dict[int, list[Tensor]], device: torch.device) -> None:
        """Parameters from each seed's network, and momenta of 0."""
        count = self.lr.shape[1]
        for layer in range(len(networks[self.configs[0][0].seed])):
            each = torch.stack([networks[row[0].seed][layer] for row in self.configs])
            spread = (
                each[:, :, None].expand(-1, -1, count, -1)
                if layer == 0
                else each[:, None].expand(-1, count, -1, -1)
            )
            self.params.append(spread.contiguous().to(device).requires_grad_())
        self.momenta = [torch.zeros_like(p) for p in self.params]
        self.lr, self.momentum = self.lr.to(device), self.momentum.to(device)
        self.alignment = self.alignment.to(device)

    def answers(self, x: Tensor) -> Tensor:
        """[seeds, members, batch, classes], given the seeds' batches."""
        h = (at_once if x.device.type == "cuda" else one_by_one)(x, self.params[0]) + self.params[1]
        for weight, bias in zip(self.params[2::2], self.params[3::2], strict=True):
            h = torch.matmul(h.relu(), weight) + bias
        return h

    def update(self, grads: Sequence[Tensor], given: Tensor | None) -> None:
        """One step of all; `given` is s, where it is another's."""
        if self.rule == PLAIN:
            for layer, (p, g, m) in enumerate(zip(self.params, grads, self.momenta, strict=True)):
                shape = (len(self.lr), 1, -1, 1) if layer == 0 else (len(self.lr), -1, 1, 1)
                m.mul_(self.momentum.view(shape)).add_(g)
                p.sub_(self.lr.view(shape) * m)
            return
        state = functional.TAMState(self.momenta, self.alignment if given is None else given)
        member: Any = [1, *[0] * (len(grads) - 1)]  # where members lie, once seeds are taken apart
        whose: Any = functional.TAMState(member, 0)  # type: ignore[arg-type]
        one_seed = vmap(
            _free if given is None else _kept,
            in_dims=(member, member, whose, 0, 0),
            out_dims=(member, whose),
        )
        after, (moved, s) = vmap(one_seed)(self.params, list(grads), state, self.lr, self.momentum)
        for mine, new in zip((*self.params, *self.momenta, self.alignment), (*after, *moved, s), strict=True):
            mine.copy_(new)

    def tensors(self, row: int, place: int) -> list[Tensor]:
        """A member's own: parameters and momenta."""
        columns = (self.params, self.momenta)
        return [x[row, :, place] if i == 0 else x[row, place] for c in columns for i, x in enumerate(c)]


def at_once(x: Tensor, weight: Tensor) -> Tensor:
    """[seeds, batch, in] times [seeds, in, members, out], one product for all members of a seed."""
    seeds, _, members, out = weight.shape
    return torch.bmm(x, weight.flatten(2)).view(seeds, -1, members, out).transpose(1, 2)


def one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    """The same, so that a member's bits do not depend on its company."""
    return torch.matmul(x[:, None], weight.transpose(1, 2))


def _free(p: Any, g: Any, state: functional.TAMState, lr: Tensor, momentum: Tensor) -> Any:
    """A member's step of TAM."""
    return functional.tam(p, g, state, lr=lr, momentum=momentum)


def _kept(p: Any, g: Any, state: functional.TAMState, lr: Tensor, momentum: Tensor) -> Any:
    """The same with s as it is given."""
    return functional.tam(p, g, state, lr=lr, momentum=momentum, smoothing=1.0)


def _rule(config: Config) -> int:
    if config.optimizer != "tam":
        return PLAIN
    return TORQUE if config.damping is None else GIVEN


def _blocks(configs: Sequence[Config]) -> list[Block]:
    """All members of a rule in one block where every seed has as many, else one for each number of them."""
    seeds: dict[tuple[int, int], list[int]] = {}
    for i, config in enumerate(configs):
        seeds.setdefault((_rule(config), config.seed), []).append(i)
    sizes: dict[tuple[int, int], list[list[int]]] = {}
    for (rule, _), members in sorted(seeds.items()):
        sizes.setdefault((rule, len(members)), []).append(members)
    return [Block(rule, members, configs) for (rule, _), members in sorted(sizes.items())]


class Population:
    """Stacked networks, their momenta and one step of all of them.

    Members are numbered as their blocks have them; `order` says which of those that were given each is.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        data_folder: Path,
        device: torch.device,
        given: Sequence[Tensor | None],
    ) -> None:
        first = configs[0]
        self.device, self.batch, self.passes = device, first.batch, first.passes
        self.blocks = _blocks(configs)
        self.order = [i for block in self.blocks for row in block.members for i in row]
        self.configs = [configs[i] for i in self.order]
        self._load(first, data_folder)
        self.steps = self.indices.shape[1] // first.batch  # of a pass
        if self.steps == 0:
            raise LabError(f"{self.indices.shape[1]} images make no batch of {first.batch}")
        self._make()
        self.given = self._give([given[i] for i in self.order])
        self.losses_of, self.update = self._losses_of, self._update
        if device.type == "cuda":
            self.losses_of = torch.compile(self._losses_of, dynamic=False, fullgraph=True)
            self.update = torch.compile(self._update, dynamic=False, fullgraph=True)
        self.step = Graphed(self._step, device)

    def _load(self, config: Config, data_folder: Path) -> None:
        """The images of all, and which of them each seed learns from."""
        data = load(config.data, data_folder)
        images, self.labels = data.train
        mean, std = (torch.tensor(x)[:, None, None] for x in (data.mean, data.std))
        self.images = normalise(images, mean, std).flatten(1).to(self.device)
        self.classes = data.classes
        self.seeds = sorted({config.seed for config in self.configs})
        kept = [split(len(self.labels), config.held_out, seed)[0] for seed in self.seeds]
        self.indices = torch.stack(kept)

    def _make(self) -> None:
        networks: dict[int, list[Tensor]] = {}
        for config in self.configs:
            if config.seed not in networks:
                layers = network(self.images.shape[1], self.classes, config).parameters()
                networks[config.seed] = [p.detach().t() if p.ndim == 2 else p.detach()[None] for p in layers]
        n, d = len(self.configs), self.device
        for block in self.blocks:
            block.make(networks, d)
        place = {seed: i for i, seed in enumerate(self.seeds)}
        self.seed_of = torch.tensor([place[config.seed] for config in self.configs], device=d)
        self.seeds_of = [  # the block's
            torch.tensor([place[row[0].seed] for row in block.configs], device=d) for block in self.blocks
        ]
        self.names = torch.zeros(n, len(self.labels), dtype=torch.int64, device=d)  # labels of the task
        self.drawn = torch.zeros(len(self.seeds), self.indices.shape[1], dtype=torch.int64, device=d)
        self.position, self.taken = (torch.zeros((), dtype=torch.int64, device=d) for _ in range(2))
        self.now = torch.zeros(1, dtype=torch.int64, device=d)  # the pass
        self.lanes = torch.arange(self.batch, device=d)
        self.right = torch.zeros(n, self.passes, dtype=torch.float64, device=d)
        self.loss = torch.zeros(n, dtype=torch.float64, device=d)
        self.seen = torch.zeros(n, self.steps * self.passes, device=d)  # s of every step of the task

    def _give(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """For each block s of every step of the run, [seeds, members, steps], where it is another's."""
        found: list[Tensor | None] = []
        rest = list(given)
        for block in self.blocks:
            count = block.lr.numel()
            mine, rest = [s for s in rest[:count] if s is not None], rest[count:]
            found.append(torch.stack(mine).view(*block.lr.shape, -1).to(self.device) if mine else None)
        return found

    # ------------------------------------------------------------------ a task

    def begin(self, task: int) -> None:
        """Its labels."""
        known: dict[tuple[int, int, str], Tensor] = {}
        for i, config in enumerate(self.configs):
            key = (config.seed, config.delta, config.reading)
            if key not in known:
                known[key] = labels_of(task, self.labels, self.classes, config)
            self.names[i].copy_(known[key])
        self.right.zero_()
        self.loss.zero_()

    def draw(self, task: int, number: int) -> None:
        """The order of a pass, the same for all members of a seed."""
        for i, seed in enumerate(self.seeds):
            generator = torch.Generator().manual_seed((seed * 1009 + task) * 1009 + number)
            self.drawn[i].copy_(self.indices[i][torch.randperm(self.indices.shape[1], generator=generator)])
        self.position.zero_()
        self.now.fill_(number)

    def _step(self) -> None:
        chosen = self.drawn.index_select(1, self.position + self.lanes)  # [seeds, batch]
        x = self.images[chosen]
        y = self.names.gather(1, chosen.index_select(0, self.seed_of))
        losses, right = self.losses_of(x, y)
        params = [p for block in self.blocks for p in block.params]
        grads = torch.autograd.grad(losses.sum(), params)
        with torch.no_grad():
            self.update(grads)
            self.right.index_add_(1, self.now, right.detach()[:, None].double())
            self.loss += losses.detach().double()
            s = torch.cat([block.alignment.flatten() for block in self.blocks])
            at = self.now * self.steps + torch.div(self.position, self.batch, rounding_mode="floor")
            self.seen.index_copy_(1, at, s[:, None])
            self.position += self.batch
            self.taken += 1

    def _losses_of(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each member, and how many of the batch it had right."""
        found = [
            block.answers(x.index_select(0, seeds)).flatten(0, 1)
            for block, seeds in zip(self.blocks, self.seeds_of, strict=True)
        ]
        answers = torch.cat(found)
        losses = cross_entropy(answers.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
        return losses, (answers.argmax(2) == y).sum(1)

    def _update(self, grads: Sequence[Tensor]) -> None:
        rest = list(grads)
        for block, given in zip(self.blocks, self.given, strict=True):
            mine, rest = rest[: len(block.params)], rest[len(block.params) :]
            now = None if given is None else given.index_select(2, self.taken.reshape(1))[:, :, 0]
            block.update(mine, now)

    # ------------------------------------------------------------------ members

    def _tensors(self, i: int) -> list[Tensor]:
        """A member's own, i being its place in the list that was given: also its s."""
        for block in self.blocks:
            for row, members in enumerate(block.members):
                if i in members:
                    place = members.index(i)
                    return [*block.tensors(row, place), block.alignment[row, place]]
        raise IndexError(i)

    def state_of(self, i: int) -> dict[str, Any]:
        """A member's state."""
        return {"tensors": [x.detach().clone() for x in self._tensors(i)], "taken": self.taken.clone()}

    def set_state_of(self, i: int, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self._tensors(i), state["tensors"], strict=True):
                mine.copy_(theirs)
            self.taken.copy_(state["taken"])

    def rows(self, task: int) -> list[dict[str, Any]]:
        """The members' metrics of the task just learned, in the order they were given in."""
        shares = (self.right * 100 / (self.steps * self.batch)).cpu()
        losses, s = (self.loss / (self.steps * self.passes)).tolist(), self.seen.double().mean(1).tolist()
        found = []
        for i, config in enumerate(self.configs):
            row = {"epoch": task + 1, "online": float(shares[i].mean()), "first": float(shares[i, 0])}
            row["loss"] = losses[i]
            found.append(row if _rule(config) == PLAIN else {**row, "alignment": s[i]})
        return self._as_given(found)

    def alignments(self) -> list[Tensor | None]:
        """s of every step of the task, of TAM's members."""
        seen = self.seen.to("cpu", copy=True)  # the next task writes there
        return self._as_given(
            [None if _rule(config) == PLAIN else s for config, s in zip(self.configs, seen, strict=True)]
        )

    def _as_given(self, found: list[Any]) -> list[Any]:
        return [one for _, one in sorted(zip(self.order, found, strict=True), key=lambda pair: pair[0])]

    def parameters(self) -> int:
        """Of a member."""
        block = self.blocks[0]
        return sum(p.numel() for p in block.params) // block.lr.numel()


# ---------------------------------------------------------------------- trials


def run_together(
    configs: Sequence[dict[str, Any]],
    folders: Sequence[TrialFolder],
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Trains all of them, from their last checkpoints where there are some; those behind catch up first.

    Yields after every step, and Progress with the members' mean after a task.
    """
    found = [folder.load(device) for folder in folders]
    members = [
        Member(Config(**config), folder, checkpoint)
        for config, folder, checkpoint in zip(configs, folders, found, strict=True)
    ]
    last = members[0].config.epochs
    while any(member.start < last for member in members):
        start = min(member.start for member in members)
        until = min((member.start for member in members if member.start > start), default=last)
        behind = [member for member in members if member.start == start]
        yield from _run(behind, until, data_folder, device, save_every)


def slope_of(values: Sequence[float]) -> float:
    """Of the straight line through them, a task: what is lost where it is negative is plasticity."""
    middle = (len(values) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * value for i, value in enumerate(values)) / spread if spread else 0.0


class Member:
    """A trial of the population."""

    def __init__(self, config: Config, folder: TrialFolder, found: tuple[int, dict[str, Any]] | None) -> None:
        self.config, self.folder = config, folder
        self.start = 0 if found is None else found[0]
        self.state = None if found is None else found[1]
        self.given = given_alignment(config, folder)
        found_s = torch.zeros(0) if self.state is None else self.state["alignments"].cpu()
        self.alignments: list[Tensor] = [found_s] if len(found_s) else []

    def result(self, parameters: int) -> dict[str, Any]:
        rows = self.folder.rows
        online = [row["online"] for row in rows]
        return {
            "online": mean(online), "first": mean(row["first"] for row in rows), "slope": slope_of(online),
            "loss": rows[-1]["loss"], "diverged": not math.isfinite(rows[-1]["loss"]), "epochs": len(rows),
            "parameters": parameters, "settings": asdict(self.config),
        }  # fmt: skip


def _run(
    members: Sequence[Member], until: int, data_folder: Path, device: torch.device, save_every: float
) -> Iterator[Progress | None]:
    """Members that stand alike, up to a task."""
    config = members[0].config
    population = Population(
        [one.config for one in members], data_folder, device, [one.given for one in members]
    )
    for i, member in enumerate(members):
        check_length(member.given, population.steps * config.passes * config.epochs)
        member.folder.together = len(members)
        if member.state is not None:
            population.set_state_of(i, member.state)
    spent = 0.0 if members[0].state is None else float(members[0].state["seconds"])
    for member in members:
        member.state = None  # it is in the population now
    begin = saved = time.monotonic()
    for task in range(members[0].start, until):
        population.begin(task)
        for number in range(config.passes):
            population.draw(task, number)
            for _ in range(population.steps):
                population.step()
                yield None
        rows = population.rows(task)
        for member, row, s in zip(members, rows, population.alignments(), strict=True):
            member.folder.log(row)
            member.alignments += [] if s is None else [s]
        shown = {"epoch": task + 1, "online": mean(row["online"] for row in rows)}
        yield Progress(task + 1, config.epochs, shown)
        now = time.monotonic()
        if now - saved > save_every and task + 1 < config.epochs:
            for i, member in enumerate(members):
                kept = torch.cat(member.alignments) if member.alignments else torch.zeros(0)
                more = {"alignments": kept, "seconds": spent + now - begin}
                member.folder.save(task + 1, {**population.state_of(i), **more})
            saved = now
    if until < config.epochs:
        for i, member in enumerate(members):
            member.start = until
            member.state = {**population.state_of(i), "seconds": spent + time.monotonic() - begin}
        return
    for member in members:
        member.start = until
        if member.alignments:
            keep_alignment(member.folder, torch.cat(member.alignments))
        member.folder.finish(member.result(population.parameters()), spent + time.monotonic() - begin, device)
