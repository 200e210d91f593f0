"""docs/results/: what the script computes from the packed results, and short enough."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("findings", ROOT / "results" / "findings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_those_that_the_script_writes(script: ModuleType) -> None:
    for path, content in script.build().items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name} is out of date: run `make findings`"


def test_findings_are_one_short_page() -> None:
    text = (ROOT / "docs" / "results" / "findings.md").read_text(encoding="utf-8")
    prose = re.sub(r"\]\([^)]*\)|^\| ---.*$", "]", text, flags=re.MULTILINE)
    assert len([word for word in prose.split() if re.search(r"\w", word)]) <= 900


def test_the_readme_has_the_figures_of_the_claim_table() -> None:
    path = ROOT / "docs" / "results" / "claims" / "claims.json"
    claims = json.loads(path.read_text(encoding="utf-8"))["claims"]
    (runtime,) = (one for one in claims if one["number"] == 11)
    (part,) = (one for one in runtime["parts"] if one["label"] == "8 x 512 tokens")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\", "")
    assert f"{part['text']}, {part['label']} | {part['estimate']['n']} runs | H200 |" in readme
    (memory,) = (one for one in claims if one["number"] == 22)
    assert memory["ours"] == "4 and 4 bytes more" and "and 4 bytes |" in readme
