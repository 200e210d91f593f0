"""Scores of AdamW and AdaTAMW on many datasets, and what the paper computes of them on MTEB.

All is exact, so that no threshold depends on rounding. A dataset counts where both optimizers have a score;
the others are left out, and counted as that.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tam.lab.store import LabError

MTEB = Path(__file__).parent.parent / "paper" / "mteb.csv"
BASELINE, OTHER = "AdamW", "AdaTAMW"
COLUMNS = ["model", "category", "dataset"]
THRESHOLDS = ("0", "0.2", "1")  # percent within which an average is similar
KINDS = ("better", "0.2", "1")  # of shares: higher scores, or also those within so many percent
SIMILAR = "0.2"  # the paper's


@dataclass(frozen=True)
class Row:
    """The scores on a dataset, by optimizer and epochs; what is missing is not among them."""

    model: str
    category: str
    dataset: str
    scores: Mapping[tuple[str, int], Fraction]

    def pair(self, epochs: int) -> tuple[Fraction, Fraction] | None:
        """AdamW's score and AdaTAMW's, where there are both."""
        keys = (BASELINE, epochs), (OTHER, epochs)
        return (self.scores[keys[0]], self.scores[keys[1]]) if self.scores.keys() >= {*keys} else None


@dataclass(frozen=True)
class Improvement:
    """Of the average over a category's datasets."""

    model: str
    category: str
    epochs: int
    n: int  # datasets with both scores
    missing: int
    percent: Fraction | None  # None where AdamW has no average above 0

    @property
    def family(self) -> str:
        return family_of(self.model)


@dataclass(frozen=True)
class Share:
    """On how many of its datasets a model is better, or similar or better."""

    model: str
    epochs: int
    n: int
    missing: int
    counts: Mapping[str, int]  # by kind

    def percent(self, kind: str) -> Fraction | None:
        return Fraction(100 * self.counts[kind], self.n) if self.n else None


def read(path: Path) -> list[Row]:
    """The rows of a CSV file with a column for each optimizer and epochs (AdamW/3); a cell may be empty."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if header[: len(COLUMNS)] != COLUMNS:
        raise LabError(f"{path}: its first columns must be {', '.join(COLUMNS)}")
    keys = [_key(name, path) for name in header[len(COLUMNS) :]]
    rows = [_row(keys, line, f"{path}, row {i}") for i, line in enumerate(lines, 2)]
    if len({(row.model, row.dataset) for row in rows}) < len(rows):
        raise LabError(f"{path}: has a dataset twice for one model")
    return rows


def _key(name: str, path: Path) -> tuple[str, int]:
    optimizer, _, epochs = name.rpartition("/")
    if not optimizer or not epochs.isdecimal():
        raise LabError(f"{path}: column {name!r} is not of an optimizer and epochs, as {BASELINE}/3 is")
    return optimizer, int(epochs)


def _row(keys: Sequence[tuple[str, int]], cells: Sequence[str], place: str) -> Row:
    if len(cells) != len(COLUMNS) + len(keys):
        raise LabError(f"{place}: {len(cells)} cells, but {len(COLUMNS) + len(keys)} columns")
    model, category, dataset, *scores = cells
    try:
        found = {key: Fraction(cell) for key, cell in zip(keys, scores, strict=True) if cell}
    except (ValueError, ZeroDivisionError) as error:
        raise LabError(f"{place}: a score is not a number: {error}") from error
    return Row(model, category, dataset, found)


# ---------------------------------------------------------------------- what is computed


def improvements(rows: Iterable[Row]) -> list[Improvement]:
    """Of every configuration: model, category and epochs."""
    return [
        _improvement(model, category, epochs, of)
        for model, datasets in _grouped(rows, lambda row: row.model).items()
        for category, of in _grouped(datasets, lambda row: row.category).items()
        for epochs in _epochs(datasets)
    ]


def _improvement(model: str, category: str, epochs: int, rows: Sequence[Row]) -> Improvement:
    pairs = [pair for row in rows if (pair := row.pair(epochs)) is not None]
    before = sum((a for a, _ in pairs), Fraction())
    after = sum((b for _, b in pairs), Fraction())
    percent = 100 * (after - before) / before if before > 0 else None
    return Improvement(model, category, epochs, len(pairs), len(rows) - len(pairs), percent)


def counts(found: Iterable[Improvement]) -> dict[str, dict[str, int]]:
    """How many configurations of a family are similar or better, by threshold."""
    return {
        family: {t: sum(percent >= -Fraction(t) for percent in of) for t in THRESHOLDS}
        for family, of in percents(found, lambda one: one.family).items()
    }


def shares(rows: Iterable[Row]) -> list[Share]:
    """Of every model and epochs."""
    return [
        _share(model, epochs, datasets)
        for model, datasets in _grouped(rows, lambda row: row.model).items()
        for epochs in _epochs(datasets)
    ]


def _share(model: str, epochs: int, rows: Sequence[Row]) -> Share:
    pairs = [(row, pair) for row in rows if (pair := row.pair(epochs)) is not None]
    found = {kind: sum(_counts(row, *pair, kind) for row, pair in pairs) for kind in KINDS}
    return Share(model, epochs, len(pairs), len(rows) - len(pairs), found)


def _counts(row: Row, before: Fraction, after: Fraction, kind: str) -> bool:
    if kind == "better":
        return after > before
    highest = abs(max(row.scores.values()))  # correlations may all be below 0
    return after >= before - Fraction(kind) / 100 * highest


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The counts of the families, and the shares of the models in whole percent."""
    models: dict[str, dict[str, dict[str, int | None]]] = {}
    for share in shares(rows):
        percents = {kind: share.percent(kind) for kind in KINDS}
        whole = {kind: None if percent is None else round(percent) for kind, percent in percents.items()}
        models.setdefault(share.model, {})[str(share.epochs)] = whole
    return {"families": counts(improvements(rows)), "models": models}


SIZES = ("base", "large")


def family_of(model: str) -> str:
    return model.rpartition("-")[0] if size_of(model) else model


def size_of(model: str) -> str:
    """Base or large; empty where the name tells none."""
    size = model.rpartition("-")[2]
    return size if size in SIZES else ""


def _epochs(rows: Iterable[Row]) -> list[int]:
    return sorted({epochs for row in rows for _, epochs in row.scores})


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def percents(found: Iterable[Improvement], key: Callable[[Improvement], str]) -> dict[str, list[Fraction]]:
    """Those there are; a group may have none."""
    groups: dict[str, list[Fraction]] = {}
    for one in found:
        groups.setdefault(key(one), []).extend([] if one.percent is None else [one.percent])
    return groups


# ---------------------------------------------------------------------- in words


def kind_told(kind: str) -> str:
    return "better" if kind == "better" else f"similar within {kind}% or better"


def percent_told(value: Fraction | None, form: str) -> str:
    return "" if value is None else form.format(float(value))
