"""Pretraining a byte-level GPT: runs of one size train as one population, whose steps are one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError, missing_package
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder
from tam.lab.data import text
from tam.lab.models.gpt import BYTES, GPT, SIZES, layer_type
from tam.lab.optimizers import SCHEDULE_FREE, rule_of
from tam.lab.optimizers.rule import Rule, RuleStack
from tam.lab.optimizers.schedule_free import ScheduleFreeStack
from tam.lab.training import population
from tam.lab.training.cuda_graph import CapturedStep
from tam.lab.training.damping_control import check_source_length, read_source_alignment
from tam.lab.training.loop import Progress

NOISE_BYTES = 1 << 20
FINAL_LR = 0.1  # of the peak
CHANCE = math.log(BYTES)
EVALUATED = 2048  # sequences of a text, at most
EVALUATION_BATCH = 64
# What takes about 60 GB of a GPU. 0.9M is for CPU cores: small populations end one by one, and share them.
TOKENS_AT_ONCE = {"tiny": 1 << 22, "0.9M": 7 << 10, "4.9M": 9 << 16, "25M": 7 << 15}
# Steps times runs: fewer take less time than compiling them.
COMPILED_FROM = {"tiny": 50_000, "0.9M": 50_000, "4.9M": 50_000, "25M": 10_000}
STEPS_FILE = "steps.pt"  # loss and |g| of every step
SAVE_EVERY = 600.0  # seconds, at least: a checkpoint of a population has gigabytes


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """A run. `epochs` are the intervals after which metrics are stored; they divide `steps`.

    Attributes:
        size: A key of `SIZES`.
        batch: Sequences per step.
        context: Bytes per sequence.
        warmup: Steps of linear warm-up, before the cosine decay to a tenth of the peak.
        clip: The largest norm of the gradient; 0 does not clip.
        lowered: c of the closed form, which replaces the schedule r by r / (1 + c r).
        outliers: The share of batches that are random bytes.
        data: The text.
        second: A text that replaces it in the last `second_steps`, and that validates; "": none.
        second_steps: Steps on the second text.
        second_lr: The share of lr with which the schedule starts again there; 0: it continues.
    """

    unit: ClassVar[str] = "interval"
    size: str
    steps: int = 600
    batch: int = 16
    context: int = 256
    warmup: int = 50
    clip: float = 1.0
    lowered: float = 0.0
    outliers: float = 0.0
    data: str = "wikitext-2"
    second: str = ""
    second_steps: int = 0
    second_lr: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size not in SIZES:
            raise ValueError(f"size={self.size!r}: must be one of {', '.join(SIZES)}")
        if min(self.steps, self.batch, self.context, self.epochs) < 1 or self.steps % self.epochs:
            raise ValueError("steps, batch, context and epochs must be at least 1, and epochs divide steps")
        if not 0 <= self.warmup < self.steps or self.clip < 0 or not 0 <= self.outliers <= 1:
            raise ValueError("0 <= warmup < steps, clip >= 0 and 0 <= outliers <= 1 must hold")
        if bool(self.second) != (0 < self.second_steps < self.steps) or self.second_lr < 0:
            raise ValueError("second needs 0 < second_steps < steps, and second_lr >= 0")
        rule_of(self.optimizer, self.options)

    def schedule(self) -> Tensor:
        """Return the learning rate of every step."""
        last = self.second_steps if self.second_lr else 0
        r = _warmup_and_cosine(self.steps - last, self.warmup)
        if last:
            r = torch.cat([r, self.second_lr * _warmup_and_cosine(last, min(self.warmup, last // 10))])
        return self.lr * r / (1 + self.lowered * r)


def _warmup_and_cosine(steps: int, warmup: int) -> Tensor:
    """Return the learning rate of every step as a share of the peak."""
    step = torch.arange(steps, dtype=torch.float64)
    r = FINAL_LR + (1 - FINAL_LR) * (1 + torch.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    return torch.where(step < warmup, (step + 1) / max(1, warmup), r)


def kind_of(config: Config) -> str:
    """Return the kind of a trial. Trials of one kind can be one population."""
    names = ["size", "steps", "batch", "context", "epochs", "outliers", "data"]
    names += ["second", "second_steps"] if config.second else []
    names += ["optimizer", "warmup"] if is_schedule_free(config) else []
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def is_schedule_free(config: Config) -> bool:
    return config.optimizer == SCHEDULE_FREE


def missing(config: Config) -> str:
    """Return why this machine cannot run a trial: a package is not there. "" if it can."""
    if is_schedule_free(config) and find_spec("schedulefree") is None:
        return str(missing_package("schedule-free AdamW", "schedulefree"))
    return ""


def most_together(config: Config) -> int:
    """Return how many runs fit into one population."""
    return max(1, TOKENS_AT_ONCE[config.size] // (config.batch * config.context))


def read_bytes(name: str, folder: Path, context: int) -> dict[str, Tensor]:
    """Return the training and the validation text as bytes.

    Raises:
        LabError: If a text is shorter than two sequences.
    """
    parts = {}
    for part, lines in text.read(name, folder).items():
        content = torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)
        if len(content) < 2 * context + 2:
            size = f"{len(content)} bytes"
            raise LabError(f"the text {name} ({part}) has {size}: too short for a context of {context}")
        parts[part] = content
    return parts


@cache
def _shared_text(name: str, folder: Path, context: int) -> tuple[dict[str, Tensor], float]:
    """Return the text and its entropy by pairs of bytes, read once for all populations."""
    parts = read_bytes(name, folder, context)
    return parts, pair_entropy(parts["train"], parts["valid"])


def pair_entropy(train: Tensor, valid: Tensor) -> float:
    """Return the validation loss of a table of byte pairs: a network that does no better has failed."""

    def pairs(content: Tensor) -> Tensor:
        return content[:-1].long() * BYTES + content[1:].long()

    counts = torch.bincount(pairs(train), minlength=BYTES**2).view(BYTES, BYTES).double() + 1
    log_probabilities = (counts / counts.sum(1, keepdim=True)).log().flatten()
    return float(-log_probabilities[pairs(valid)].mean())


def check(config: Config, data_folder: Path) -> None:
    """Raise if a text is missing, empty or too short."""
    for name in (config.data, config.second) if config.second else (config.data,):
        read_bytes(name, data_folder, config.context)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True)


class Population:
    """Stacked networks, the state of their optimizers, and one step of all of them."""

    def __init__(
        self, configs: Sequence[Config], folders: Sequence[TrialFolder], data_folder: Path,
        device: torch.device,
    ) -> None:  # fmt: skip
        first = configs[0]
        self.configs, self.device, self.steps = configs, device, first.steps
        self.network = GPT(*SIZES[first.size], first.context)
        self.types = [layer_type(name) for name in self.network.shapes()]
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._load_texts(data_folder)
        self._draw_batches()
        self._make_stack(folders)
        n, d = len(configs), device
        self.lrs = torch.stack([config.schedule() for config in configs]).float().to(d)
        self.steps_taken = torch.zeros((), dtype=torch.int64, device=d)
        self.losses, self.grad_norms = (torch.zeros(n, self.steps, device=d) for _ in range(2))
        self.alignments = torch.zeros(n, self.steps, len(self.types), dtype=torch.float16, device=d)
        self._final_losses: dict[str, list[float]] = {}  # of all runs, by text
        self._losses: Callable[..., Tensor] = GPT.losses
        self._move: Callable[..., None] = type(self.stack).step
        self.step: Callable[[], None] = self._step
        if self.has_alignment:  # a step that a graph can capture
            self.step = CapturedStep(self._step, device)
            if device.type == "cuda" and self.steps * n >= COMPILED_FROM[first.size]:
                # The functions, not the methods of this population: all of one shape share them.
                self._losses, self._move = _compiled(GPT.losses), _compiled(RuleStack.step)

    @property
    def has_alignment(self) -> bool:
        """Whether the runs compute s: not those of the package `schedulefree`."""
        return isinstance(self.stack, RuleStack)

    def _load_texts(self, data_folder: Path) -> None:
        """Load what the runs train on, one text after the other, and what evaluates them."""
        first = self.configs[0]
        names = [first.data, first.second] if first.second else [first.data]
        texts = [_shared_text(name, data_folder, first.context) for name in names]
        last, self.pair_entropy = texts[-1]
        self.lengths = [len(parts["train"]) for parts, _ in texts]
        self.train = torch.cat([parts["train"] for parts, _ in texts]).to(self.device)
        self.valid, self.test = last["valid"].to(self.device), last["test"].to(self.device)

    def _draw_batches(self) -> None:
        """Draw where the sequences of every step begin, the same for all runs of a seed."""
        first, starts, outliers = self.configs[0], {}, {}
        for seed in {config.seed for config in self.configs}:
            generator = torch.Generator().manual_seed(seed * 1009 + 7)
            shape = first.steps, first.batch
            starts[seed] = torch.randint(self.lengths[0] - first.context - 1, shape, generator=generator)
            outliers[seed] = torch.rand(first.steps, generator=generator) < first.outliers
            if first.second:
                room, shape = self.lengths[1] - first.context - 1, (first.second_steps, first.batch)
                own = self.lengths[0] + torch.randint(room, shape, generator=generator)
                starts[seed][-first.second_steps :] = own
        self.starts = torch.stack([starts[config.seed] for config in self.configs]).to(self.device)
        self.is_outlier = torch.stack([outliers[config.seed] for config in self.configs]).to(self.device)
        self.offsets = torch.arange(first.context + 1, device=self.device)
        # Outlier batches begin at the same places of a text of random bytes.
        generator = torch.Generator().manual_seed(0)
        self.noise = torch.randint(BYTES, (NOISE_BYTES,), generator=generator).to(self.device)

    def _make_stack(self, folders: Sequence[TrialFolder]) -> None:
        """Create parameters and the state of the rules, and read what controls take over."""
        sources = [
            read_source_alignment(config, folder, len(self.types))
            for config, folder in zip(self.configs, folders, strict=True)
        ]
        rules = []
        for config, source in zip(self.configs, sources, strict=True):
            check_source_length(source, config.steps, config.damping_of)
            rule = replace(rule_of(config.optimizer, config.options), max_grad_norm=config.clip or None)
            # A smoothing of 1 leaves s as the control sets it.
            rules.append(rule if source is None else replace(rule, smoothing=1.0))
        seeds = {config.seed for config in self.configs}
        networks = {seed: [p.to(self.device) for p in self.network.init(seed)] for seed in seeds}
        each = zip(*(networks[config.seed] for config in self.configs), strict=True)
        params = [torch.stack(tensors).requires_grad_() for tensors in each]
        decays = [p.ndim > 2 for p in params]  # matrices
        self.stack: RuleStack | ScheduleFreeStack = RuleStack(params, rules, decays)
        if is_schedule_free(self.configs[0]):
            first, lrs = self.configs[0], [config.lr for config in self.configs]
            second_lrs = [config.lr * (config.second_lr or 1.0) for config in self.configs]
            later = first.steps - first.second_steps, second_lrs
            self.stack = ScheduleFreeStack(params, rules, decays, lrs, first.warmup, later)
        self._set_sources(sources)

    def _set_sources(self, sources: Sequence[Tensor | None]) -> None:
        """Hold the s of controls. Constant damping has the source's mean momentum, too."""
        own = {}
        for i, (config, s) in enumerate(zip(self.configs, sources, strict=True)):
            if s is None:
                continue
            own[i], rule = s, self.stack.rules[i]
            if config.damping == "mean":
                own[i] = rule.alignment_at_mean_damping(s).expand_as(s)
                if isinstance(self.stack, RuleStack) and rule.soft_restart:
                    factors = (2 * rule.damping(s)).clamp(max=1)
                    self.stack.momentum_factor[i] = factors.mean(0).to(self.device)
            elif config.damping != "another":
                raise LabError(f"pretrain has no control with damping {config.damping!r}")
        self.controls = torch.tensor(list(own), device=self.device)
        self.source = torch.stack(list(own.values())).to(self.device) if own else None

    def _step(self) -> None:
        now = self.steps_taken.reshape(1)
        starts = self.starts.index_select(1, now)[:, 0]
        content = self.train[starts[:, :, None] + self.offsets].long()
        if self.configs[0].outliers:
            noise = self.noise[(starts[:, :, None] + self.offsets) % len(self.noise)]
            content = torch.where(self.is_outlier.index_select(1, now)[:, :, None], noise, content)
        x, y = content[..., :-1], content[..., 1:]
        losses = self._losses(self.network, self.stack.params, x, y, self.dtype)
        grads = torch.autograd.grad(losses.sum(), self.stack.params)
        if self.source is not None:
            row = self.source.index_select(1, now)[:, 0]
            self.stack.s.index_copy_(0, self.controls, row.to(self.stack.s.dtype))
        self._move(self.stack, grads, self.lrs.index_select(1, now)[:, 0])
        with torch.no_grad():
            self.losses.index_copy_(1, now, losses.detach()[:, None])
            self.grad_norms.index_copy_(1, now, self.stack.grad_norm[:, None])
            self.alignments.index_copy_(1, now, self.stack.s.to(self.alignments.dtype)[:, None])
            self.steps_taken += 1

    def epoch(self, epoch: int) -> Generator[None, None, list[dict[str, Any]]]:
        """Train one interval."""
        count = self.steps // self.configs[0].epochs
        for _ in range(count):
            self.step()
            yield None
        window = slice(epoch * count, (epoch + 1) * count)
        losses, norms, lrs = (x[:, window].mean(1).tolist() for x in (self.losses, self.grad_norms, self.lrs))
        s = self.alignments[:, window].float().mean(1).cpu()  # [runs, tensors]
        rows = []
        for i, rule in enumerate(self.stack.rules):
            row = {"epoch": epoch + 1, "loss": losses[i], "grad_norm": norms[i], "lr": lrs[i]}
            rows.append(row | self._damping_metrics(s[i], rule))
        return rows

    def _damping_metrics(self, s: Tensor, rule: Rule) -> dict[str, float]:
        """Return the mean s and, of torque rules, the mean d in all and of each type of layer."""
        row = {"alignment": float(s.mean())} if self.has_alignment else {}
        if not rule.torque:
            return row
        d = rule.damping(s)
        row["damping"] = float(d.mean())
        for kind in dict.fromkeys(self.types):
            own = [k for k, other in enumerate(self.types) if other == kind]
            row[f"damping_{kind}"] = float(d[own].mean())
        return row

    @torch.no_grad()
    def evaluate(self, content: Tensor) -> list[float]:
        """Return the loss of each run on the first sequences of a text."""
        context, runs = self.configs[0].context, len(self.configs)
        count = min(EVALUATED, (len(content) - 1) // context)
        x, y = (content[i : i + count * context].view(count, context).long() for i in (0, 1))
        totals = torch.zeros(runs, device=self.device)
        with self.stack.evaluating():
            for a, b in zip(*(torch.split(z, EVALUATION_BATCH) for z in (x, y)), strict=True):
                shape = runs, *a.shape
                losses = self.network.losses(self.stack.params, a.expand(shape), b.expand(shape), self.dtype)
                totals += losses * len(a)
        return (totals / count).tolist()

    def member_state(self, index: int) -> dict[str, Any]:
        tensors = [x.detach().clone() for x in self.stack.tensors(index)]
        records = [x[index].clone() for x in (self.losses, self.grad_norms, self.alignments)]
        counts = {"taken": self.steps_taken.clone(), "steps": self.stack.steps.clone()}
        return {"tensors": tensors, "records": records, **counts}

    @torch.no_grad()
    def load_member_state(self, index: int, state: dict[str, Any]) -> None:
        for own, stored in zip(self.stack.tensors(index), state["tensors"], strict=True):
            own.copy_(stored)
        own_records = (self.losses, self.grad_norms, self.alignments)
        for own, stored in zip(own_records, state["records"], strict=True):
            own[index].copy_(stored)
        self.steps_taken.copy_(state["taken"])
        self.stack.steps.copy_(state["steps"])

    def finish(self, index: int, folder: TrialFolder) -> dict[str, Any]:
        """Write loss, |g| and s (per tensor) of every step. Return the result."""
        if not self._final_losses:
            self._final_losses["validation"] = self.evaluate(self.valid)
            if any(config.test for config in self.configs):
                self._final_losses["test"] = self.evaluate(self.test)
        validation, s = self._final_losses["validation"][index], self.alignments[index]
        records = {"loss": self.losses, "grad_norm": self.grad_norms}
        own = {
            name: values[index].to("cpu", copy=True) for name, values in records.items()
        }  # no views of all
        folder.write(STEPS_FILE, own)
        loss = float(own["loss"][-1])
        is_finite = math.isfinite(validation) and math.isfinite(loss)
        settled = {}
        if self.has_alignment:
            quarter = self.steps // 4
            settled = {"settled_alignment": float(s[quarter : self.steps - quarter].float().mean())}
            if is_finite:
                folder.write(ALIGNMENT_FILE, s.to("cpu", copy=True))
        params = sum(math.prod(shape) for shape in self.network.shapes().values())
        test = {"test": self._final_losses["test"][index]} if self.configs[index].test else {}
        return {
            "validation": validation if is_finite else math.nan, **test, "loss": loss,
            "diverged": not is_finite, "failed": not is_finite or validation > self.pair_entropy,
            "pair_entropy": self.pair_entropy, **settled, "epochs": self.configs[0].epochs,
            "parameters": params, "settings": asdict(self.configs[index]),
        }  # fmt: skip


def run_together(
    configs: Sequence[Config], folders: Sequence[TrialFolder], data_folder: Path, device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:  # fmt: skip
    """Train all runs as one population, from their last checkpoints."""
    seconds = max(save_every, SAVE_EVERY)
    return population.run_together(Population, configs, folders, data_folder, device, seconds)
