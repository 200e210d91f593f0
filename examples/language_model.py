"""What the examples share: a small transformer over the bytes of a text file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, LENGTH, BATCH = 64, 64, 16


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn; else this file")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="a run that is there goes on")
    return parser.parse_args()


def start() -> tuple[torch.device, int]:
    """This process's device and rank; NCCL where there are GPUs, else gloo."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device, dist.get_rank()


def read(path: Path) -> Tensor:
    found = torch.tensor(list(path.read_bytes()))
    if len(found) <= LENGTH + 1:
        raise SystemExit(f"{path} has {len(found)} bytes; it must have more than {LENGTH + 1}")
    return found


def batch(text: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch of a step and rank, which depends on nothing else: a resumed run sees the same ones."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[i : i + LENGTH + 1] for i in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
