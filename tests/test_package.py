"""The package as it is installed."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import tam
from tam.optimizers import tam as tam_module


def test_importing_the_library_needs_torch_alone() -> None:
    # Whatever torch itself brings is torch's; nothing else, and never the lab.
    code = (
        "import sys, torch; before = {m.split('.')[0] for m in sys.modules}; import tam; "
        "after = {m.split('.')[0] for m in sys.modules}; "
        "print(*sorted(after - before - set(sys.stdlib_module_names))); "
        "print('tam.lab' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["tam", "False"]


def test_it_is_typed_and_has_a_version() -> None:
    assert (Path(tam.__file__).parent / "py.typed").exists()
    assert tam.__version__.count(".") == 2
    assert all(hasattr(tam, name) for name in tam.__all__)


def test_examples_in_docstrings_run() -> None:
    results = doctest.testmod(tam_module)
    assert results.attempted > 0 and results.failed == 0


def test_parts_with_extras_are_imported_when_asked_for() -> None:
    code = "import sys, tam; assert 'jax' not in sys.modules; tam.optax.tam; tam.integrations.readings"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'optix'"):
        tam.optix  # type: ignore[attr-defined]  # noqa: B018
