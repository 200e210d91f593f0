"""What the README shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tam

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIMIZERS = (ROOT / "docs" / "guides" / "options.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("tensor(") == 3


def test_the_options_table_names_every_option() -> None:
    table = OPTIMIZERS.split("## Options")[1].split("## ")[0]
    for cls in (tam.TAM, tam.AdaTAM, tam.AdaTAMW):
        defaults = cls([torch.zeros(1, requires_grad=True)]).defaults
        missing = [name for name in defaults if f"`{name}`" not in table]
        assert missing == []
