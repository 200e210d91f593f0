"""What happens in a run: engines and the runner report it, a display shows it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tam.lab.core.errors import LabError
from tam.lab.engines.job import Job


@dataclass(frozen=True)
class Notice:
    """A text for the user."""

    text: str


@dataclass(frozen=True)
class RoundStarted:
    """The runner hands trials to the engine."""

    trials: int
    later_trials: int = 0  # expected in later rounds
    later_rounds: int = 0


@dataclass(frozen=True)
class TrialEvent:
    """The base of events of one job."""

    job: Job


class TrialStarted(TrialEvent):
    """A process works on the trial."""


@dataclass(frozen=True)
class EpochEnded(TrialEvent):
    """An epoch is complete. Of several trials in one program, metrics are means."""

    epoch: int
    epochs: int
    metrics: Mapping[str, float]

    @classmethod
    def from_progress(cls, job: Job, progress: Any) -> EpochEnded:
        """Return the event for a trial's Progress."""
        return cls(job, progress.epoch, progress.epochs, progress.metrics)


class TrialEnded(TrialEvent):
    """The base of events after which this run does not work on the trial."""


class TrialFinished(TrialEnded):
    """The trial has a result."""


@dataclass(frozen=True)
class TrialBusy(TrialEnded):
    """Another run works on the trial."""

    message: str


@dataclass(frozen=True)
class TrialFailed(TrialEnded):
    """The trial has no result."""

    message: str
    stops_run: bool = False

    @classmethod
    def from_error(cls, job: Job, error: Exception) -> TrialFailed:
        """Return the event for an error. A LabError stops the run: other trials would meet it, too."""
        is_ours = isinstance(error, LabError)
        return cls(job, str(error) if is_ours else "".join(traceback.format_exception(error)), is_ours)


Event = Notice | RoundStarted | TrialEvent
EventHandler = Callable[[Event], None]
