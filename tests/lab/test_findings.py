"""docs/results/: what the script computes from the packed results, and short enough."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tam.lab.core.registry import experiment_names
from tam.lab.report.evidence import Evidence

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "results")
        yield importlib.import_module("findings")


def test_pages_are_those_that_the_script_writes(script: ModuleType) -> None:
    pages = script.build()
    for path, content in pages.items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name} is out of date: run `make findings`"
    templates = {path.with_suffix("") for path in DOCS.rglob("*.md.j2")}
    assert templates <= pages.keys()


def test_every_experiment_has_a_page(script: ModuleType) -> None:
    pages = importlib.import_module("experiment_pages").PAGES
    assert sorted(name for names in pages.values() for name in names) == experiment_names()
    index = (DOCS / "experiments" / "index.md").read_text(encoding="utf-8")
    for name in pages:
        assert (DOCS / "experiments" / f"{name}.md").exists() and f"| [{name}]({name}.md) |" in index


def test_a_sentence_that_the_results_do_not_bear_out_is_an_error(script: ModuleType) -> None:
    figures = importlib.import_module("figures").Figures(Evidence(), [])
    assert figures.check(True) == ""
    with pytest.raises(ValueError, match="do not bear out"):
        figures.check(False)
    with pytest.raises(KeyError):
        figures.estimate("online/registered/claim13-80", "TAM", "SGDM")


def test_findings_are_one_short_page() -> None:
    text = (DOCS / "findings.md").read_text(encoding="utf-8")
    prose = re.sub(r"\]\([^)]*\)|^\| ---.*$", "]", text, flags=re.MULTILINE)
    assert len([word for word in prose.split() if re.search(r"\w", word)]) <= 900


def test_the_readme_has_the_figures_of_the_claim_table() -> None:
    path = DOCS / "claims" / "claims.json"
    claims = json.loads(path.read_text(encoding="utf-8"))["claims"]
    (runtime,) = (one for one in claims if one["number"] == 11)
    (part,) = (one for one in runtime["parts"] if one["label"] == "8 x 512 tokens")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\", "")
    assert f"{part['text']}, {part['label']} | {part['estimate']['n']} runs | H200 |" in readme
    (memory,) = (one for one in claims if one["number"] == 22)
    assert memory["ours"] == "4 and 4 bytes more" and "and 4 bytes |" in readme


def test_the_rows_that_the_readme_links_to_bear_it_out() -> None:
    """It says that nothing helps, and that no hypothesis holds. The page of findings checks the figures."""
    stored = json.loads((DOCS / "claims" / "claims.json").read_text(encoding="utf-8"))
    verdicts = {f"claim-{one['number']}": one["verdict"] for one in stored["claims"] if not one["stands_for"]}
    verdicts |= {one["number"].lower(): one["verdict"] for one in stored["hypotheses"]}
    linked = re.findall(r"claims\.md#([\w-]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(linked) == {"claim-13", "claim-14", "claim-19", "claim-20", "controls", "h5", "h6", "h8"}
    refuted = ("claim-13", "claim-14", "claim-19", "claim-20", "h5", "h8")
    assert all(verdicts[name] == "does not hold" for name in refuted)
    assert all(one["verdict"] != "holds" for one in stored["hypotheses"])
