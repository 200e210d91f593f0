"""The package as it is installed."""

from __future__ import annotations

import ast
import doctest
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tam

SOURCE = Path(tam.__file__).parents[1]
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.glob("tam/**/*.py")
}
MODULES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name ("" for the module itself) of each import, wherever it stands."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule, "") if submodule in MODULES else (node.module, alias.name)


def test_no_import_cycle() -> None:
    graph = {module: {other for other, _ in imports(module)} for module in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules of a cycle


def attribute_names(module: str) -> tuple[set[str], list[str], list[str]]:
    """Return the names a module defines, those it uses of other objects, and those it writes onto them."""
    defined: set[str] = set()
    used, written = [name for other, name in imports(module) if other in MODULES], []
    for node in ast.walk(MODULES[module]):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(ast.Name("self" | "cls") | ast.Call(ast.Name("super")), name):
                defined.add(name)
            case ast.Attribute(_, name, ast.Store()):
                written.append(name)
            case ast.Attribute(_, name):
                used.append(name)
            case ast.Call(ast.Name("getattr" | "hasattr" | "setattr"), [_, ast.Constant(str(name)), *_]):
                used.append(name)
    return defined, used, written


def test_modules_keep_to_public_names() -> None:
    names = {module: attribute_names(module) for module in MODULES}
    # Private names of torch are left out, unless the library writes them.
    private = {
        name
        for defined, _, written in names.values()
        for name in (*defined, *written)
        if name.startswith("_") and not name.startswith("__")
    }
    reaches = [
        f"{module}: {name}"
        for module, (defined, used, written) in names.items()
        for name in [*(name for name in used if name not in defined), *written]
        if name in private
    ]
    assert len(reaches) <= 5, "\n".join(reaches)


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


def test_it_can_be_imported_where_processes_do_not_fork() -> None:
    code = "import os, torch; del os.register_at_fork; import tam; print(tam.available_kernels()['cpu'])"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_typed_and_has_a_version() -> None:
    assert (Path(tam.__file__).parent / "py.typed").exists()
    assert tam.__version__.count(".") == 2
    assert all(hasattr(tam, name) for name in tam.__all__)


def test_the_citation_is_of_this_version() -> None:
    citation = (SOURCE.parent / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {tam.__version__}\n" in citation


@pytest.mark.parametrize("name", [name for name, path in FILES.items() if ">>> " in path.read_text("utf-8")])
def test_examples_in_docstrings_run(name: str) -> None:
    module = pytest.importorskip(name, exc_type=ImportError)  # an extra may be missing
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


def test_the_sdist_has_all_that_git_tracks(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    root = SOURCE.parent
    try:
        listing = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no git")
    tracked = {name for name in listing.stdout.splitlines() if not name.startswith(".")}
    if not tracked:
        pytest.skip("this is no checkout")
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=root, capture_output=True, check=True)
    (sources,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    included = set(sources.read_text(encoding="utf-8").splitlines())
    assert sorted(tracked - included) == []


def test_parts_with_extras_are_imported_when_asked_for() -> None:
    code = "import sys, tam; assert 'jax' not in sys.modules; tam.optax.tam; tam.integrations.readings"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'optix'"):
        tam.optix  # type: ignore[attr-defined]  # noqa: B018


def test_a_removed_module_names_its_successor() -> None:
    with pytest.raises(AttributeError, match=r"use tam\.available_kernels\(\)"):
        tam.kernels  # type: ignore[attr-defined]  # noqa: B018
