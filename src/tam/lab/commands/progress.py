"""Shows how a run goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import mean

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tam.lab.core.registry import get_experiment
from tam.lab.core.study import Metric
from tam.lab.engines import events
from tam.lab.engines.events import Job


class TrialProgress:
    """How far a job is."""

    def __init__(self, job: Job, start: float) -> None:
        self.job, self.start = job, start
        self.epoch, self.epochs, self.epochs_seen = 0, job.config.epochs, 0
        self.metrics: Mapping[str, float] = {}
        self.declared = get_experiment(job.experiment).metrics or (Metric("loss"),)

    def update(self, event: events.EpochEnded) -> None:
        self.epochs_seen += event.epoch - self.epoch if self.epochs_seen else 1  # it may have been resumed
        self.epoch, self.epochs, self.metrics = event.epoch, event.epochs, event.metrics

    def seconds(self, epochs: int) -> float:
        """Return how long so many epochs take, start-up included. It must have ended one."""
        return (time.monotonic() - self.start) / self.epochs_seen * epochs

    def figures(self) -> str:
        """Return the metrics of the last epoch, as the experiment declares them."""
        values = [(metric, self.metrics.get(metric.key)) for metric in self.declared]
        return ", ".join(f"{one.key} {value:{one.format}}" for one, value in values if value is not None)


class ProgressDisplay:
    """Shows events. A context."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        terminal = self.console.is_terminal
        self.live = Live(console=self.console, refresh_per_second=2, transient=True) if terminal else None
        self.running: dict[str, TrialProgress] = {}
        self.announced: set[str] = set()  # keys of trials whose start was shown
        self.failures: set[str] = set()  # messages that were shown
        self.round = events.RoundStarted(0)
        self.left, self.finished = 0, 0  # trials: of this round, and of this run
        self.durations: list[float] = []  # seconds per trial, of those that are finished
        self.concurrency, self.last_change = 1, time.monotonic()
        self.best: tuple[float, str] | None = None  # a score, the higher the better, and a text

    def __enter__(self) -> ProgressDisplay:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, event: events.Event) -> None:
        """Show an event."""
        if isinstance(event, events.Notice):
            self._print(event.text, always=True)
        elif isinstance(event, events.RoundStarted):
            self.round, self.left, self.last_change = event, event.trials, time.monotonic()
            self._print(f"{event.trials} trials to run: {self.overall()}")
        elif isinstance(event, events.TrialEnded):
            self._end_trial(event)
        else:
            self._update_trial(event)
        if self.live is not None:
            self.live.update(self._table())

    def _update_trial(self, event: events.TrialEvent) -> None:
        """Note that a trial has started or ended an epoch. Ray does not tell of starts."""
        key, name = event.job.key, f"{event.job.label} ({event.job.key})"
        if key not in self.running or not isinstance(event, events.EpochEnded):
            start = self.last_change if isinstance(event, events.EpochEnded) else time.monotonic()
            self.running[key] = TrialProgress(event.job, start)
            self.concurrency = max(self.concurrency, len(self.running))
        if key not in self.announced:
            self.announced.add(key)
            epoch = event.epoch if isinstance(event, events.TrialStarted) else 0
            config = event.job.config
            continued = f"continued from {config.unit} {epoch} of {config.epochs}"
            self._print(f"{name}: {continued if epoch else 'started'}")
        if isinstance(event, events.EpochEnded):
            self.running[key].update(event)
            self._update_best(self.running[key])

    def _end_trial(self, event: events.TrialEnded) -> None:
        trial = self.running.pop(event.job.key, None) or TrialProgress(event.job, self.last_change)
        self.left -= trial.job.size
        self.last_change = time.monotonic()
        text = event.message
        if isinstance(event, events.TrialFailed):
            if event.stops_run or text in self.failures:  # the message of the run's end has the first
                text = "failed" if event.stops_run else f"failed, too: {event.reason or text}"
            self.failures.add(event.message)
        if isinstance(event, events.TrialFinished):
            self.finished += trial.job.size
            self.durations.append((time.monotonic() - trial.start) / trial.job.size)
            duration = describe_duration(time.monotonic() - trial.start)
            text = "; ".join(filter(None, (f"finished in {duration}", trial.figures(), self.overall())))
        is_failure = isinstance(event, events.TrialFailed)
        self._print(f"{event.job.label} ({event.job.key}): {text}", always=is_failure)

    def _update_best(self, trial: TrialProgress) -> None:
        metric = next((one for one in trial.declared if one.higher_is_better is not None), Metric("loss"))
        value = trial.metrics.get(metric.key, math.nan)
        score = value if metric.higher_is_better else -value
        if math.isfinite(value) and (self.best is None or score > self.best[0]):
            self.best = score, f"best {metric.key} {value:{metric.format}} ({trial.job.label})"

    def overall(self) -> str:
        """Return how far the run is: "3/14 trials, about 2 min left, 2 stages to go"."""
        seconds, stages = self._seconds_left(), self.round.later_rounds
        text = f"{self.finished}/{self.finished + self.left + self.round.later_trials} trials"
        text += "" if seconds is None else f", about {describe_duration(seconds)} left"
        return text + (f", {stages} stage{'s' * (stages > 1)} to go" if stages else "")

    def _seconds_left(self) -> float | None:
        """Estimate the time until the last round ends, as if all trials took as long as those so far."""
        active = [trial for trial in self.running.values() if trial.epochs_seen]
        durations = self.durations or [trial.seconds(trial.epochs) / trial.job.size for trial in active]
        if not durations:
            return None
        waiting = self.left + self.round.later_trials - sum(trial.job.size for trial in active)
        rest = [trial.seconds(trial.epochs - trial.epoch) for trial in active]
        return max([(sum(rest) + waiting * mean(durations)) / self.concurrency, *rest])

    def _table(self) -> Table:
        title = "; ".join(part for part in (self.overall(), self.best and self.best[1]) if part)
        table = Table("trial", "progress", "", title=title)
        for trial in self.running.values():
            progress = f"{trial.job.config.unit} {trial.epoch} of {trial.epochs}"
            table.add_row(trial.job.label, progress, trial.figures())
        return table

    def _print(self, text: str, always: bool = False) -> None:
        """Print a line. If there is a live table, only one that must be seen."""
        if always or self.live is None:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe_duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
