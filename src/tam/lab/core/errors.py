"""The errors that end a trial or a run with a message for the user."""

from __future__ import annotations

import importlib.util

from tam._extras import describe_missing

# The extra that brings each module. `lab` includes `demo`.
EXTRA_BY_MODULE = {
    "PIL": "lab", "accelerate": "llm", "filelock": "lab", "jinja2": "lab", "markupsafe": "lab",
    "mteb": "llm", "numpy": "lab", "pandas": "llm", "ray": "ray", "rich": "lab",
    "schedulefree": "pretrain", "scipy": "lab", "sklearn": "lab", "timm": "timm", "tomli": "lab",
    "torch_geometric": "graph", "transformers": "llm", "typer": "lab",
}  # fmt: skip


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


def missing_package(what: str, module: str, extra: str | None = None) -> LabError:
    """Return the error for a part of the lab whose extra is not installed, by default the module's."""
    return LabError(describe_missing(what, module, extra or EXTRA_BY_MODULE[module]))


def require(what: str, *modules: str) -> None:
    """Raise the error of `missing_package` for the first of these modules that is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise missing_package(what, module)


def explain_missing(what: str, error: Exception, extra: str | None = None) -> LabError | None:
    """Return the error that names the extra to install. None: no package of an extra is missing.

    A part of an installed package can be missing, for example `scipy.nothing`. No extra brings that.
    """
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    module = name.partition(".")[0]
    if module not in EXTRA_BY_MODULE or (module != name and importlib.util.find_spec(module) is not None):
        return None
    return missing_package(what, module, extra)
