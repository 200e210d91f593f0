"""The errors that end a trial or a run with a message for the user."""

from __future__ import annotations


class LabError(RuntimeError):
    """An error the user can act on. Its message is shown without a traceback, and it stops the run."""


class BusyError(LabError):
    """Another process is running the trial."""


class DataError(LabError):
    """A data set is missing, incomplete or damaged."""
