"""Shows how a run goes: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from statistics import mean
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tam.lab.engines.work import Event
from tam.lab.store import key_of


class Show:
    """Hears of events. A context."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        terminal = self.console.is_terminal
        self.live = Live(console=self.console, refresh_per_second=2, transient=True) if terminal else None
        self.at_work: dict[str, Event] = {}
        self.first = 0.0  # when the first epoch ended
        self.done, self.epochs = 0, 0
        self.best: tuple[float, str] | None = None  # validation accuracy, and of which trial
        self.left = 0  # trials of this round

    def __enter__(self) -> Show:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, event: Event | int | str) -> None:
        if isinstance(event, Event):
            self._hear(event)
        elif isinstance(event, int):
            self.left = event
            self._line(f"{event} trials to run")
        else:
            self.console.print(event, highlight=False, markup=False, soft_wrap=True)
        if self.live is not None:
            self.live.update(self._table())

    def _hear(self, event: Event) -> None:
        key = key_of(event.job.config)
        if event.kind in ("start", "epoch"):
            self.at_work[key] = event
        else:
            self.at_work.pop(key, None)
            count = 1 + len(event.job.others)
            self.left -= count
            self.done += count if event.kind == "done" else 0
        name = f"{event.job.label} ({key})"
        if event.kind == "epoch":
            self.first = self.first or time.monotonic()
            self.epochs += 1
            best = (event.detail.get("validation", 0.0), event.job.label)
            self.best = max(self.best or best, best)
            if event.detail["epoch"] % max(1, event.detail["epochs"] // 10) == 0:
                epoch = f"epoch {event.detail['epoch']} of {event.detail['epochs']}"
                self._line(f"{name}: {epoch}: {_figures(event)}{self._best()}{self._time_left()}")
        elif event.kind in ("busy", "failed"):
            self._line(f"{name}: {event.kind}: {event.detail['message']}")
        else:
            self._line(f"{name}: {event.kind}")

    def _line(self, text: str) -> None:
        """Where there is no live table."""
        if self.live is None:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        title = f"{self.done} trials done, {self.left} left of this round{self._best()}{self._time_left()}"
        table = Table("trial", "epoch", "", title=title)
        for event in self.at_work.values():
            epoch = f"{event.detail.get('epoch', 0)} of {event.job.config['epochs']}"
            table.add_row(event.job.label, epoch, _figures(event))
        return table

    def _best(self) -> str:
        if self.best is None or not self.best[0]:
            return ""
        return f"; best validation so far {self.best[0]:.2f} ({self.best[1]})"

    def _time_left(self) -> str:
        """Of this round, from the time the epochs after the first have taken."""
        if self.epochs < 2 or not self.at_work:
            return ""
        totals = [event.job.config["epochs"] for event in self.at_work.values()]
        running = sum(totals) - sum(event.detail.get("epoch", 0) for event in self.at_work.values())
        started = sum(1 + len(event.job.others) for event in self.at_work.values())
        waiting = max(0, self.left - started) * mean(totals)  # as if they were like these
        seconds = (time.monotonic() - self.first) / (self.epochs - 1) * (running + waiting)
        told = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
        return f", about {told} left of this round"


def _figures(event: Event) -> str:
    shown = {
        "loss": ".3f",
        "validation": ".2f",
        "online": ".2f",
        "rmse": ".4f",
        "perplexity": ".3f",
        "average": ".2f",
        "ratio": ".3f",
        "alignment": "+.3f",
    }
    return ", ".join(f"{k} {event.detail[k]:{f}}" for k, f in shown.items() if k in event.detail)
