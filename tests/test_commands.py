"""The commands that pages and messages name exist: extras, targets of make, scripts and commands of `tam`."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tam.lab.commands.app import COMMANDS
from tam.lab.core.registry import experiment_names, import_packages
from tam.lab.core.toml import read_toml

ROOT = Path(__file__).parents[1]
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "examples/*.ipynb",
    "src/tam/**/*.py",
    "src/tam/**/*.toml",
    "src/tam/**/*.j2",
)
TEXTS = {
    path: path.read_text(encoding="utf-8") for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))
}
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "results" / "registered.md"}  # they name what is no more
EXTRAS = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
OTHER_PACKAGES = {
    "jsonargparse[signatures]",
    "sentence-transformers",
    "torch",
    "triton",
}  # that are on PyPI, which ours is not


def code(text: str) -> Iterator[str]:
    """Yield the spans and the lines of code of a page."""
    yield from re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", text)


def found(pattern: str) -> list[tuple[str, str]]:
    """Return where a pattern is in the code of the pages, and what its group matches."""
    return sorted(
        {
            (str(path.relative_to(ROOT)), match)
            for path, text in TEXTS.items()
            if path not in HISTORY
            for line in code(text)
            for match in re.findall(pattern, line)
        }
    )


def requirements() -> Iterator[tuple[str, str]]:
    """Yield where `pip install` is in the pages and sources, and each thing that it installs."""
    for path, text in TEXTS.items():
        for arguments in re.findall(r"pip install ([^`\n#|;)]+)", text):
            words = re.sub(r"--index-url \S+|(?<!\S)-\S+|[\"'\\]", "", arguments).split()
            yield from ((str(path.relative_to(ROOT)), word) for word in words)


@pytest.mark.parametrize("page, requirement", sorted(set(requirements())))
def test_what_pip_installs_exists(page: str, requirement: str) -> None:
    match = re.fullmatch(r"\.(?:\[([\w{},]+)\])?", requirement)
    assert match or requirement in OTHER_PACKAGES
    extras = match[1].split(",") if match and match[1] else []
    assert {extra for extra in extras if extra != "{extra}"} <= set(EXTRAS)


@pytest.mark.parametrize("page, target", found(r"^make ([a-z][a-z-]*)"))
def test_targets_of_make_exist(page: str, target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^\.PHONY:.* {target}\b(?!-)", makefile, re.MULTILINE)


@pytest.mark.parametrize("page, script", found(r"python3? ((?:[\w-]+/)+[\w-]+\.py)"))
def test_scripts_exist(page: str, script: str) -> None:
    assert (ROOT / script).is_file()


@pytest.mark.parametrize("page, command", found(r"tam lab ([a-z]+(?: [a-z_]+)?)"))
def test_commands_of_the_lab_exist(page: str, command: str) -> None:
    commands = [*COMMANDS]
    for package in import_packages().values():
        commands += getattr(package, "COMMANDS", {})
    first, _, second = command.partition(" ")
    assert first in {known.partition(" ")[0] for known in commands}
    if first in ("run", "list") and second:
        assert second in {*experiment_names(), "regression"}  # the example of CONTRIBUTING.md
    if first in ("data", "paper") and second:
        assert command in commands


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["compat", "dist", "docs", "install", "sanitize", "test"])
def test_make_works_in_a_folder_with_a_space(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "setup.py", "docs", "src"):
        (folder / name).symlink_to(ROOT / name)
    run = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True)
    words = [word for word in shlex.split(run.stdout, comments=True) if str(tmp_path) in word]
    assert [word for word in words if str(folder) not in word] == []
