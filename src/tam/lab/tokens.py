"""Text as tokens: blocks of one length, their order, and what of them is masked, drawn from seeds."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from tam.lab.data import text
from tam.lab.store import LabError, digest_of, write_whole

MASKED = 0.15  # of the tokens; of these 8 in 10 become [MASK], 1 another token, 1 stays
SHARE = 1.25 * MASKED  # room for them: of 4,096 tokens it takes 6.7 standard deviations to need more
IGNORED = -100  # the label of a token that is not to be predicted


@dataclass(frozen=True)
class Blocks:
    """Text as tokens in blocks of one length."""

    ids: Tensor  # [blocks, length]
    special: Tensor  # whether the tokenizer has put it there

    def __len__(self) -> int:
        return len(self.ids)


def tokenized(
    data: str, tokenizer: Any, block: int, batch: int, root: Path, data_folder: Path
) -> dict[str, Blocks]:
    """Each part's lines, tokenised and put end to end; what does not fill a block at the end is left out."""
    lines = text.read(data, data_folder)
    kept = root / f"tokens-{digest_of(json.dumps([tokenizer.backend_tokenizer.to_str(), lines]).encode())}.pt"
    found = _kept(kept)
    if found is None:
        found = {part: _tokens(tokenizer, some) for part, some in lines.items()}
        buffer = io.BytesIO()
        torch.save(found, buffer)
        write_whole(kept, buffer.getvalue())
    blocks = {}
    for name, both in found.items():
        check_size(f"{data}, {name}", both.shape[1], name, block, batch)
        count = both.shape[1] // block
        rows = both[:, : count * block].view(2, count, block)
        blocks[name] = Blocks(rows[0].long(), rows[1].bool())
    return blocks


def most_tokens(lines: Sequence[str]) -> int:
    """As many as any tokenizer can make of them: a byte each, and two around a line."""
    return sum(len(line.encode()) + 2 for line in lines)


def check_size(what: str, tokens: int, part: str, block: int, batch: int) -> None:
    """Raises where they are too few: to train takes a batch, to measure a block."""
    needed = batch if part == "train" else 1
    if tokens < needed * block:
        few = f"fewer than {needed * block} tokens"
        raise LabError(f"{what}: {few}, too short for {needed} block{'s' * (needed > 1)} of {block}")


def _kept(path: Path) -> dict[str, Tensor] | None:
    try:
        return dict(torch.load(path, weights_only=True))
    except FileNotFoundError:
        return None
    except Exception as error:  # torch raises whatever its reader meets
        raise LabError(f"{path} is damaged: remove it, and it is made again") from error


def _tokens(tokenizer: Any, lines: Sequence[str]) -> Tensor:
    """[2, tokens]: which they are, and whether they are the tokenizer's own."""
    found = tokenizer(list(lines), return_special_tokens_mask=True, truncation=False, verbose=False)
    columns = (found["input_ids"], found["special_tokens_mask"])
    return torch.tensor([[i for row in rows for i in row] for rows in columns], dtype=torch.int32)


class Row(NamedTuple):
    """A block, and the number its masks are drawn from."""

    ids: Tensor
    special: Tensor
    draw: int


class Passes(Dataset[Row]):
    """All epochs as one sequence of blocks, batch after batch; one that is not full is left out."""

    def __init__(self, blocks: Blocks, batch: int, epochs: int, seed: int) -> None:
        self.blocks, self.seed = blocks, seed
        self.length = len(blocks) // batch * batch  # of an epoch
        self.count = epochs * self.length
        self.orders: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Row:
        epoch, at = divmod(place, self.length)
        if epoch not in self.orders:
            generator = torch.Generator().manual_seed(self.seed * 100003 + epoch)
            self.orders = {epoch: torch.randperm(len(self.blocks), generator=generator)}
        row = self.orders[epoch][at]
        return Row(self.blocks.ids[row], self.blocks.special[row], drawn_from(self.seed, place, MASKS))


MASKS, DROPOUT, MEASURED = 1, 2, 3  # what numbers are drawn for: each has its own


def drawn_from(seed: int, place: int, what: int) -> int:
    """A number for a generator. torch's for CPUs reads 32 bits of it, and no more."""
    return int.from_bytes(hashlib.sha256(f"{what} {seed} {place}".encode()).digest()[:4], "big")


class Masks:
    """Makes a batch: what of a row is masked is drawn from the row's number, whatever stands beside it."""

    def __init__(self, tokenizer: Any) -> None:
        self.mask, self.size = int(tokenizer.mask_token_id), len(tokenizer)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        made = [self._masked(row) for row in rows]
        ids, labels = (torch.stack(column) for column in zip(*made, strict=True))
        places, labels = _to_predict(labels.flatten())
        return {"input_ids": ids, "places": places, "labels": labels}  # without padding, all attend to all

    def _masked(self, row: Row) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(row.draw)
        chance, how = torch.rand(2, len(row.ids), generator=generator)
        other = torch.randint(self.size, row.ids.shape, generator=generator)
        chosen = (chance < MASKED) & ~row.special
        shown = torch.where(how < 0.8, self.mask, torch.where(how < 0.9, other, row.ids))
        return torch.where(chosen, shown, row.ids), torch.where(chosen, row.ids, IGNORED)


def _to_predict(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens are to be predicted, and what they are; filled up with tokens that are to be ignored.

    So much that it is a whole number of shares of all tokens: of a large batch nearly always one, so that
    what reads it has one shape.
    """
    places = (labels != IGNORED).nonzero().flatten()
    share = math.ceil(len(labels) * SHARE)
    missing = max(-(-len(places) // share), 1) * share - len(places)
    return pad(places, (0, missing)), pad(labels[places], (0, missing), value=IGNORED)
