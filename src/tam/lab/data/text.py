"""Texts: WikiText-2 and 20 Newsgroups in their official files, and a generated one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tam.lab.core.errors import DataError
from tam.lab.data.files import find

PARTS = {"train": 400, "valid": 60, "test": 60}  # and the lines of each in the generated text
TEXTS = ("wikitext-2", "20newsgroups", "generated")


def read(name: str, folder: Path) -> dict[str, list[str]]:
    """Return the lines of each part, including empty ones."""
    if name not in TEXTS:
        raise DataError(f"no text {name!r}; there are {', '.join(TEXTS)}")
    if name == "generated":
        return {part: generate(lines, seed) for seed, (part, lines) in enumerate(PARTS.items())}
    if name == "20newsgroups":
        return _read_newsgroups(folder)
    lines_by_part = {}
    for part, file in zip(PARTS, find(name, folder).files, strict=True):
        path = folder / file.path
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if not text.strip():
            raise DataError(f"{path} is empty")
        # Other separators, such as U+2028, are part of a line.
        lines_by_part[part] = text.removesuffix("\n").split("\n")
    return lines_by_part


def _read_newsgroups(folder: Path) -> dict[str, list[str]]:
    """Return the messages. Every second one of the official test set validates."""
    find("20newsgroups", folder)
    messages: dict[str, list[str]] = {}
    for part in ("train", "test"):
        paths = sorted((folder / f"20news-bydate-{part}").glob("*/*"))
        try:
            messages[part] = [path.read_text(encoding="latin-1") for path in paths]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
        if not messages[part]:
            raise DataError(f"{folder / f'20news-bydate-{part}'} is empty")
    parts = {"train": messages["train"], "valid": messages["test"][::2], "test": messages["test"][1::2]}
    return {part: "\n".join(texts).split("\n") for part, texts in parts.items()}


WORDS = [
    *("the", "a", "one", "no", "every", "small", "large", "old", "new", "red", "green"),
    *("river", "stone", "tree", "bird", "house", "road", "wind", "light"),
    *("falls", "stands", "moves", "turns", "sings", "waits"),
    *("under", "over", "near", "behind", "slowly", "often", "never", "again"),
]


def generate(lines: int, seed: int) -> list[str]:
    """Return sentences in which each word depends on the one before it."""
    generator = torch.Generator().manual_seed(seed)
    sentences: list[str] = []
    for _ in range(lines):
        words = [int(torch.randint(len(WORDS), (), generator=generator))]
        for jump in torch.randint(1, 4, (11,), generator=generator).tolist():
            words.append((words[-1] * 7 + jump) % len(WORDS))
        sentences.append(" ".join(WORDS[i] for i in words) + " .")
    return sentences


def words_of(parts: Sequence[Sequence[str]]) -> list[str]:
    """Return every word once, in a fixed order."""
    return sorted({word for lines in parts for line in lines for word in line.split()})
