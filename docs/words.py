"""Report the files whose prose has many stumbling words or long sentences.

    python docs/words.py                  one line per file over a limit
    python docs/words.py CHANGELOG.md     also each stumbling word and each long sentence of these files

The prose of a Markdown file is its text without code, tables and formulas. The prose of a Python file is its
docstrings and comments.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Not results/, whose reports are generated. Not what cannot change: what is registered, and a text of others.
FILES = ("*.md", ".github/**/*.md", "benchmarks/**/*.md", "docs/**/*.md", "src/**/*.py")
EXCEPT = ("CODE_OF_CONDUCT.md", "docs/results/registered.md")

PER_THOUSAND = 1.5  # stumbling words
PER_CENT = 4.0  # long sentences
LONG = 30  # words

# Words that readers of English as a second language stumble over, and what to write.
INSTEAD = {
    "anew|henceforth|hitherto|ere|lest": "again, from now on, until now, before, so ... not",
    "arms?": "variant",
    "aught|nought|nowhere": "anything, nothing, in no ...",
    "as it were|as (?:it|they) may|be it|has it|such as it": "a plain statement",
    "beside": "next to, compared with",
    "(?:is|are|not) to be": "must be, can be",
    "goes on|go on|went on": "continues, continued",
    "hence|moreover|thereby|thereof|thus|upon": "so, also, by it, of it, on",
    "alike|likewise": "in the same way, too",
    "of (?:its|their) own": "its own, separate",
    "so that": "so",
    "told": "said, distinguished",
    "whatever|whichever|wherein|wherever": "any, every, in which",
    "(?:entry|figure|file|folder|line|one|page|row|scalar|table|value) an? "
    "(?:epoch|group|model|parameter|run|seed|segment|size|step|tensor|trial)": "one line per epoch",
}
STUMBLING = re.compile("|".join(rf"\b({words})\b" for words in INSTEAD), re.IGNORECASE)


@dataclass(frozen=True)
class Counts:
    """The words and sentences of a text."""

    words: int
    stumbling: list[str]  # each with what to write instead
    sentences: int
    long: list[str]

    @property
    def per_thousand(self) -> float:
        return 1000 * len(self.stumbling) / max(self.words, 1)

    @property
    def per_cent(self) -> float:
        return 100 * len(self.long) / max(self.sentences, 1)

    @property
    def is_over(self) -> bool:
        return self.per_thousand > PER_THOUSAND or self.per_cent > PER_CENT


def prose_of_markdown(text: str) -> str:
    """Return the text without code, tables, formulas, comments and addresses of links."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$|<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(?: {4,}(?![-*\d]).*| *\|.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`|\$[^$]*\$", "X", text)


def prose_of_python(source: str) -> str:
    """Return the docstrings and comments of a module, without examples."""
    nodes = ast.walk(ast.parse(source))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = "\n\n".join(ast.get_docstring(x) or "" for x in nodes if isinstance(x, documented))
    docstrings = re.sub(r"^ *(?:>>>|\.\.\.) .*$", "", docstrings, flags=re.MULTILINE)
    docstrings = re.sub(r"^ *(\w+: )", r"\n\1", docstrings, flags=re.MULTILINE)  # the items of Args
    docstrings = re.sub(r"^ {8,}", "", docstrings, flags=re.MULTILINE)  # and their other lines
    comments = [re.search(r"^(.*?)(?:^|\s)# (.*)", line) for line in source.splitlines()]
    lines = ["" if c is None else c[2] if not c[1].strip() else f"\n{c[2]}\n" for c in comments]
    return prose_of_markdown("\n".join([docstrings, "", *lines]))


def split_sentences(prose: str) -> Iterator[str]:
    """Yield the sentences of at least three words. List items and headings are sentences, too."""
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n#+ .*", f"\n{prose}"):
        for sentence in re.split(r"(?<=[.!?]) |(?<=[:;]) (?=[A-Z*\"(])", " ".join(block.split())):
            if len(sentence.split()) >= 3:
                yield sentence


def count(prose: str) -> Counts:
    """Count the words and sentences of a text."""
    instead = list(INSTEAD.values())
    matches = STUMBLING.finditer(" ".join(prose.split()))
    stumbling = [f'"{match[0]}": {instead[(match.lastindex or 1) - 1]}' for match in matches]
    sentences = list(split_sentences(prose))
    long = [sentence for sentence in sentences if len(sentence.split()) > LONG]
    return Counts(len(re.findall(r"[A-Za-z']+", prose)), stumbling, len(sentences), long)


def list_files() -> list[str]:
    """Return the files of the repository that people read, relative to its folder."""
    found = sorted(path.relative_to(ROOT).as_posix() for pattern in FILES for path in ROOT.glob(pattern))
    return [name for name in found if name not in EXCEPT]


def main(names: list[str]) -> None:
    """Print one line per file over a limit; for named files also what is over it."""
    over, total = 0, [0, 0, 0, 0]
    for name in names or list_files():
        path = Path(name) if names else ROOT / name
        text = path.read_text(encoding="utf-8")
        counts = count(prose_of_python(text) if path.suffix == ".py" else prose_of_markdown(text))
        over += counts.is_over
        sizes = counts.words, len(counts.stumbling), counts.sentences, len(counts.long)
        total = [sum(pair) for pair in zip(total, sizes, strict=True)]
        if names or counts.is_over:
            share = f"{counts.per_cent:.1f} % long sentences"
            print(f"{name}: {counts.per_thousand:.1f} stumbling words per 1000, {share}")
        long = [f"{len(sentence.split())} words: {sentence}" for sentence in counts.long]
        for line in [*counts.stumbling, *long] if names else []:
            print(f"  {line}")
    words, stumbling, sentences, long_ones = total
    rates = f"{1000 * stumbling / max(words, 1):.1f} stumbling words per 1000"
    print(f"all: {rates}, {100 * long_ones / max(sentences, 1):.1f} % long sentences, {words} words")
    print(f"files over {PER_THOUSAND} stumbling words per 1000 or {PER_CENT:g} % long sentences: {over}")


if __name__ == "__main__":
    main(sys.argv[1:])
