"""What MkDocs does not do by itself: pages from outside docs/, their links, formulas, and a link checker."""

from __future__ import annotations

import hashlib
import html
import importlib.util
import logging
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.docs")  # a warning fails the strict build

ROOT = Path(__file__).parents[1]
HOME = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
FOLDERS = {"docs": "", "results": "reports", "benchmarks/results": "benchmarks"}
SUFFIXES = {".md", ".svg", ".png"}

# MkDocs Material would load this file from a CDN. The package mermaidx has mermaid's own 11.16.0.
MERMAID = "assets/mermaid.js"
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"


# ------------------------------------------------------------------ pages from outside docs/


def site_path(path: str) -> str | None:
    """Return where the site has a file of the repository; None if it does not have it."""
    if path in HOME:
        return HOME[path]
    for folder, target in FOLDERS.items():
        if path.startswith(f"{folder}/") and posixpath.splitext(path)[1] in SUFFIXES:
            return posixpath.join(target, path.removeprefix(f"{folder}/"))
    return None


def outside_files(root: Path) -> list[str]:
    """Return the files of the repository that the site takes from outside docs/."""
    folders = (root / folder for folder in FOLDERS if folder != "docs")
    paths = (path.relative_to(root).as_posix() for folder in folders for path in sorted(folder.rglob("*")))
    return [*HOME, *(path for path in paths if site_path(path))]


def on_config(config: MkDocsConfig) -> None:
    """Add the report of each experiment to the navigation."""
    (results,) = (item["Results"] for item in config.nav or () if "Results" in item)
    (reports,) = (item["Reports"] for item in results if "Reports" in item)
    for path in outside_files(ROOT):
        folder, name = posixpath.split(path)
        if name == "report.md":
            reports.append({folder.removeprefix("results/"): site_path(path)})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files from outside docs/, and mermaid."""
    from mkdocs.structure.files import File

    for path in outside_files(ROOT):
        target = site_path(path)
        assert target is not None
        files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, MERMAID, abs_src_path=str(find_mermaid())))


def find_mermaid() -> Path:
    """Return the path of the installed mermaid.js; raise if it is not the file we expect."""
    spec = importlib.util.find_spec("mermaidx")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("mermaidx is not installed: use `make docs`")
    path = Path(spec.origin).parent / "assets" / "mermaid.js"
    if hashlib.sha256(path.read_bytes()).hexdigest() != MERMAID_SHA256:
        raise ValueError(f"{path} is not mermaid 11.16.0: install the version in docs/requirements.txt")
    return path


# ------------------------------------------------------------------ links between pages

# Code blocks and code spans come first, because a link inside them is not a link.
_LINK = re.compile(
    r"""(?P<code> ^[ ]*(?P<fence>`{3,}|~{3,}).*?^[ ]*(?P=fence)[ ]*$
                | (?<!`)(?P<tick>`+)(?!`).*?(?<!`)(?P=tick)(?!`) )
      | (?P<image>!?)\[(?P<text>(?:[^][]|\[[^][]*\])*)\]\((?P<target>[^()\s]+)(?P<title>[^()]*)\)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


def rewrite_links(markdown: str, source: str, root: Path = ROOT) -> str:
    """Return a page of the repository with its relative links as they are on the site.

    A link to a file that the site does not have becomes its text and the file's path as code. A link to
    nothing, to a hidden folder or out of the repository stays, and fails the build.

    Args:
        markdown: the page
        source: its path in the repository
        root: the folder of the repository
    """
    page = site_path(source)
    assert page is not None, source

    def rewrite(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        text = _LINK.sub(rewrite, match["text"])
        target, hash_, anchor = match["target"].partition("#")
        try:
            scheme = urlsplit(target).scheme
        except ValueError as error:  # MkDocs would raise it, too, without the address
            raise ValueError(f"{source}: malformed address {target}: {error}") from error
        if not target or scheme:
            return f"{match['image']}[{text}]({match['target']}{match['title']})"
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(target)))
        place = site_path(path)
        is_outside = path.startswith("/") or any(part.startswith(".") for part in path.split("/"))
        if place is None and not is_outside and (root / path).exists():
            return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
        target = target if place is None else posixpath.relpath(place, posixpath.dirname(page))
        return f"{match['image']}[{text}]({target}{hash_}{anchor}{match['title']})"

    return _LINK.sub(rewrite, markdown)


_ITEM = re.compile(r"([-*+]|\d+\.) {1,4}")


