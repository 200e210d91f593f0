"""What the pages in docs/ show runs, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    torch.manual_seed(0)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, page.name, "exec"), namespace)


def test_every_part_has_a_page_with_an_example() -> None:
    parts = ("transfer", "handover", "warmup", "recorder", "landscape", "integrations", "jax")
    for part in parts:
        page = Path(__file__).parent.parent / "docs" / f"{part}.md"
        assert "```python" in page.read_text(encoding="utf-8"), part


def test_the_plan_on_the_page_is_what_is_shown() -> None:
    import tam

    params = list(torch.nn.Linear(8, 1).parameters())
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4)
    for p in params:
        p.grad = torch.ones_like(p)
    sgd.step()
    plan = tam.explain_handover(sgd, tam.TAM)
    (page,) = [page for page in PAGES if page.stem == "handover"]
    assert f"```text\n{plan!r}\n```" in page.read_text(encoding="utf-8")
