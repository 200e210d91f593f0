"""The published results: their reports and results/README.md are what `make results` writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tam.lab.core.results import PACKED_FILE
from tam.lab.core.selection import load_groups
from tam.lab.report import build_report, render_html, render_markdown
from tam.lab.report.model import Tally
from tests.lab.report.results import looks_of

RESULTS = Path(__file__).parents[3] / "results"
STORED = [path.parent for path in sorted(RESULTS.rglob("report.md"))]
REGISTERED = [path.parent for path in sorted((RESULTS / "registered").rglob(PACKED_FILE))]


def name_of(folder: Path) -> str:
    return folder.relative_to(RESULTS).as_posix()


def last_column(folder: Path) -> str:
    """Return what results/README.md says about the comparisons of a folder."""
    lines = (RESULTS / "README.md").read_text(encoding="utf-8").splitlines()
    names = (name_of(folder), f"[{name_of(folder)}]({name_of(folder)}/report.md)")
    (row,) = (line for line in lines if line.startswith(tuple(f"| {name} |" for name in names)))
    return row.split(" | ")[-1].removesuffix(" |")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update", RESULTS / "update.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", STORED, ids=name_of)
def test_stored_reports_are_of_the_stored_results(folder: Path, script: ModuleType) -> None:
    report = build_report(load_groups(folder))
    assert (folder / "report.md").read_text(encoding="utf-8") == render_markdown(report)
    assert last_column(folder) == script.describe_tally(report.tally)
    page = render_html(report)
    assert len(page.encode()) <= 1_500_000
    anchors = re.findall(r'<h2 id="([^"]*)">', page)
    assert len(set(anchors)) == len(anchors) == len(report.sections)
    assert page.count("<svg ") == page.count("<desc")
    variants = {one.name for section in report.sections for one in section.variants}
    charts = [looks_of(chart) for section in report.sections for chart in section.charts]
    for name in variants:
        assert len({chart[name] for chart in charts if name in chart}) <= 1, name
    assert all(len(set(chart.values())) == len(chart) for chart in charts)


def test_large_and_small_results_are_among_them() -> None:
    """The page of the graph network is the largest one."""
    assert {"graph", "images", "llm", "online", "warmup", "registered/online"} <= {*map(name_of, STORED)}


@pytest.mark.parametrize("folder", REGISTERED, ids=name_of)
def test_registered_comparisons_have_no_report_before_all_seeds_are_run(folder: Path) -> None:
    missing = sum(len(plan.to_run()) for group in load_groups(folder) for plan in group.plans)
    assert (folder / "report.md").exists() == (missing == 0)
    assert (last_column(folder) == "no report before all registered seeds are run") == (missing > 0)


def test_the_counts_in_words(script: ModuleType) -> None:
    assert script.describe_tally(Tally(1, 2, 3)) == "1 ahead, 2 behind, 3 not distinguishable"
    assert script.describe_tally(Tally(0, 0, 0)) == "not compared"
