"""The time of a masked-LM training step with an optimizer, and with torch's fused AdamW on the same network.

A trial times both in interleaved rounds, since a machine is slower at one time than at another. AdamW
compared with itself shows how much of a ratio is noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.lab.core.config import TrialConfig, effective_settings
from tam.lab.core.store import TrialFolder
from tam.lab.core.toml import read_toml
from tam.lab.models import count_parameters
from tam.lab.models.language import transformers
from tam.lab.training.factory import make_optimizer
from tam.lab.training.loop import Progress
from tam.lab.training.metrics import autocast

SHAPES = read_toml(Path(__file__).with_name("notes.toml"))["shapes"]  # of BERT
WARM_UP_STEPS = 4  # with each optimizer, not timed


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    unit: ClassVar[str] = "round"
    model: str
    batch: int
    length: int  # of a row, in tokens
    steps: int = 5  # of a round

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in SHAPES:
            raise ValueError(f"model={self.model!r}: must be one of {', '.join(SHAPES)}")
        if min(self.epochs, self.batch, self.length, self.steps) < 1 or self.damping is not None:
            raise ValueError("epochs, batch, length and steps must be at least 1; there are no controls")


def make_model(shape: str, device: torch.device) -> Any:
    """Return a BERT of this shape with random weights."""
    package = transformers()
    torch.manual_seed(0)
    with device:  # a CPU takes long to draw 335 million weights
        return package.BertForMaskedLM(package.BertConfig(**SHAPES[shape])).to(device).train()


def time_rounds(
    model: Any, tokens: Tensor, optimizers: Mapping[str, Optimizer], count: int, steps: int
) -> Iterator[dict[str, float]]:
    """Yield the seconds per step with each optimizer, round by round."""
    wait: Callable[[], None] = torch.cuda.synchronize if tokens.is_cuda else lambda: None

    def seconds_per_step(optimizer: Optimizer, steps: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            with autocast(tokens.device):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        wait()
        return (time.perf_counter() - start) / steps

    for optimizer in optimizers.values():
        seconds_per_step(optimizer, WARM_UP_STEPS)
    for _ in range(count):
        yield {name: seconds_per_step(optimizer, steps) for name, optimizer in optimizers.items()}


def run(
    config: Config, folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float = 60.0
) -> Iterator[Progress | None]:
    """Time all rounds. A trial that was killed starts again."""
    start = time.monotonic()
    folder.begin_with([])
    model = make_model(config.model, device)
    generator = torch.Generator().manual_seed(config.seed)
    vocabulary = int(model.config.vocab_size)
    tokens = torch.randint(vocabulary, (config.batch, config.length), generator=generator).to(device)
    fused = {"fused": True} if config.optimizer == "adamw" else {}  # AdaTAMW fuses by default
    own = make_optimizer(config, model.parameters(), config.lr, **fused)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    settings, optimizers = effective_settings(config, own), {"beside": adamw, "own": own}
    for number, seconds in enumerate(time_rounds(model, tokens, optimizers, config.epochs, config.steps), 1):
        row = {"epoch": number, **{name: 1e3 * value for name, value in seconds.items()}}
        row["ratio"] = row["own"] / row["beside"]
        folder.log(row)
        yield Progress(number, config.epochs, row)
    columns = {key: [row[key] for row in folder.rows] for key in ("own", "beside", "ratio")}
    step_ms = median(columns["own"])
    result = {
        "ratio": median(columns["ratio"]), "step_ms": step_ms, "adamw_ms": median(columns["beside"]),
        "least_ratio": min(columns["own"]) / min(columns["beside"]),
        "tokens_per_second": config.batch * config.length / step_ms * 1e3, "epochs": config.epochs,
        "diverged": False, "parameters": count_parameters(model), "settings": settings,
    }  # fmt: skip
    folder.finish(result, time.monotonic() - start, device)
