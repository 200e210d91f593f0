"""The errors that end a trial or a run with a message for the user."""

from __future__ import annotations


class LabError(RuntimeError):
    """An error the user can act on. Its message is shown without a traceback, and it stops the run."""

    exit_status = 1


class StoppedError(LabError):
    """The user or the system has stopped the run."""

    exit_status = 130


class BusyError(LabError):
    """Another process is running the trial."""


class DataError(LabError):
    """A data set is missing, incomplete or damaged."""
