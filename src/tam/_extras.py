"""Optional dependencies: the library needs torch alone, and says here how to install the rest."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """Return the command that installs an extra from a checkout."""
    return f"pip install '.[{extra}]'"


def describe_missing(what: str, package: str, extra: str) -> str:
    """Return the message for a part of the project that needs a package which an extra brings."""
    return f"{what} needs {package}, which is not installed. In a checkout, run: {install_command(extra)}"


def missing(what: str, extra: str, error: ImportError) -> ImportError:
    """Return the error for a part of the library whose extra is not installed."""
    return ImportError(describe_missing(what, error.name or "a package", extra))
