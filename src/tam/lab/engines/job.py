"""What an engine runs, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tam.lab.core.config import TrialConfig
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
