"""The figure of a trial that a claim compares, as the claim file declares it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Any, NamedTuple

from tam.lab.core.errors import LabError
from tam.lab.core.results import TrialRecord

JUMP_WINDOW, JUMP_FACTOR = 10, 1.5
KINDS = ("result", "last", "until", "jump", "alignment", "scores")


class Jump(NamedTuple):
    """An abrupt rise: its epoch, and by what factor."""

    epoch: int
    size: float


def first_jump(norms: Sequence[float]) -> Jump | None:
    """Return the first epoch, counted from 1, whose value is 1.5 times the median of the ten before it.

    A slow rise is no jump. The first ten epochs are not judged.
    """
    for i in range(JUMP_WINDOW, len(norms)):
        typical = median(norms[i - JUMP_WINDOW : i])
        if norms[i] > JUMP_FACTOR * typical > 0:
            return Jump(i + 1, norms[i] / typical)
    return None


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is measured of a trial: exactly one of the first six fields says what."""

    result: tuple[str, ...] = ()  # the mean of these figures of the result
    last: str = ""  # the mean of a metric over the last `epochs`
    until: str = ""  # epochs after the switch until this metric is at most `at_most`
    jump: str = ""  # the epoch of the first jump of this metric
    alignment: str = ""  # s: "start" (steps 2 to 11), "lowest" (of the epoch means) or "end" (last epoch)
    scores: int = 0  # the mean main score of this many tasks
    epochs: int = 10
    at_most: float = 0.0
    log: bool = False
    floor: float = 0.0  # smaller values count as this one
    chance: float | None = None  # what a diverged trial counts; None: the worst value of its study
    lower: bool = False  # is better

    def __post_init__(self) -> None:
        if sum(bool(getattr(self, kind)) for kind in KINDS) != 1:
            raise ValueError(f"outcome must have exactly one of {', '.join(KINDS)}")
        if self.log and self.chance is not None:
            raise ValueError("outcome can have log or chance, not both")
        if self.alignment not in ("", "start", "lowest", "end"):
            raise ValueError(f"alignment must be 'start', 'lowest' or 'end', got {self.alignment!r}")

    @classmethod
    def from_toml(cls, declared: dict[str, Any]) -> Measure:
        """Return the measure that a claim file declares."""
        unknown = sorted(declared.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"outcome has no metric or option {unknown[0]!r}")
        texts = [declared.get(key, "") for key in ("last", "until", "jump", "alignment")]
        names, numbers = declared.get("result", []), [declared.get(key, 1) for key in ("scores", "epochs")]
        is_valid = isinstance(names, list) and all(isinstance(text, str) for text in (*names, *texts))
        if not is_valid or not all(isinstance(number, int) and number > 0 for number in numbers):
            raise ValueError("outcome has an entry of a wrong type")
        return cls(**{**declared, "result": tuple(names)})

    def of(self, record: TrialRecord) -> float:
        """Return the figure of a trial, before a logarithm. NaN: it diverged, or has no such figure."""
        if record.diverged:
            return math.nan if self.chance is None else self.chance
        value = self._read(record)
        value = max(value, self.floor) if self.floor else value
        if self.log and not value > 0:
            raise LabError(f"trial {record.key}: {value:g} has no logarithm")
        return math.log(value) if self.log else value

    @staticmethod
    def _known(figures: Mapping[str, Any], name: str, record: TrialRecord) -> Any:
        if name not in figures:
            raise LabError(f"the outcome {name!r} is unknown: trial {record.key} has no such metric")
        return figures[name]

    def _read(self, record: TrialRecord) -> float:
        if self.result:
            figures = [self._known(record.result, name, record) for name in self.result]
            if not all(isinstance(figure, int | float) for figure in figures):
                raise LabError(f"{', '.join(self.result)} of trial {record.key} are no numbers")
            return fmean(figures)
        if self.scores:
            scores = [float(stored["score"]) for stored in record.scores.values()]
            return fmean(scores) if len(scores) == self.scores else math.nan
        if self.alignment == "start":
            s = record.alignment
            return math.nan if s is None or len(s) < 11 else float(s[1:11].double().mean())
        key = self.last or self.until or self.jump or "alignment"
        column = [float(row[key]) for row in record.metrics if key in row]
        self._known({key: column} if column else {}, key, record)
        if self.last:
            return fmean(column[-self.epochs :])
        if self.until:
            switch = int(record.config.get("switch", 0))
            reached = (i for i, value in enumerate(column[switch:], 1) if value <= self.at_most)
            return float(next(reached, len(column) - switch))
        if self.jump:
            jump = first_jump(column)
            return math.inf if jump is None else float(jump.epoch)  # infinite: none was seen
        return min(column) if self.alignment == "lowest" else column[-1]


def outcomes_by_seed(records: dict[int, TrialRecord], measure: Measure, worst: float) -> dict[int, float]:
    """Return the outcome of every seed. A diverged trial counts at chance level, or as the worst value."""
    values = {seed: measure.of(record) for seed, record in records.items()}
    return {
        seed: worst if math.isnan(value) and records[seed].diverged else value
        for seed, value in values.items()
        if not math.isnan(value) or records[seed].diverged
    }
