"""Text to fine-tune on: WikiText-2 in its official files, and a generated one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tam.lab.data.files import DataError, Download, File, Layout, find

PARTS = ("train", "valid", "test")


TEXTS = {
    "wikitext-2": Layout(
        "wikitext-2 (wikitext-2/wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens)",
        tuple(File(f"wikitext-2/wiki.{part}.tokens") for part in PARTS),
        (Download("https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip"),),
    )
}


def read(name: str, folder: Path) -> dict[str, list[str]]:
    """The lines of each part, empty ones too."""
    if name == "generated":
        return {part: generate(lines, seed) for seed, (part, lines) in enumerate(LINES.items())}
    return {part: _lines(folder / file.path) for part, file in zip(PARTS, TEXTS[name].files, strict=True)}


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise DataError(f"{path} is empty: there is nothing to learn from")
    return text.removesuffix("\n").split("\n")  # other separators, such as U+2028, are part of a line


LINES = {"train": 400, "valid": 60, "test": 60}
WORDS = [
    *("the", "a", "one", "no", "every", "small", "large", "old", "new", "red", "green"),
    *("river", "stone", "tree", "bird", "house", "road", "wind", "light"),
    *("falls", "stands", "moves", "turns", "sings", "waits"),
    *("under", "over", "near", "behind", "slowly", "often", "never", "again"),
]


def generate(lines: int, seed: int) -> list[str]:
    """Sentences in which a word depends on the one before it."""
    generator = torch.Generator().manual_seed(seed)
    found: list[str] = []
    for _ in range(lines):
        words = [int(torch.randint(len(WORDS), (), generator=generator))]
        for jump in torch.randint(1, 4, (11,), generator=generator).tolist():
            words.append((words[-1] * 7 + jump) % len(WORDS))
        found.append(" ".join(WORDS[i] for i in words) + " .")
    return found


def check(name: str, folder: Path) -> dict[str, list[str]]:
    """The lines of each part; raises where the text is not there, is empty or is no text."""
    if name != "generated":
        if name not in TEXTS:
            raise DataError(f"text {name!r}: must be one of {', '.join((*TEXTS, 'generated'))}")
        find(name, (TEXTS[name],), folder)
    return read(name, folder)


def words_of(parts: Sequence[Sequence[str]]) -> list[str]:
    """Every word once, in a fixed order."""
    return sorted({word for lines in parts for line in lines for word in line.split()})
