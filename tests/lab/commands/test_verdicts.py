"""`tam lab verdicts`: the published results, deterministic pages, and bad input that is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markupsafe import escape

from tam.lab.core.results import PACKED_FILE, pack
from tam.lab.report.verdicts import VERDICTS
from tests.lab.commands.helpers import tam_lab

RESULTS = Path(__file__).parents[3] / "results"
FILES = {"claims.md", "claims.html", "claims.json", "forest.svg", "lr.svg"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("claims")
    code, output = tam_lab("verdicts", RESULTS, "-o", out)
    assert code == 0, output
    return out


def test_published_results_give_a_verdict_on_every_claim(pages: Path) -> None:
    assert {path.name for path in pages.iterdir()} == FILES
    claims = json.loads((pages / "claims.json").read_text())["claims"]
    assert sorted(one["number"] for one in claims if one["counts"]) == list(range(1, 23))
    assert {one["verdict"] for one in claims} <= set(VERDICTS)
    assert all(len(one["why"].split()) <= 8 for one in claims)
    order = [VERDICTS.index(one["verdict"]) for one in claims]
    assert order == sorted(order)


def test_figures_that_were_published_before(pages: Path) -> None:
    """Compare with the table that was written by hand into registered.md, at the same n."""
    claims = json.loads((pages / "claims.json").read_text())["claims"]
    parts = {(one["number"], part["label"]): part for one in claims for part in one["parts"]}
    assert parts[11, "8 x 512 tokens"]["text"] == "1.006 [0.984, 1.028]"
    assert parts[13, "2 layers, 100 %, against SGDM"]["text"] == "-1.14 [-1.59, -0.69] points"
    assert parts[14, "4 layers, 80 %, like SGD"]["text"] == "-0.72 [-0.76, -0.68] points"
    assert parts[14, "4 layers, 100 %, SGD against SGDM"]["verdict"] == "holds"
    assert parts[23, "4 layers, 40 %, lr 0.02 and 0.01"]["verdict"] == "undecided"


def test_the_pages_agree(pages: Path) -> None:
    claims = json.loads((pages / "claims.json").read_text())
    markdown, page = ((pages / name).read_text() for name in ("claims.md", "claims.html"))
    assert claims["headline"] in markdown and claims["headline"] in page
    counts = [int(number) for number in re.findall(r"\d+", claims["headline"])]
    assert counts[0] == 22 == sum(counts[1:])
    for name in ("forest.svg", "lr.svg"):
        root = ElementTree.fromstring((pages / name).read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    headings = "## Beyond the paper|## All parts|## Controls"
    first, beyond, parts, controls = (
        [line for line in text.splitlines() if line.startswith("| ")][2:]
        for text in re.split(headings, markdown)
    )
    assert len(first) == len(claims["claims"])
    assert len(beyond) == len(claims["hypotheses"]) == 8
    compared = [
        one for claim in claims["claims"] for one in claim["parts"] if one["estimate"] or one["pilot"]
    ]
    assert len(parts) == len(compared)
    run = {(claim["number"], name, one["mean"]) for claim in claims["claims"] for part in claim["parts"]
           for name, one in part["controls"].items()}  # fmt: skip
    assert len(controls) == len(run) and all(escape(name) in page for _, name, _ in run)


def test_the_verdict_is_next_to_the_claim(pages: Path) -> None:
    """A narrow screen shows the first columns of a table; the others scroll."""
    verdicts = [one["verdict"] for one in json.loads((pages / "claims.json").read_text())["claims"]]
    markdown, page = ((pages / name).read_text() for name in ("claims.md", "claims.html"))
    rows = [line.split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    assert [row[2] for row in rows if row[2] != "---"][1 : len(verdicts) + 1] == verdicts
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td.*?</tr>", page)]
    assert [row[2] for row in cells][: len(verdicts)] == verdicts
    scrolled = re.findall(r'<div class="table[^>]*>', page)
    assert scrolled and all('tabindex="0"' in one for one in scrolled)  # for the arrow keys


def test_links_lead_to_sections_of_reports(pages: Path) -> None:
    links = re.findall(r"\]\(([^)#]*report\.md)#([^)]*)\)", (pages / "claims.md").read_text())
    assert len(links) >= 5
    for path, anchor in links:
        assert f'<a id="{anchor}"></a>' in (pages / path).read_text(encoding="utf-8")


def test_pages_are_deterministic(pages: Path, tmp_path: Path) -> None:
    """The order in which results are given makes no difference."""
    folders = sorted((path.parent for path in RESULTS.rglob(PACKED_FILE)), reverse=True)
    out = tmp_path / "claims"
    assert tam_lab("verdicts", *folders, "-o", out)[0] == 0
    for name in ("claims.json", "forest.svg", "lr.svg"):
        assert (out / name).read_bytes() == (pages / name).read_bytes()


def test_missing_results_are_not_tested(folder: Path, tmp_path: Path) -> None:
    code, output = tam_lab("verdicts", folder, "-o", tmp_path / "claims")
    assert code == 0, output
    claims = json.loads((tmp_path / "claims" / "claims.json").read_text())["claims"]
    assert {one["verdict"] for one in claims if one["number"] in (1, 13, 19)} == {"not tested"}


def test_an_unknown_metric_is_named(tmp_path: Path) -> None:
    claims = tmp_path / "claims.toml"
    declared = (CLAIM + PART).replace("images/digits", "online/claim14-80").replace("validation", "wealth")
    claims.write_text(declared)
    results = RESULTS / "registered" / "online"
    code, output = tam_lab("verdicts", results, "--claims", claims, "-o", tmp_path / "out")
    assert code != 0 and "'wealth'" in output and not (tmp_path / "out").exists()


def test_two_results_of_one_trial_are_named(folder: Path, tmp_path: Path) -> None:
    copy, out = tmp_path / "copy", tmp_path / "claims"
    shutil.copytree(folder, copy)
    pack([folder], tmp_path / PACKED_FILE)
    assert tam_lab("verdicts", folder, tmp_path / PACKED_FILE, "-o", out)[0] == 0  # the same results
    shutil.rmtree(out)
    path = next(iter(sorted(copy.glob("trials/*/result.json"))))
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "validation": 12.5}))
    code, output = tam_lab("verdicts", folder, copy, "-o", out)
    assert code != 0 and path.parent.name in output and str(copy) in output
    path.write_text(json.dumps(result))
    metrics = path.with_name("metrics.jsonl")
    metrics.write_text(metrics.read_text().replace('"validation": ', '"validation": 1'))
    code, output = tam_lab("verdicts", folder, copy, "-o", out)
    assert code != 0 and path.parent.name in output and str(copy) in output
    assert not out.exists()


def test_damaged_results_are_named(folder: Path, tmp_path: Path) -> None:
    copy, out = tmp_path / "copy", tmp_path / "claims"
    shutil.copytree(folder, copy)
    path = next(iter(sorted(copy.glob("trials/*/result.json"))))
    path.write_text("{")
    code, output = tam_lab("verdicts", copy, "-o", out)
    assert code == 0 and path.parent.name in output
    assert path.parent.name in (out / "claims.md").read_text()


def test_a_folder_without_results(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        code, output = tam_lab("verdicts", tmp_path / name, "-o", tmp_path / "claims")
        assert code != 0 and str(tmp_path / name) in output
    assert not (tmp_path / "claims").exists()


CLAIM = '[[claim]]\nnumber = 1\nclaim = "c"\nsection = "s"\nlink = ""\npaper = "p"\n'
PART = """[[claim.part]]
rule = "superiority"
label = "l"
study = "images/digits"
variant = "TAM"
against = "SGDM"
gate = false
outcome = { result = ["validation"] }
margin = 0.5
n = 5
"""


@pytest.mark.parametrize(
    "old, new, named",
    [
        ("images/", "imagos/", "'imagos'"),
        ("result =", "rezult =", "'rezult'"),
        ("margin = 0.5", "margin = 0.0", "margin"),
        ("margin = 0.5", 'margin = "wide"', "'wide'"),
        ("superiority", "magic", "'magic'"),
        ("n = 5", "n = 1", "n at least 2"),
        ("margin = 0.5", "margin = inf", "margin"),
        ('label = "l"', "label = 3", "label"),
        ("n = 5", 'n = 5\neffect = "a"', "effect"),
        ("gate = false\n", "", "needs controls"),
        ('against = "SGDM"\n', "", "needs `against`"),
        ("n = 5", 'n = 5\npilot = "images/x"', "3 parts"),
        ("n = 5", 'n = 5\nequal_lr = "images/x/y|TAM"', "equal_lr"),
        ('["validation"]', '"validation"', "wrong type"),
        ("[[claim]]", '[picture]\nsource = "a"\n[[claim]]', "picture"),
        ('rule = "superiority"', 'rule = "computed"\ncomputed = "runtime/nothing"', "'runtime/nothing'"),
        ("variant", "varient", "'varient'"),
        (PART, "", "missing"),
        (CLAIM, "[[claim", "claims.toml"),
    ],
)
def test_a_bad_claim_file(folder: Path, tmp_path: Path, old: str, new: str, named: str) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(CLAIM + PART)
    assert tam_lab("verdicts", folder, "--claims", path, "-o", tmp_path / "good")[0] == 0
    path.write_text((CLAIM + PART).replace(old, new))
    code, output = tam_lab("verdicts", folder, "--claims", path, "-o", tmp_path / "out")
    assert code != 0 and named in output and str(path) in output
    assert not (tmp_path / "out").exists()
