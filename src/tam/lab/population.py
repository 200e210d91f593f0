"""Small networks trained as one program: parameters are stacked, a step is one of all of them.

A step is a few batched matrix products and one update, on a GPU a CUDA graph. A member computes what it would
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from tam import functional
from tam.lab.damping import check_damping, levels_of
from tam.lab.data import load, split
from tam.lab.graphed import Graphed
from tam.lab.images import normalise
from tam.lab.store import LabError

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


# ---------------------------------------------------------------------- one step of all


class Block:
    """Members of several seeds, as many of each: those of a seed share their batches.

    All follow one rule, TAM's: with a smoothing of 1 it keeps s, which is a control's or 0, and with a
    floor of 1/2 besides it is SGD with momentum, exactly.

    The first layer's weights are [seeds, inputs, members, width], so that a seed's batch meets all of its
    members in one matrix product, without a copy for each; all others are [seeds, members, in, out].
    """

    def __init__(
        self,
        members: Sequence[Sequence[int]],
        configs: Sequence[Config],
        given: Sequence[Tensor | None],
        device: torch.device,
    ) -> None:
        self.members, self.device = members, device  # by seed, numbers of those that were given
        self.seeds = [configs[row[0]].seed for row in members]
        mine = [configs[i] for row in members for i in row]
        self.lr = self._each([one.lr for one in mine], torch.float32)
        self.momentum = self._each([one.momentum for one in mine], torch.float32)
        # In float64 these are the numbers they would be outside of a tensor.
        self.smoothing = self._each([0.9 if free(one) else 1.0 for one in mine], torch.float64)
        self.floor = self._each([1e-8 if one.optimizer == "tam" else 0.5 for one in mine], torch.float64)
        self.alignment = self._each([0.0] * len(mine), torch.float32)
        self.params: list[Tensor] = []
        self.momenta: list[Tensor] = []
        sequences = {i: given[j] for i, j in enumerate(j for row in members for j in row)}
        found = {i: s for i, s in sequences.items() if s is not None}
        self.controls = torch.tensor(list(found), device=device)
        self.given = torch.stack(list(found.values())).to(device) if found else None  # s of every step

    def _each(self, values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device).view(len(self.members), -1)

    def make(self, networks: dict[int, list[Tensor]]) -> None:
        """Parameters from each seed's network, and momenta of 0."""
        count = self.lr.shape[1]
        for layer, each in enumerate(zip(*(networks[seed] for seed in self.seeds), strict=True)):
            shared = torch.stack(each).unsqueeze(2 if layer == 0 else 1)
            sizes = (-1, -1, count, -1) if layer == 0 else (-1, count, -1, -1)
            self.params.append(shared.expand(sizes).contiguous().to(self.device).requires_grad_())
        self.momenta = [torch.zeros_like(p) for p in self.params]

    def answers(self, x: Tensor) -> Tensor:
        """[seeds, members, batch, classes], given the seeds' batches."""
        h = (at_once if x.device.type == "cuda" else one_by_one)(x, self.params[0]) + self.params[1]
        for weight, bias in zip(self.params[2::2], self.params[3::2], strict=True):
            h = torch.matmul(h.relu(), weight) + bias
        return h

    def update(self, grads: Sequence[Tensor], taken: Tensor) -> None:
        """One step of all; `taken` were taken before."""
        if self.given is not None:
            now = self.given.index_select(1, taken.reshape(1))[:, 0]
            self.alignment.view(-1).index_copy_(0, self.controls, now)
        member: Any = [1, *[0] * (len(grads) - 1)]  # where members lie, once seeds are taken apart
        whose: Any = functional.TAMState(member, 0)  # type: ignore[arg-type]
        one_seed = vmap(_step, in_dims=(member, member, whose, 0, 0, 0, 0), out_dims=(member, whose))
        state = functional.TAMState(self.momenta, self.alignment)
        options = (self.lr, self.momentum, self.smoothing, self.floor)
        after, (moved, s) = vmap(one_seed)(self.params, list(grads), state, *options)
        for mine, new in zip((*self.params, *self.momenta, self.alignment), (*after, *moved, s), strict=True):
            mine.copy_(new)

    def tensors(self, row: int, place: int) -> list[Tensor]:
        """A member's own: parameters, momenta and s."""
        columns = (self.params, self.momenta)
        own = [x[row, :, place] if i == 0 else x[row, place] for c in columns for i, x in enumerate(c)]
        return [*own, self.alignment[row, place]]


def free(config: Config) -> bool:
    """Whether it follows its own torque."""
    return config.optimizer == "tam" and config.damping is None


def at_once(x: Tensor, weight: Tensor) -> Tensor:
    """[seeds, batch, in] times [seeds, in, members, out], one product for all members of a seed."""
    seeds, _, members, out = weight.shape
    return torch.bmm(x, weight.flatten(2)).view(seeds, -1, members, out).transpose(1, 2)


def one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    """The same, so that a member's bits do not depend on its company."""
    return torch.matmul(x[:, None], weight.transpose(1, 2))


def _step(
    p: Any, g: Any, state: functional.TAMState, lr: Tensor, momentum: Tensor, smoothing: Tensor, floor: Tensor
) -> Any:
    """A member's."""
    return functional.tam(p, g, state, lr=lr, momentum=momentum, smoothing=smoothing, floor=floor)


