"""The errors for the user: which extra a missing package comes with."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import tam
from tam.lab.core.errors import EXTRA_BY_MODULE, LabError, explain_missing, missing_package, require
from tam.lab.core.toml import read_toml

SOURCE = Path(tam.__file__).parent
EXTRAS = read_toml(SOURCE.parents[1] / "pyproject.toml")["project"]["optional-dependencies"]
# Torch, what mteb and transformers need, and what `--encoder` asks for by name.
OTHERS = {"tam", "torch", "datasets", "safetensors", "sentence_transformers"}


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(extra: str) -> Iterator[str]:
    """Yield the distributions of an extra and of the extras it includes."""
    for requirement in EXTRAS[extra]:
        name, _, included = re.match(r"([\w.-]+)(\[([\w,-]+)\])?", requirement).groups(default="")
        if name == "torque-aware-momentum":
            for one in included.split(","):
                yield from distributions(one)
        else:
            yield normalize(name)


@pytest.mark.parametrize("module, extra", EXTRA_BY_MODULE.items())
def test_the_extra_brings_the_module(module: str, extra: str) -> None:
    assert {*map(normalize, packages_distributions().get(module, [module]))} & {*distributions(extra)}


def test_each_package_that_the_lab_imports_has_an_extra() -> None:
    modules = set()
    for path in (*SOURCE.glob("lab/**/*.py"), SOURCE / "cli.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names):
                    modules |= {alias.name.partition(".")[0] for alias in names}
                case ast.ImportFrom(str(name)):
                    modules.add(name.partition(".")[0])
    assert modules - OTHERS - set(sys.stdlib_module_names) <= set(EXTRA_BY_MODULE)


def test_only_a_missing_package_of_an_extra_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    error = explain_missing("the report", ModuleNotFoundError(name="scipy"))
    assert str(error) == str(missing_package("the report", "scipy"))
    assert "pip install '.[lab]'" in str(error)
    demo = explain_missing("the demo", ModuleNotFoundError(name="sklearn"), "demo")
    assert "pip install '.[demo]'" in str(demo)
    for other in (
        ModuleNotFoundError(name="tam.lab.nothing"),
        ModuleNotFoundError(name="jinja2.nothing"),  # jinja2 is installed
        ImportError(name="scipy"),
        ValueError("scipy"),
    ):
        assert explain_missing("the report", other) is None
    require("a score", "torch")
    monkeypatch.setitem(sys.modules, "mteb", None)
    part = explain_missing("a score", ModuleNotFoundError(name="mteb.tasks"))
    assert str(part) == str(missing_package("a score", "mteb"))
    with pytest.raises(LabError, match=r"a score needs mteb, .*pip install '\.\[llm\]'$"):
        require("a score", "torch", "mteb")
