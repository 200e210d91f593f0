"""Text as blocks of tokens, their order, and what of them is masked. Everything is drawn from seeds."""

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

from tam.lab.core.errors import LabError
from tam.lab.core.store import digest_of, write_whole
from tam.lab.data import text

MASKED_SHARE = 0.15  # of the tokens; of these 8 in 10 become [MASK], 1 another token, 1 stays
ROOM = 1.25 * MASKED_SHARE  # for them: of 4,096 tokens it takes 6.7 standard deviations to need more
IGNORED = -100  # the label of a token that is not predicted
MASKS, DROPOUT, EVALUATION = 1, 2, 3  # purposes of `draw_seed`


@dataclass(frozen=True)
class Blocks:
    """Tokens in blocks of one length."""

    ids: Tensor  # [blocks, length]
    special: Tensor  # whether the tokenizer added the token

    def __len__(self) -> int:
        return len(self.ids)


def load_blocks(
    data: str, tokenizer: Any, block: int, batch: int, root: Path, data_folder: Path
) -> dict[str, Blocks]:
    """Return each part's lines, tokenized and joined. The end that does not fill a block is left out.

    The tokens are stored in `root` for the next trial.
    """
    lines_by_part = text.read(data, data_folder)
    content = json.dumps([tokenizer.backend_tokenizer.to_str(), lines_by_part])
    path = root / f"tokens-{digest_of(content.encode())}.pt"
    try:
        tokens_by_part = dict(torch.load(path, weights_only=True))
    except FileNotFoundError:
        tokens_by_part = {part: _tokenize(tokenizer, lines) for part, lines in lines_by_part.items()}
        buffer = io.BytesIO()
        torch.save(tokens_by_part, buffer)
        write_whole(path, buffer.getvalue())
    except Exception as error:  # torch raises any error of its reader
        raise LabError(f"{path} is damaged: remove it, and the next run writes it again") from error
    blocks = {}
    for part, tokens in tokens_by_part.items():
        check_token_count(tokens.shape[1], data, part, block, batch)
        count = tokens.shape[1] // block
        ids, special = tokens[:, : count * block].view(2, count, block)
        blocks[part] = Blocks(ids.long(), special.bool())
    return blocks


def check_token_count(tokens: int, data: str, part: str, block: int, batch: int) -> None:
    """Raise LabError if there are too few: training needs a batch, evaluation a block."""
    needed = batch if part == "train" else 1
    if tokens < needed * block:
        blocks = f"{needed} block{'s' * (needed > 1)} of {block}"
        raise LabError(f"{data}, {part}: fewer than {needed * block} tokens, too short for {blocks}")


def _tokenize(tokenizer: Any, lines: Sequence[str]) -> Tensor:
    """Return a [2, tokens] tensor: their ids, and whether the tokenizer added them."""
    encoding = tokenizer(list(lines), return_special_tokens_mask=True, truncation=False, verbose=False)
    columns = (encoding["input_ids"], encoding["special_tokens_mask"])
    return torch.tensor([[i for row in rows for i in row] for rows in columns], dtype=torch.int32)


class Row(NamedTuple):
    """A block, and the seed its masks are drawn from."""

    ids: Tensor
    special: Tensor
    mask_seed: int


class EpochSequence(Dataset[Row]):
    """All epochs as one sequence of blocks, batch after batch. An incomplete batch is left out."""

    def __init__(self, blocks: Blocks, config: Any) -> None:
        self.blocks, self.seed = blocks, config.seed
        length = len(blocks) // config.batch * config.batch  # of an epoch
        self.order: list[int] = []
        for epoch in range(config.epochs):
            generator = torch.Generator().manual_seed(self.seed * 100003 + epoch)
            self.order += torch.randperm(len(blocks), generator=generator)[:length].tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Row:
        row = self.order[index]
        return Row(self.blocks.ids[row], self.blocks.special[row], draw_seed(self.seed, index, MASKS))


def draw_seed(seed: int, index: int, purpose: int) -> int:
    """Return the seed of a generator. torch's CPU generator reads 32 bits of it only."""
    return int.from_bytes(hashlib.sha256(f"{purpose} {seed} {index}".encode()).digest()[:4], "big")


class MaskingCollator:
    """Makes a batch. The masks of a row are drawn from the row's seed, independent of the other rows."""

    def __init__(self, tokenizer: Any) -> None:
        self.mask_id, self.vocabulary = int(tokenizer.mask_token_id), len(tokenizer)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        ids, labels = (torch.stack(column) for column in zip(*map(self._mask, rows), strict=True))
        places, labels = select_masked(labels.flatten())
        return {"input_ids": ids, "places": places, "labels": labels}  # no padding: all attend to all

    def _mask(self, row: Row) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(row.mask_seed)
        chance, kind = torch.rand(2, len(row.ids), generator=generator)
        other = torch.randint(self.vocabulary, row.ids.shape, generator=generator)
        is_masked = (chance < MASKED_SHARE) & ~row.special
        replacement = torch.where(kind < 0.8, self.mask_id, torch.where(kind < 0.9, other, row.ids))
        return torch.where(is_masked, replacement, row.ids), torch.where(is_masked, row.ids, IGNORED)


def select_masked(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places and labels of the tokens to predict, padded with ignored ones.

    The length is a multiple of the room for masked tokens. A large batch nearly always needs it once, so
    batches have one shape.
    """
    places = (labels != IGNORED).nonzero().flatten()
    room = math.ceil(len(labels) * ROOM)
    missing = max(-(-len(places) // room), 1) * room - len(places)
    return pad(places, (0, missing)), pad(labels[places], (0, missing), value=IGNORED)
