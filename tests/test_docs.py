"""The examples in docs/ run, in the order of their page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"
# The blocks of add-an-optimizer.md are files: test_contributing.py applies them.
PAGES = sorted(
    page
    for page in DOCS.rglob("*.md")
    if "```python" in page.read_text(encoding="utf-8") and page.stem != "add-an-optimizer"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "timm":  # not in the extra `test`
        pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    torch.manual_seed(0)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, page.name, "exec"), namespace)


def test_every_guide_has_an_example() -> None:
    guides = set((DOCS / "guides").glob("*.md"))
    assert guides and guides <= set(PAGES)


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
