"""Small networks trained as one program: parameters are stacked, and all members take a step at once.

A step is a few batched matrix products and one update, on a GPU a CUDA graph. A member computes what it would
compute alone.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from tam import functional
from tam.lab.core.alignment import keep_levels, levels_of
from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.store import TrialFolder
from tam.lab.data import load, split
from tam.lab.training.augmentation import normalize, per_channel
from tam.lab.training.cuda_graph import CapturedStep

OPTIMIZERS = ("sgd", "sgdm", "tam")


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    unit: ClassVar[str] = "task"
    depth: int  # hidden layers
    delta: int  # percent of the labels that change from task to task
    passes: int = 40  # through the data per task
    batch: int = 128
    width: int = 128
    reading: str = "classes"  # their labels are permuted among themselves; or "samples": they get new labels
    data: str = "cifar10"
    held_out: int = 10000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: must be one of {', '.join(OPTIMIZERS)}")
        if self.reading not in ("classes", "samples"):
            raise ValueError(f"reading={self.reading!r}: must be 'classes' or 'samples'")
        smallest = min(self.depth, self.epochs, self.passes, self.batch, self.width)
        if smallest < 1 or not 0 <= self.delta <= 100:
            raise ValueError("depth, epochs, passes, batch and width must be at least 1, delta in 0 to 100")
        if self.options:
            raise ValueError(f"options={self.options}: a population's members have the paper's")

    @property
    def momentum(self) -> float:
        return 0.0 if self.optimizer == "sgd" else 0.9


def make_network(features: int, classes: int, config: Config) -> nn.Sequential:
    """Return a member as a module, with its initial weights."""
    torch.manual_seed(config.seed)
    sizes = [features, *[config.width] * config.depth]
    layers: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def task_labels(task: int, labels: Tensor, classes: int, config: Config) -> Tensor:
    """Return the labels of a task. Task 0 has the true ones. Every task changes those of the one before."""
    generator = torch.Generator().manual_seed(config.seed * 1009 + config.delta)
    for _ in range(task):
        if config.reading == "classes":
            some = torch.randperm(classes, generator=generator)[: round(classes * config.delta / 100)]
            names = torch.arange(classes)
            names[some] = some.roll(1)  # in a ring of random order: no class keeps its own
            labels = names[labels]
        else:
            some = torch.randperm(len(labels), generator=generator)[: len(labels) * config.delta // 100]
            labels = labels.clone()
            labels[some] = torch.randint(0, classes, (len(some),), generator=generator)
    return labels


# ---------------------------------------------------------------------- one step of all


class Block:
    """Members of several seeds, the same number of each. Members of a seed share their batches.

    All follow TAM's rule. With a smoothing of 1 it keeps s, which is a control's or 0. With a floor of 1/2
    besides, it is exactly SGD with momentum. The first layer's weights are [seeds, inputs, members, width],
    so a seed's batch meets all of its members in one matrix product, without a copy for each. All others are
    [seeds, members, in, out].

    `members` has the indices of each seed's members in `configs`, `sources` the s that controls take over.
    """

    def __init__(
        self, members: Sequence[Sequence[int]], configs: Sequence[Config], sources: Sequence[Tensor | None],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.members, self.device = members, device
        self.seeds = [configs[row[0]].seed for row in members]
        order = [i for row in members for i in row]
        own = [configs[i] for i in order]
        self.lr = self._each([one.lr for one in own], torch.float32)
        self.momentum = self._each([one.momentum for one in own], torch.float32)
        # In float64 these are the numbers they would be outside of a tensor.
        self.smoothing = self._each([0.9 if has_own_alignment(one) else 1.0 for one in own], torch.float64)
        self.floor = self._each([1e-8 if one.optimizer == "tam" else 0.5 for one in own], torch.float64)
        self.alignment = self._each([0.0] * len(own), torch.float32)
        self.params: list[Tensor] = []
        self.momenta: list[Tensor] = []
        replaced = {place: s for place, i in enumerate(order) if (s := sources[i]) is not None}
        self.controls = torch.tensor(list(replaced), device=device)
        self.source = torch.stack(list(replaced.values())).to(device) if replaced else None

    def _each(self, values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device).view(len(self.members), -1)

    def initialize(self, networks: dict[int, list[Tensor]]) -> None:
        """Copy each seed's network to its members, and set momenta to 0."""
        count = self.lr.shape[1]
        for layer, each in enumerate(zip(*(networks[seed] for seed in self.seeds), strict=True)):
            shared = torch.stack(each).unsqueeze(2 if layer == 0 else 1)
            sizes = (-1, -1, count, -1) if layer == 0 else (-1, count, -1, -1)
            self.params.append(shared.expand(sizes).contiguous().to(self.device).requires_grad_())
        self.momenta = [torch.zeros_like(p) for p in self.params]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [seeds, members, batch, classes] for the seeds' batches."""
        multiply = multiply_jointly if x.device.type == "cuda" else multiply_separately
        h = multiply(x, self.params[0]) + self.params[1]
        for weight, bias in zip(self.params[2::2], self.params[3::2], strict=True):
            h = torch.matmul(h.relu(), weight) + bias
        return h

    def update(self, grads: Sequence[Tensor], steps_taken: Tensor) -> None:
        """Take one step of all members."""
        if self.source is not None:
            now = self.source.index_select(1, steps_taken.reshape(1))[:, 0]
            self.alignment.view(-1).index_copy_(0, self.controls, now)
        dims: Any = [1, *[0] * (len(grads) - 1)]  # of the members, inside of a seed
        state_dims: Any = functional.TAMState(dims, 0)  # type: ignore[arg-type]
        one_seed = vmap(_step, in_dims=(dims, dims, state_dims, 0, 0, 0, 0), out_dims=(dims, state_dims))
        state = functional.TAMState(self.momenta, self.alignment)
        options = (self.lr, self.momentum, self.smoothing, self.floor)
        params, (momenta, s) = vmap(one_seed)(self.params, list(grads), state, *options)
        own = (*self.params, *self.momenta, self.alignment)
        for before, after in zip(own, (*params, *momenta, s), strict=True):
            before.copy_(after)

    def tensors(self, row: int, place: int) -> list[Tensor]:
        """Return a member's parameters, momenta and s."""
        columns = (self.params, self.momenta)
        own = [x[row, :, place] if i == 0 else x[row, place] for c in columns for i, x in enumerate(c)]
        return [*own, self.alignment[row, place]]


