"""docs/words.py counts what it says, on small texts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "words.py"
SPEC = importlib.util.spec_from_file_location("words", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
words = importlib.util.module_from_spec(SPEC)
sys.modules["words"] = words  # dataclasses look their module up
SPEC.loader.exec_module(words)

LONG = "The step " + "very " * 30 + "slowly ends."
CODE = '''
"""The module is told apart."""

x = "told"  # whatever it is


def step(p):
    """Take a step.

    Args:
        p: a parameter, which the step
            moves thus

    Example:
        >>> told = 1
    """
    # Two lines of one
    # comment.
'''


def test_words_sentences_and_stumbling_words_are_counted() -> None:
    counts = words.count(
        "Thus it has one entry a parameter. It stops so\nthat you can look. Is it? Yes: It is good."
    )
    assert (counts.words, counts.sentences) == (20, 3)
    assert [hit.split(":")[0] for hit in counts.stumbling] == ['"Thus"', '"entry a parameter"', '"so that"']
    assert counts.long == [] and counts.is_over


@pytest.mark.parametrize("text", ["Thursday, an armchair, a page about a step, toldo", "The result is good."])
def test_other_words_do_not_stumble(text: str) -> None:
    assert words.count(text).stumbling == []


def test_a_long_sentence_has_more_than_thirty_words() -> None:
    thirty = " ".join(["word"] * 30)
    counts = words.count(f"{thirty}. One {thirty}.")
    assert (counts.sentences, len(counts.long), counts.per_cent) == (2, 1, 50)


def test_list_items_and_headings_end_a_sentence() -> None:
    half = " ".join(["word"] * 20)
    counts = words.count(f"# A short heading\n{half}\n- {half}\n- {half}\n\n{half}")
    assert counts.long == [] and counts.sentences == 4


def test_code_tables_formulas_and_addresses_are_no_prose() -> None:
    page = (
        "Plain `told` text.\n\n```python\ntold = 1\n```\n\n    told\n\n| told | thus |\n\n"
        "See [this page](told.md) and $told$.\n<!-- told -->\n\n- a list\n    - an inner item, told\n"
    )
    prose = words.prose_of_markdown(page)
    assert prose.count("told") == 1 and "inner item, told" in prose and "this page" in prose


def test_the_prose_of_python_is_its_docstrings_and_comments() -> None:
    prose = words.prose_of_python(CODE)
    assert prose.count("told") == 1 and "whatever" in prose and "moves thus" in prose
    sentences = list(words.split_sentences(prose))
    assert "Two lines of one comment." in sentences
    assert "p: a parameter, which the step moves thus" in sentences


def test_named_files_are_reported_in_full_and_never_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.md").write_text("All is well here.")
    (tmp_path / "bad.md").write_text(f"{LONG} It was told.")
    words.main([str(tmp_path / "good.md"), str(tmp_path / "bad.md")])
    out = capsys.readouterr().out
    assert "good.md: 0.0 stumbling words per 1000, 0.0 % long sentences" in out
    assert "bad.md: 27.0 stumbling words per 1000, 50.0 % long sentences" in out
    assert "all: 24.4 stumbling words per 1000, 33.3 % long sentences, 41 words" in out
    assert '"told": said' in out and "34 words: The step very" in out
    assert out.endswith("long sentences: 1\n")


def test_without_names_only_files_over_a_limit_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words.main([])
    *lines, total, last = capsys.readouterr().out.splitlines()
    assert total.startswith("all: ") and int(last.split(": ")[1]) == len(lines)
