"""How long a masked-LM training step takes with an optimizer, beside torch's fused AdamW on the same network.

A trial times both in interleaved rounds, since machines are slower at one time than at another; AdamW against
itself shows what of a ratio is noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam import registry
from tam.lab.making import make_optimizer
from tam.lab.models import parameters
from tam.lab.models.language import transformers
from tam.lab.store import TrialFolder
from tam.lab.trial import Progress, resolved, told

SHAPES: Mapping[str, Mapping[str, int]] = {  # of BERT
    "BERT-large": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    },
    "tiny-bert": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "vocab_size": 200,
    },
}  # fmt: skip
WARM_UP = 4  # steps of each that are not timed


@dataclass(frozen=True)
class Config:
    """All that determines a trial. What the lab calls an epoch is a round here."""

    model: str
    optimizer: str
    lr: float
    seed: int
    epochs: int  # rounds
    batch: int
    length: int  # of a row, in tokens
    steps: int = 5  # of a round
    options: dict[str, Any] = field(default_factory=dict)
    damping: str | None = None
    damping_of: str | None = None
    test: bool = False  # there is nothing to test on

    def __post_init__(self) -> None:
        registry.get(self.optimizer)
        if self.model not in SHAPES:
            raise ValueError(f"model={self.model!r}: must be one of {', '.join(SHAPES)}")
        if min(self.epochs, self.batch, self.length, self.steps) < 1 or self.damping is not None:
            raise ValueError("epochs, batch, length and steps must be at least 1, and d is TAM's own")


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**options))


def make_model(shape: str, device: torch.device) -> Any:
    """A BERT of this shape with random weights."""
    package = transformers()
    torch.manual_seed(0)
    with device:  # a CPU is slow to draw 335 million weights
        return package.BertForMaskedLM(package.BertConfig(**SHAPES[shape])).to(device).train()


def fused_adamw(model: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)


def rounds(
    model: Any, tokens: Tensor, optimizers: Mapping[str, Optimizer], count: int, steps: int
) -> Iterator[dict[str, float]]:
    """Seconds a step with each optimizer, round by round; weights move, which changes no time."""

    def step(optimizer: Optimizer) -> None:
        device = tokens.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for optimizer in optimizers.values():
        for _ in range(WARM_UP):
            step(optimizer)
    for _ in range(count):
        yield {
            name: _seconds(lambda one=optimizer: step(one), steps, tokens.device)  # type: ignore[misc]
            for name, optimizer in optimizers.items()
        }


def _seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - begin) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(
    config: dict[str, Any],
    folder: TrialFolder,
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Times all rounds; one that was killed begins again."""
    settings, begin = Config(**config), time.monotonic()
    folder.begin_with([])
    model = make_model(settings.model, device)
    vocabulary = int(model.config.vocab_size)
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = torch.randint(vocabulary, (settings.batch, settings.length), generator=generator).to(device)
    fused = {"fused": True} if settings.optimizer == "adamw" else {}  # AdaTAMW's own is it wherever it can
    own = make_optimizer(settings, model.parameters(), settings.lr, **fused)
    optimizers = {"beside": fused_adamw(model), "own": own}
    for number, seconds in enumerate(rounds(model, tokens, optimizers, settings.epochs, settings.steps), 1):
        row = {"epoch": number, **{name: 1e3 * value for name, value in seconds.items()}}
        row["ratio"] = row["own"] / row["beside"]
        folder.log(row)
        yield Progress(number, settings.epochs, row)
    columns = {key: [row[key] for row in folder.rows] for key in ("own", "beside", "ratio")}
    step_ms = median(columns["own"])
    result = {
        "ratio": median(columns["ratio"]), "step_ms": step_ms, "adamw_ms": median(columns["beside"]),
        "least_ratio": min(columns["own"]) / min(columns["beside"]),
        "tokens_per_second": settings.batch * settings.length / step_ms * 1e3,
        "epochs": settings.epochs, "diverged": False, "parameters": parameters(model),
        "settings": resolved(settings, own),
    }  # fmt: skip
    folder.finish(result, time.monotonic() - begin, device)
