"""Optional dependencies: the library needs torch alone, and says which extra brings the rest."""

from __future__ import annotations


def missing(what: str, extra: str, error: ImportError) -> ImportError:
    """Return the error for a part of the library whose extra is not installed."""
    install = f"pip install 'torque-aware-momentum[{extra}]'"
    return ImportError(f"{what} needs {error.name or 'a package'}, which is not installed: {install}")
