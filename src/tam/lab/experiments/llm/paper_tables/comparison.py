"""Scores of AdamW and AdaTAMW on many datasets, and what the paper computes from them on MTEB.

Everything is exact, so no threshold depends on rounding. A dataset counts if both optimizers have a score.
The others are left out and counted as missing.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from tam.lab.core.errors import LabError

MTEB = Path(__file__).parent / "mteb.csv"
BASELINE, OTHER = "AdamW", "AdaTAMW"
COLUMNS = ["model", "category", "dataset"]
THRESHOLDS = ("0", "0.2", "1")  # percent within which an average is similar
KINDS = ("better", "0.2", "1")  # of shares: higher scores, or also those within so many percent
SIMILAR = "0.2"  # the paper's
SIZES = ("base", "large")

T = TypeVar("T")
Key = TypeVar("Key")


@dataclass(frozen=True)
class Row:
    """The scores on a dataset, by optimizer and epochs, without missing ones."""

    model: str
    category: str
    dataset: str
    scores: Mapping[tuple[str, int], Fraction]

    def pair(self, epochs: int) -> tuple[Fraction, Fraction] | None:
        """Return AdamW's score and AdaTAMW's, if there are both."""
        before, after = self.scores.get((BASELINE, epochs)), self.scores.get((OTHER, epochs))
        return None if before is None or after is None else (before, after)


@dataclass(frozen=True)
class Measurement:
    """What was measured of a model after so many epochs."""

    model: str
    epochs: int
    n: int  # datasets with both scores
    missing: int

    @property
    def family(self) -> str:
        return family_of(self.model)


@dataclass(frozen=True)
class Improvement(Measurement):
    """The improvement of the average over a category's datasets."""

    category: str
    percent: Fraction | None  # None if AdamW has no average above 0


@dataclass(frozen=True)
class Share(Measurement):
    """On how many of its datasets a model is better, or similar or better."""

    counts: Mapping[str, int]  # by kind

    def percent(self, kind: str) -> Fraction | None:
        return Fraction(100 * self.counts[kind], self.n) if self.n else None


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV file: one column per optimizer and epochs (AdamW/3), cells can be empty."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    if header[: len(COLUMNS)] != COLUMNS:
        raise LabError(f"{path}: its first columns must be {', '.join(COLUMNS)}")
    settings = []
    for name in header[len(COLUMNS) :]:
        optimizer, _, epochs = name.rpartition("/")
        if not optimizer or not epochs.isdecimal():
            raise LabError(f"{path}: column {name!r} must be an optimizer and epochs, like {BASELINE}/3")
        settings.append((optimizer, int(epochs)))
    rows = [_parse_row(settings, line, f"{path}, row {i}") for i, line in enumerate(lines, 2)]
    if len({(row.model, row.dataset) for row in rows}) < len(rows):
        raise LabError(f"{path}: has a dataset twice for one model")
    return rows


def _parse_row(settings: Sequence[tuple[str, int]], cells: Sequence[str], place: str) -> Row:
    if len(cells) != len(COLUMNS) + len(settings):
        raise LabError(f"{place}: {len(cells)} cells, but {len(COLUMNS) + len(settings)} columns")
    model, category, dataset, *scores = cells
    try:
        by_setting = {key: Fraction(cell) for key, cell in zip(settings, scores, strict=True) if cell}
    except (ValueError, ZeroDivisionError) as error:
        raise LabError(f"{place}: a score is not a number: {error}") from error
    return Row(model, category, dataset, by_setting)


def improvements(rows: Iterable[Row]) -> list[Improvement]:
    """Return the improvement of every configuration: model, category and epochs."""
    results = []
    for model, datasets in group_by(rows, lambda row: row.model).items():
        for category, members in group_by(datasets, lambda row: row.category).items():
            for epochs in sorted({epochs for row in datasets for _, epochs in row.scores}):
                pairs = [pair for row in members if (pair := row.pair(epochs)) is not None]
                before, after = (sum((pair[i] for pair in pairs), Fraction()) for i in (0, 1))
                percent = 100 * (after - before) / before if before > 0 else None
                missing = len(members) - len(pairs)
                results.append(Improvement(model, epochs, len(pairs), missing, category, percent))
    return results


def shares(rows: Iterable[Row]) -> list[Share]:
    """Return the shares of every model and number of epochs."""
    results = []
    for model, datasets in group_by(rows, lambda row: row.model).items():
        for epochs in sorted({epochs for row in datasets for _, epochs in row.scores}):
            both = [(row, pair) for row in datasets if (pair := row.pair(epochs)) is not None]
            gains = [(after - before, max(row.scores.values())) for row, (before, after) in both]
            counts = {"better": sum(gain > 0 for gain, _ in gains)}
            for within in KINDS[1:]:  # of the highest score, which may be below 0
                counts[within] = sum(
                    gain >= -Fraction(within) / 100 * abs(highest) for gain, highest in gains
                )
            results.append(Share(model, epochs, len(both), len(datasets) - len(both), counts))
    return results


def counts(improvements: Iterable[Improvement]) -> dict[str, dict[str, int]]:
    """Return how many configurations of a family are similar or better, by threshold."""
    return {
        family: {t: sum(percent >= -Fraction(t) for percent in values) for t in THRESHOLDS}
        for family, values in percents(improvements, lambda one: one.family).items()
    }


def percents(
    improvements: Iterable[Improvement], key: Callable[[Improvement], str]
) -> dict[str, list[Fraction]]:
    """Return the improvements by group. A group can have none."""
    groups = group_by(improvements, key).items()
    return {name: [one.percent for one in group if one.percent is not None] for name, group in groups}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the counts of the families, and the shares of the models in whole percent."""
    models: dict[str, dict[str, dict[str, int | None]]] = {}
    for share in shares(rows):
        exact = {kind: share.percent(kind) for kind in KINDS}
        rounded = {kind: None if percent is None else round(percent) for kind, percent in exact.items()}
        models.setdefault(share.model, {})[str(share.epochs)] = rounded
    return {"families": counts(improvements(rows)), "models": models}


def family_of(model: str) -> str:
    return model.rpartition("-")[0] if size_of(model) else model


def size_of(model: str) -> str:
    """Return base or large, or an empty string if the name has neither."""
    size = model.rpartition("-")[2]
    return size if size in SIZES else ""


def group_by(values: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """Return the values by key, in the order in which keys first appear."""
    groups: dict[Key, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def describe_kind(kind: str) -> str:
    return "better" if kind == "better" else f"similar within {kind}% or better"


def format_percent(value: Fraction | None, form: str) -> str:
    return "" if value is None else form.format(float(value))