def _rows(configs: Sequence[Config]) -> list[list[list[int]]]:
    """The members of each block, by seed: one block where every seed has as many."""
    seeds: dict[int, list[int]] = {}
    for i, config in enumerate(configs):
        seeds.setdefault(config.seed, []).append(i)
    sizes: dict[int, list[list[int]]] = {}
    for _, members in sorted(seeds.items()):
        sizes.setdefault(len(members), []).append(members)
    return list(sizes.values())


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
        self.blocks = [Block(members, configs, given, device) for members in _rows(configs)]
        self.order = [i for block in self.blocks for row in block.members for i in row]
        self.configs = [configs[i] for i in self.order]
        self._load(first, data_folder)
        self.steps = self.indices.shape[1] // first.batch  # of a pass
        if self.steps == 0:
            raise LabError(f"{self.indices.shape[1]} images make no batch of {first.batch}")
        self._make()
        self.forward, self.update = self._forward, self._update
        if device.type == "cuda":
            self.forward = torch.compile(self._forward, dynamic=False, fullgraph=True)
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
        for block in self.blocks:
            block.make(networks)
        n, d = len(self.configs), self.device
        place = {seed: i for i, seed in enumerate(self.seeds)}
        self.seed_of = torch.tensor([place[config.seed] for config in self.configs], device=d)
        self.seeds_of = [
            torch.tensor([place[seed] for seed in block.seeds], device=d) for block in self.blocks
        ]
        self.names = torch.zeros(n, len(self.labels), dtype=torch.int64, device=d)  # labels of the task
        self.drawn = torch.zeros(len(self.seeds), self.indices.shape[1], dtype=torch.int64, device=d)
        self.taken = torch.zeros((), dtype=torch.int64, device=d)  # steps, since the first task
        self.lanes = torch.arange(self.batch, device=d)
        # Of every step of the task: loss, how many were right, s.
        self.seen = [torch.zeros(n, self.steps * self.passes, device=d) for _ in range(3)]

    # ------------------------------------------------------------------ a task

    def begin(self, task: int) -> None:
        """Its labels."""
        known: dict[tuple[int, int, str], Tensor] = {}
        for i, config in enumerate(self.configs):
            key = (config.seed, config.delta, config.reading)
            if key not in known:
                known[key] = labels_of(task, self.labels, self.classes, config)
            self.names[i].copy_(known[key])

    def draw(self, task: int, number: int) -> None:
        """The order of a pass, the same for all members of a seed."""
        drawn = []
        for indices, seed in zip(self.indices, self.seeds, strict=True):
            generator = torch.Generator().manual_seed((seed * 1009 + task) * 1009 + number)
            drawn.append(indices[torch.randperm(len(indices), generator=generator)])
        # One copy, after all are drawn: it waits for the steps before, which go on meanwhile.
        self.drawn.copy_(torch.stack(drawn))

    def _step(self) -> None:
        losses, right = self.forward()
        params = [p for block in self.blocks for p in block.params]
        grads = torch.autograd.grad(losses.sum(), params)
        with torch.no_grad():
            self.update(grads, losses.detach(), right)

    def _forward(self) -> tuple[Tensor, Tensor]:
        """The loss of each member, and how many of the batch it had right."""
        chosen = self.drawn.index_select(
            1, self.taken % self.steps * self.batch + self.lanes
        )  # [seeds, batch]
        x = self.images[chosen]
        y = self.names.gather(1, chosen.index_select(0, self.seed_of))
        found = [
            block.answers(x.index_select(0, seeds)).flatten(0, 1)
            for block, seeds in zip(self.blocks, self.seeds_of, strict=True)
        ]
        answers = torch.cat(found)
        losses = cross_entropy(answers.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
        return losses, (answers.argmax(2) == y).sum(1)

    def _update(self, grads: Sequence[Tensor], losses: Tensor, right: Tensor) -> None:
        rest = list(grads)
        for block in self.blocks:
            mine, rest = rest[: len(block.params)], rest[len(block.params) :]
            block.update(mine, self.taken)
        s = torch.cat([block.alignment.flatten() for block in self.blocks])
        now = (self.taken % self.seen[0].shape[1]).reshape(1)
        for seen, values in zip(self.seen, (losses, right, s), strict=True):
            seen.index_copy_(1, now, values.to(seen.dtype)[:, None])
        self.taken += 1

    # ------------------------------------------------------------------ members

    def _tensors(self, i: int) -> list[Tensor]:
        """A member's own, i being its place in the list that was given."""
        for block in self.blocks:
            for row, members in enumerate(block.members):
                if i in members:
                    return block.tensors(row, members.index(i))
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
        losses, right, s = (x.double().cpu() for x in self.seen)
        shares = 100 / (self.steps * self.batch) * right.view(-1, self.passes, self.steps).sum(2)
        found = []
        for i, config in enumerate(self.configs):
            row = {"epoch": task + 1, "online": float(shares[i].mean()), "first": float(shares[i, 0])}
            row["loss"] = float(losses[i].mean())
            found.append({**row, "alignment": float(s[i].mean())} if config.optimizer == "tam" else row)
        return self._as_given(found)

    def levels(self) -> list[Tensor | None]:
        """s of every step of the task in 8 bits, of the members that follow their own torque."""
        seen = levels_of(self.seen[2]).cpu()
        return self._as_given(
            [s if free(config) else None for config, s in zip(self.configs, seen, strict=True)]
        )

    def _as_given(self, found: list[Any]) -> list[Any]:
        return [one for _, one in sorted(zip(self.order, found, strict=True), key=lambda pair: pair[0])]

    def parameters(self) -> int:
        """Of a member."""
        block = self.blocks[0]
        return sum(p.numel() for p in block.params) // block.lr.numel()