def has_own_alignment(config: Config) -> bool:
    """Return whether a member follows its own torque."""
    return config.optimizer == "tam" and config.damping is None


def multiply_jointly(x: Tensor, weight: Tensor) -> Tensor:
    """Return [seeds, batch, in] times [seeds, in, members, out], in one product for all members of a seed."""
    seeds, _, members, out = weight.shape
    return torch.bmm(x, weight.flatten(2)).view(seeds, -1, members, out).transpose(1, 2)


def multiply_separately(x: Tensor, weight: Tensor) -> Tensor:
    """Return the same with bits that do not depend on which other members there are."""
    return torch.matmul(x[:, None], weight.transpose(1, 2))


def _step(
    p: Any, g: Any, state: functional.TAMState, lr: Tensor, momentum: Tensor, smoothing: Tensor, floor: Tensor
) -> Any:
    """Return a member's new parameters and state."""
    return functional.tam(p, g, state, lr=lr, momentum=momentum, smoothing=smoothing, floor=floor)


def _group_members(configs: Sequence[Config]) -> list[list[list[int]]]:
    """Return the members of each block, by seed. There is one block if every seed has as many members."""
    by_seed: dict[int, list[int]] = {}
    for i, config in enumerate(configs):
        by_seed.setdefault(config.seed, []).append(i)
    by_size: dict[int, list[list[int]]] = {}
    for _, members in sorted(by_seed.items()):
        by_size.setdefault(len(members), []).append(members)
    return list(by_size.values())


