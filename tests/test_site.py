"""The site: links and lists of its pages, the link checker, and what must be in it. MkDocs is not needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.hooks import FOLDERS, HOME, adapt_lists, dead_links, rewrite_links, site_path

import tam

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAV = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2])


@pytest.mark.parametrize(
    "source, markdown, expected",
    [
        ("README.md", "[a](docs/guides/amp.md#b)", "[a](guides/amp.md#b)"),
        ("README.md", "![a](docs/results/claims/lr.svg)", "![a](results/claims/lr.svg)"),
        ("README.md", '[a](CONTRIBUTING.md "title")', '[a](contributing.md "title")'),
        ("docs/guides/amp.md", "[a](../../README.md)", "[a](../index.md)"),
        ("docs/guides/amp.md", "[a](../../results/toy/report.md)", "[a](../reports/toy/report.md)"),
        ("docs/guides/amp.md", "[`a` b](clipping.md)", "[`a` b](clipping.md)"),
        ("results/toy/report.md", "[a](../../docs/results/lab.md)", "[a](../../results/lab.md)"),
        ("benchmarks/results/README.md", "[a](layout-checks.md)", "[a](layout-checks.md)"),
        ("README.md", "[![a](docs/a.svg)](docs/b.md)", "[![a](a.svg)](b.md)"),
        ("README.md", "[a](https://b.org/c.md) [d](#e)", "[a](https://b.org/c.md) [d](#e)"),
    ],
)
def test_links_lead_to_the_same_page_on_the_site(source: str, markdown: str, expected: str) -> None:
    assert rewrite_links(markdown, source) == expected


@pytest.mark.parametrize(
    "markdown, expected",
    [
        ("[the script](../../examples/ddp.py)", "the script (`examples/ddp.py`)"),
        ("[`examples/ddp.py`](../../examples/ddp.py)", "`examples/ddp.py`"),
        ("[ddp.py](../../examples/ddp.py#L3)", "`examples/ddp.py`"),
        ("[a folder](../../results/registered)", "a folder (`results/registered`)"),
    ],
)
def test_a_link_to_a_file_outside_the_site_becomes_code(markdown: str, expected: str) -> None:
    assert rewrite_links(markdown, "docs/guides/distributed.md") == expected


def test_a_link_to_nothing_stays_for_mkdocs_to_report() -> None:
    assert rewrite_links("[a](examples/none.py)", "README.md") == "[a](examples/none.py)"


@pytest.mark.parametrize("target", ["../secret", "../repo/examples", "/etc", ".git/config", "a/../.git", "."])
def test_a_link_out_of_the_repository_stays_for_mkdocs_to_report(tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").touch()
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / ".git" / "config").touch()
    (tmp_path / "repo" / "examples").mkdir()
    link = f"[a]({target})"
    assert rewrite_links("[a](examples)", "README.md", tmp_path / "repo") == "a (`examples`)"
    assert rewrite_links(link, "README.md", tmp_path / "repo") == link


@pytest.mark.parametrize("code", ["`[a](docs/b.md)`", "``[a](docs/b.md) ` ``", "```\n[a](docs/b.md)\n```"])
def test_code_is_left_alone(code: str) -> None:
    markdown = f"{code}\n\n[c](docs/d.md)"
    assert rewrite_links(markdown, "README.md") == f"{code}\n\n[c](d.md)"


@pytest.mark.parametrize(
    "markdown, expected",
    [
        ("- a\n  - b\n    c\n- d", "- a\n    - b\n      c\n- d"),
        ("1. a\n   - b\n     - c\n   - d\n2. e", "1. a\n    - b\n        - c\n    - d\n2. e"),
        ("- a\n  - b\n    - c\n\n      d", "- a\n    - b\n        - c\n\n            d"),
        ("- a\n  1. b\n\n     ```\n     c\n     ```", "- a\n    1. b\n\n        ```\n        c\n        ```"),
        ("- a\n    - b\n        - c", "- a\n    - b\n        - c"),
        ("- a\n\n  - b\n- c", "- a\n\n    - b\n\n- c"),
        ("- a\n\n  b\n  - c\n- d", "- a\n\n    b\n\n    - c\n\n- d"),
        ("- a\n\n      code", "- a\n\n        code"),
        ("    - code", "    - code"),
        ("1. a\n\n   ```\n     b\n   ```\n2. c", "1. a\n\n    ```\n      b\n    ```\n\n2. c"),
        ("a\n- b\n- c", "a\n\n- b\n- c"),
        ("- a\n\n  b\n- c", "- a\n\n    b\n\n- c"),
        ("- a\n\nb\n  c", "- a\n\nb\n  c"),
        ("```\na\n- b\n  - c\n```", "```\na\n- b\n  - c\n```"),
    ],
)
def test_lists_are_as_python_markdown_reads_them(markdown: str, expected: str) -> None:
    assert adapt_lists(markdown) == expected


def test_the_link_checker_finds_dead_links_and_anchors(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "style.css").touch()
    (tmp_path / "index.html").write_text(
        '<link href="style.css"><a href="a/"></a><a href="a/#x"></a><a href="a/#y"></a><a href="b/"></a>'
    )
    (tmp_path / "a" / "index.html").write_text(
        '<p id="x"><a name="z"></a><a href="../a/#z"></a><a href="https://b.org/c#d"></a>'
        '<a href=".."></a><img src="none.svg"><a href="#none"></a>'
    )
    assert dead_links(tmp_path) == {
        "a/none.svg": ["a/index.html"],
        "a/index.html#none": ["a/index.html"],
        "a/index.html#y": ["index.html"],
        "b/index.html": ["index.html"],
    }


def test_a_link_that_leaves_the_site_is_dead(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="../a/"></a><a href="/a/"></a><a href="../site/a/"></a><a href="a/../."></a>'
    )
    (tmp_path / "a" / "index.html").write_text('<a href="../../a/"></a><a href="/"></a><a href="../a/"></a>')
    assert dead_links(tmp_path) == {
        "../a/": ["index.html"],
        "/a/": ["index.html"],
        "../site/a/": ["index.html"],
        "../../a/": ["a/index.html"],
        "/": ["a/index.html"],
    }


def test_links_of_the_404_page_start_at_the_top_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "404.html").write_text('<a href="/."></a><a href="/style.css"></a><a href="/none.css"></a>')
    (tmp_path / "index.html").touch()
    (tmp_path / "style.css").touch()
    assert dead_links(tmp_path) == {"none.css": ["404.html"]}


@pytest.mark.parametrize(
    "element, dead",
    [
        ('<img srcset="a.png, none.png 2x">', ["none.png"]),
        ('<source srcset="none-1.png 1x, none-2.png 640w,a.png">', ["none-1.png", "none-2.png"]),
        ('<img srcset="data:image/png;base64,AAAA 1x, a.png 2x">', []),
        ('<video poster="none.png"></video><video poster="a.png"></video>', ["none.png"]),
        ('<object data="none.svg"></object><object data="a.png"></object>', ["none.svg"]),
    ],
)
def test_the_link_checker_reads_every_attribute_with_an_address(
    tmp_path: Path, element: str, dead: list[str]
) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "index.html").write_text(element)
    assert list(dead_links(tmp_path)) == dead


def test_a_malformed_address_is_reported(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="http://[bad"></a>')
    assert dead_links(tmp_path) == {"http://[bad": ["index.html"]}
    with pytest.raises(ValueError, match=r"README.md: malformed address http://\[bad"):
        rewrite_links("[a](http://[bad)", "README.md")


def test_every_page_of_docs_is_in_the_navigation() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages <= set(NAV)


def test_every_entry_of_the_navigation_has_one_source() -> None:
    pages = [
        page.relative_to(ROOT).as_posix() for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")
    ]
    places = [site_path(page) for page in [*HOME, *pages]]
    assert len(NAV) == len(set(NAV))
    assert [place for place in NAV if places.count(place) != 1] == []


def test_every_public_name_is_in_the_api_reference() -> None:
    text = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    names = [*tam.__all__, "integrations", "optax", "sharding"]
    assert [name for name in names if not re.search(rf"\btam\.{name}\b", text)] == []


def test_examples_in_docstrings_are_recognized() -> None:
    # The API reference renders a section "Examples:" as code, and "Example:" as text.
    files = (ROOT / "src/tam").rglob("*.py")
    assert [file for file in files if re.search(r"^ *Example:$", file.read_text("utf-8"), re.M)] == []
