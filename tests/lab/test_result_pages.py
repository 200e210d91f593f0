"""docs/results/: every command there exists, with its options, and can be planned."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tam.lab.core.registry import experiment_names, get_experiment
from tests.lab.commands.helpers import tam_lab

DOCS = Path(__file__).parents[2] / "docs" / "results"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.name != "registered.md"]
COMMAND = re.compile(r"\btam lab ((?:[a-z]+|COMMAND|NAME)\b[^`#\n]*)")
OWN_OPTIONS = ("--encoder", "--model", "--checkpoint")  # they need a folder with a model


def commands() -> Iterator[tuple[str, ...]]:
    """Return the words of every command on the pages, each once."""
    pages = (page.read_text(encoding="utf-8").replace("\\\n", "") for page in PAGES)
    seen = {tuple(shlex.split(text)) for page in pages for text in COMMAND.findall(page)}
    yield from sorted(words for words in seen if "COMMAND" not in words and "NAME" not in words)


RUNS = [words for words in commands() if words[0] == "run" and len(words) > 1]
OTHERS = [words for words in commands() if words[0] != "run"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_tables_and_code_fit_their_page(page: Path) -> None:
    lines = ["", *page.read_text(encoding="utf-8").splitlines()]
    for before, line in pairwise(lines):
        assert not line.startswith("|") or before.startswith("|") or not before, line  # else it is no table
        assert not line.startswith("    ") or len(line) <= 92, line


def test_every_experiment_is_run_on_its_page() -> None:
    assert {words[1] for words in RUNS if "smoke" in words} >= {"images", "online", "pretrain"}
    assert {words[1] for words in RUNS} == {*experiment_names()}


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_run_can_be_planned(words: tuple[str, ...], tmp_path: Path) -> None:
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word in OWN_OPTIONS:
            assert word.removeprefix("--") in {one.name for one in get_experiment(words[1]).options}
            rest.pop(0)
        else:
            kept.append(word)
    places = {
        "DATA": tmp_path / "data",
        "data": tmp_path / "data",
        "OUT": tmp_path / "out",
        "lab": tmp_path / "out",
    }
    code, output = tam_lab(*(places.get(word, word) for word in kept), "--device", "cpu", "--dry-run")
    assert code == 0 and re.search(r": \d+ trials now", output), output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_other_commands_have_their_options(words: tuple[str, ...]) -> None:
    groups = {"data": 2, "paper": 2}
    code, output = tam_lab(*words[: groups.get(words[0], 1)], "--help")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    for word in words:
        assert not word.startswith("-") or re.search(rf"(?<!\S){re.escape(word)}(?!\S)", plain), word
