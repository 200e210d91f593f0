"""What an engine runs, where, and what happens: engines and the runner report it, a display shows it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError, explain_missing
from tam.lab.core.store import TrialFolder


@dataclass(frozen=True)
class RunLocation:
    """Where trials run and where their files are."""

    root: Path
    data: Path
    device: str = "cpu"
    trials_per_process: int = 1  # side by side
    save_every: float = 60.0  # seconds between checkpoints


@dataclass(frozen=True)
class Job:
    """A trial to run."""

    experiment: str
    config: TrialConfig
    label: str = ""  # for people
    others: tuple[TrialConfig, ...] = ()  # trials that run in the same program

    @property
    def key(self) -> str:
        return self.config.key

    @property
    def size(self) -> int:
        """The number of trials."""
        return 1 + len(self.others)

    def is_busy(self, root: Path) -> bool:
        """Return whether a process works on one of its trials."""
        return any(folder.busy() for folder in self.folders(root))

    def folders(self, root: Path) -> list[TrialFolder]:
        """Return its own folder and those of the others."""
        return [TrialFolder(root, config) for config in (self.config, *self.others)]


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


@dataclass(frozen=True)
class TrialStarted(TrialEvent):
    """A process works on the trial."""

    epoch: int = 0  # of the checkpoint it continues from


@dataclass(frozen=True)
class EpochEnded(TrialEvent):
    """An epoch is complete. Of several trials in one program, metrics are means."""

    epoch: int
    epochs: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class TrialEnded(TrialEvent):
    """The base of events after which this run does not work on the trial."""

    message: str = ""


class TrialFinished(TrialEnded):
    """The trial has a result."""


class TrialBusy(TrialEnded):
    """Another run works on the trial."""


@dataclass(frozen=True)
class TrialFailed(TrialEnded):
    """The trial has no result."""

    stops_run: bool = False
    reason: str = ""  # in one line

    @classmethod
    def from_error(cls, job: Job, error: Exception) -> TrialFailed:
        """Return the event for an error. A LabError stops the run: other trials would meet it, too."""
        error = explain_missing(f"the experiment {job.experiment}", error) or error
        if isinstance(error, LabError):
            return cls(job, str(error), stops_run=True, reason=str(error))
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return cls(job, "".join(traceback.format_exception(error)), reason=reason)

    @staticmethod
    def summarize(failures: Sequence[TrialFailed]) -> LabError:
        """Return the error that ends a run. Each failure was reported when it happened."""
        reasons = list(dict.fromkeys(failure.reason or failure.message for failure in failures))
        text = "; ".join([reason.rstrip(".") for reason in reasons[:3]] + ["..."] * (len(reasons) > 3))
        count = f"{len(failures)} trial{'s' * (len(failures) > 1)} failed"
        return LabError(f"{count}: {text}. Finished trials are kept.")


Event = Notice | RoundStarted | TrialEvent
EventHandler = Callable[[Event], None]