class Population:
    """Stacked networks, their momenta, and one step of all of them.

    Members are numbered in the order of their blocks. `numbers` lists them in the caller's order.
    """

    def __init__(
        self, configs: Sequence[Config], data_folder: Path, device: torch.device,
        sources: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        first = configs[0]
        self.device, self.batch, self.passes = device, first.batch, first.passes
        self.blocks = [Block(members, configs, sources, device) for members in _group_members(configs)]
        self.places = {
            i: (block, row, place)
            for block in self.blocks
            for row, members in enumerate(block.members)
            for place, i in enumerate(members)
        }
        self.configs = [configs[i] for i in self.places]
        self.numbers = [number for _, number in sorted(zip(self.places, range(len(configs)), strict=True))]
        self.levels: list[list[Tensor]] = [[] for _ in configs]  # s of every step, task by task
        self._load_images(first, data_folder)
        self.steps = self.indices.shape[1] // first.batch  # per pass
        if self.steps == 0:
            raise LabError(f"{self.indices.shape[1]} images make no batch of {first.batch}")
        self._allocate()
        self.forward, self.update = self._forward, self._update
        if device.type == "cuda":
            self.forward = torch.compile(self._forward, dynamic=False, fullgraph=True)
            self.update = torch.compile(self._update, dynamic=False, fullgraph=True)
        self.step = CapturedStep(self._step, device)

    def _load_images(self, config: Config, data_folder: Path) -> None:
        """Load the images of all seeds, and draw which of them each seed learns from."""
        data = load(config.data, data_folder)
        images, self.labels = data.train
        mean, std = (per_channel(values, torch.device("cpu")) for values in (data.mean, data.std))
        self.images = normalize(images, mean, std).flatten(1).to(self.device)
        self.classes = data.classes
        self.seeds = sorted({config.seed for config in self.configs})
        splits = [split(len(self.labels), config.held_out, seed) for seed in self.seeds]
        self.indices = torch.stack([train for train, _ in splits])

    def _allocate(self) -> None:
        """Create the parameters, and the tensors that a step reads and writes."""
        networks: dict[int, list[Tensor]] = {}
        for config in {config.seed: config for config in self.configs}.values():
            layers = make_network(self.images.shape[1], self.classes, config).parameters()
            networks[config.seed] = [p.detach().t() if p.ndim == 2 else p.detach()[None] for p in layers]
        for block in self.blocks:
            block.initialize(networks)
        n, d = len(self.configs), self.device
        index = self.seeds.index
        self.seed_of_member = torch.tensor([index(config.seed) for config in self.configs], device=d)
        self.seeds_of_block = [torch.tensor([*map(index, block.seeds)], device=d) for block in self.blocks]
        self.task_labels = torch.zeros(n, len(self.labels), dtype=torch.int64, device=d)
        self.order_of_pass = torch.zeros(len(self.seeds), self.indices.shape[1], dtype=torch.int64, device=d)
        self.steps_taken = torch.zeros((), dtype=torch.int64, device=d)  # since the first task
        self.offsets = torch.arange(self.batch, device=d)
        # Of every step of the task: loss, number of correct predictions, s.
        self.values = [torch.zeros(n, self.steps * self.passes, device=d) for _ in range(3)]

    # ------------------------------------------------------------------ a task

    def epoch(self, epoch: int) -> Generator[None, None, list[dict[str, Any]]]:
        """Learn a task. Return the members' metrics, in the caller's order."""
        self.begin_task(epoch)
        for number in range(self.passes):
            self.begin_pass(epoch, number)
            for _ in range(self.steps):
                self.step()
                yield None
        levels = levels_of(self.values[2]).cpu()
        for own, i in zip(self.levels, self.numbers, strict=True):
            own += [levels[i]] if has_own_alignment(self.configs[i]) else []
        return self.task_metrics(epoch)

    def begin_task(self, task: int) -> None:
        """Set the labels of a task."""
        labels: dict[tuple[int, int, str], Tensor] = {}
        for i, config in enumerate(self.configs):
            key = (config.seed, config.delta, config.reading)
            if key not in labels:
                labels[key] = task_labels(task, self.labels, self.classes, config)
            self.task_labels[i].copy_(labels[key])

    def begin_pass(self, task: int, number: int) -> None:
        """Draw the order of a pass, the same for all members of a seed."""
        orders = []
        for indices, seed in zip(self.indices, self.seeds, strict=True):
            generator = torch.Generator().manual_seed((seed * 1009 + task) * 1009 + number)
            orders.append(indices[torch.randperm(len(indices), generator=generator)])
        # One copy, after all are drawn: it waits for the steps before, which continue meanwhile.
        self.order_of_pass.copy_(torch.stack(orders))

    def _step(self) -> None:
        losses, correct = self.forward()
        params = [p for block in self.blocks for p in block.params]
        grads = torch.autograd.grad(losses.sum(), params)
        with torch.no_grad():
            self.update(grads, losses.detach(), correct)

    def _forward(self) -> tuple[Tensor, Tensor]:
        """Return each member's loss, and how many images of the batch it predicts correctly."""
        rows = self.steps_taken % self.steps * self.batch + self.offsets
        batch = self.order_of_pass.index_select(1, rows)  # [seeds, batch]
        x = self.images[batch]
        y = self.task_labels.gather(1, batch.index_select(0, self.seed_of_member))
        logits = torch.cat([
            block.logits(x.index_select(0, seeds)).flatten(0, 1)
            for block, seeds in zip(self.blocks, self.seeds_of_block, strict=True)
        ])  # fmt: skip
        losses = cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
        return losses, (logits.argmax(2) == y).sum(1)

    def _update(self, grads: Sequence[Tensor], losses: Tensor, correct: Tensor) -> None:
        rest = list(grads)
        for block in self.blocks:
            own, rest = rest[: len(block.params)], rest[len(block.params) :]
            block.update(own, self.steps_taken)
        s = torch.cat([block.alignment.flatten() for block in self.blocks])
        now = (self.steps_taken % self.values[0].shape[1]).reshape(1)
        for column, value in zip(self.values, (losses, correct, s), strict=True):
            column.index_copy_(1, now, value.to(column.dtype)[:, None])
        self.steps_taken += 1

    # ------------------------------------------------------------------ members

    def _tensors(self, index: int) -> list[Tensor]:
        """Return the tensors of the member with this index in the caller's configs."""
        block, row, place = self.places[index]
        return block.tensors(row, place)

    def member_state(self, index: int) -> dict[str, Any]:
        tensors = [x.detach().clone() for x in self._tensors(index)]
        levels = torch.cat([torch.zeros(0, dtype=torch.int8), *self.levels[index]])
        return {"tensors": tensors, "taken": self.steps_taken.clone(), "levels": levels}

    @torch.no_grad()
    def load_member_state(self, index: int, state: dict[str, Any]) -> None:
        for own, stored in zip(self._tensors(index), state["tensors"], strict=True):
            own.copy_(stored)
        self.steps_taken.copy_(state["taken"])
        self.levels[index] = [state["levels"].cpu()] if len(state["levels"]) else []

    def task_metrics(self, task: int) -> list[dict[str, Any]]:
        """Return the members' metrics of the task just learned, in the caller's order."""
        losses, correct, s = (column.double().cpu() for column in self.values)
        percent = 100 / (self.steps * self.batch) * correct.view(-1, self.passes, self.steps).sum(2)
        rows = []
        for i in self.numbers:
            row = {"epoch": task + 1, "online": float(percent[i].mean()), "first": float(percent[i, 0])}
            row["loss"] = float(losses[i].mean())
            has_alignment = self.configs[i].optimizer == "tam"
            rows.append({**row, "alignment": float(s[i].mean())} if has_alignment else row)
        return rows

    def finish(self, index: int, folder: TrialFolder) -> dict[str, Any]:
        """Write s of every step in 8 bits, if the member follows its own torque. Return the result."""
        if self.levels[index]:
            keep_levels(folder, torch.cat(self.levels[index]))
        rows, block = folder.rows, self.blocks[0]
        online = [row["online"] for row in rows]
        return {
            "online": mean(online), "first": mean(row["first"] for row in rows),
            "slope": slope_per_task(online), "loss": rows[-1]["loss"],
            "diverged": not math.isfinite(rows[-1]["loss"]), "epochs": len(rows),
            "parameters": sum(p.numel() for p in block.params) // block.lr.numel(),
            "settings": asdict(self.configs[self.numbers[index]]),
        }  # fmt: skip


def slope_per_task(values: Sequence[float]) -> float:
    return linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0