def adapt_lists(markdown: str) -> str:
    """Return a page with its lists as Python-Markdown reads them.

    In a checkout's viewers, lines belong to a list item if they start where its text starts, and a list can
    follow a paragraph without a blank line. Python-Markdown needs 4 spaces per level and the blank line.
    """
    lines: list[str] = []
    starts: list[int] = []  # the columns where the texts of the open items start
    fence, shift, depth = "", 0, 0
    begins_block, after_paragraph = True, False
    for line in markdown.split("\n"):
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        if fence:
            if text.rstrip() == fence:
                fence, begins_block = "", True
        elif not text:
            begins_block, after_paragraph = True, False
        else:
            outer = [start for start in starts if start <= indent]
            extra = indent - (outer[-1] if outer else 0)
            item = _ITEM.match(text) if extra < 4 else None  # with more, it is code
            opening = re.match("`{3,}|~{3,}", text)
            if item or opening or begins_block:
                starts = [*outer, indent + len(item[0])] if item else outer
                shift = 4 * len(outer) + (0 if item else extra) - indent
            if item and (after_paragraph or len(outer) < depth):
                lines.append("")
                begins_block = True
            if begins_block:
                depth = len(outer)
            if item or begins_block:
                after_paragraph = not item
            fence, begins_block = opening[0] if opening else "", False
        lines.append(" " * (indent + shift if indent else 0) + text)
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links and lists of a page."""
    assert page.file.abs_src_path is not None
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    return adapt_lists(rewrite_links(markdown, source))


# ------------------------------------------------------------------ formulas and diagrams

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn LaTeX into MathML, which browsers show without a script, and load mermaid where it is needed."""
    from math_core import LatexError, LatexToMathML
    from mkdocs.utils import get_relative_url

    converter = LatexToMathML()

    def to_mathml(match: re.Match[str]) -> str:
        latex, is_block = html.unescape(match[2]), match[1] == "div"
        try:
            mathml = converter.convert_with_local_state(latex, displaystyle=is_block)
        except LatexError as error:
            reason = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().partition("\n")[0]  # without colours
            log.warning("%s: cannot render the formula %s: %s", page.file.src_uri, latex, reason)
            return match[0]
        return f'<{match[1]} class="formula">{mathml}</{match[1]}>'

    content = _FORMULA.sub(to_mathml, content)
    if '<pre class="mermaid">' in content:
        content += f'<script src="{get_relative_url(MERMAID, page.url)}"></script>'
    return content


# ------------------------------------------------------------------ the link checker

# A site can be in a folder of its server, and a link must not leave it. No link has these characters.
SITE = "/<site>/"


_CANDIDATE = re.compile(r"[\s,]*(\S*[^\s,])[^,]*")  # of a srcset: an address and, after a space, its size


class _Links(HTMLParser):
    """The anchors of a page, and the addresses that it refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif name in ("href", "src", "poster") or (tag, name) == ("object", "data"):
                self.targets.append(value or "")
            elif name == "srcset":
                self.targets += _CANDIDATE.findall(value or "")


def dead_links(site: Path) -> dict[str, list[str]]:
    """Return the addresses within a built site that lead nowhere, and the pages that have them.

    Args:
        site: the folder with the site
    """
    pages = {
        path.relative_to(site).as_posix(): _Links(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    dead: dict[str, list[str]] = {}
    for name, page in pages.items():
        # The server shows 404.html for any address, so its links start at the top of the site.
        top = "/" if name == "404.html" else SITE
        for target in page.targets:
            try:
                parts = urlsplit(target)
            except ValueError:  # for example, http://[bad
                dead.setdefault(target, []).append(name)
                continue
            if parts.scheme or parts.netloc:
                continue
            address = urlsplit(urljoin(f"{top}{name}", target)).path
            if not address.startswith(top):
                dead.setdefault(target, []).append(name)
                continue
            path = unquote(address.removeprefix(top))
            if path == "" or path.endswith("/"):
                path += "index.html"
            anchor = unquote(parts.fragment)
            lacks_anchor = anchor and path in pages and anchor not in {"__top", *pages[path].anchors}
            if not (site / path).is_file() or lacks_anchor:
                dead.setdefault(f"{path}#{anchor}" if anchor else path, []).append(name)
    return dead


def on_post_build(config: MkDocsConfig) -> None:
    """Check the links of the built site."""
    for target, pages in dead_links(Path(config.site_dir)).items():
        others = f" and {len(pages) - 1} more" if len(pages) > 1 else ""
        log.warning("dead link to %s on %s%s", target, pages[0], others)
