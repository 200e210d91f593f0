"""The guide "Add an optimizer" is complete: in a copy of the repository, its blocks pass the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "how-it-works" / "add-an-optimizer.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^ {4}\.venv/bin/python (-m pytest .*)$", re.MULTILINE)
BLOCK = re.compile(r"\b(Write|Change) `(\S+)`:\n\n```(?:python|diff)\n(.*?)```", re.DOTALL)
# Independent of the guide: the update of Lion in scalars.
CHECK = """if True:
    import torch, tam

    def sign(x):
        return (x > 0) - (x < 0)

    numbers = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = torch.nn.Parameter(numbers[0].clone())
    optimizer = tam.Lion([p], lr=0.1, betas=(0.8, 0.6), weight_decay=0.3)
    theta, m = numbers[0].tolist(), [0.0] * 4
    for gradient in numbers[1:]:
        p.grad = gradient.clone()
        optimizer.step()
        for i, g in enumerate(gradient.tolist()):
            theta[i] -= 0.1 * (sign(0.8 * m[i] + 0.2 * g) + 0.3 * theta[i])
            m[i] = 0.6 * m[i] + 0.4 * g
    torch.testing.assert_close(p.detach(), torch.tensor(theta, dtype=torch.float64))
    assert tam.registry.get("lion").cls is tam.Lion"""

FOREIGN = """if True:
    import copy, pytest, torch, tam
    from tests.helpers import parameters, train

    theirs = [torch.optim.Adam, torch.optim.AdamW, tam.AdaTAM]
    for source in [train(cls(parameters([(3,)]), lr=0.5), 2) for cls in theirs]:
        lion = tam.Lion(parameters([(3,)]), lr=0.1)
        with pytest.warns(UserWarning, match="of another optimizer.*keeps lr=0.1"):
            lion.load_state_dict(copy.deepcopy(source.state_dict()))
        assert lion.param_groups[0]["lr"] == 0.1
        (state,) = lion.state_dict()["state"].values()
        assert state.keys() == {"exp_avg"}
    own = train(tam.Lion(parameters([(3,)]), lr=0.5), 2)
    lion.load_state_dict(copy.deepcopy(own.state_dict()))
    assert lion.param_groups[0]["lr"] == 0.5"""

PACKAGE = """if True:
    from tests import test_package

    test_package.test_no_import_cycle()
    test_package.test_modules_keep_to_public_names()"""


def apply_diff(path: Path, diff: str) -> None:
    """Replace, at each place, the lines without a sign and with a minus by those without and with a plus."""
    text = path.read_text(encoding="utf-8")
    for place in diff.split("@@\n"):
        lines = place.splitlines()
        old = "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        assert text.count(old) == 1, f"{path.name} has this {text.count(old)} times, not once:\n{old}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def run(*command: str, cwd: Path) -> str:
    """Run a command in the copy. Return its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(cwd / "src"), str(cwd)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the tests need none, and their imports take time
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which somebody has followed the guide."""
    copy = tmp_path_factory.mktemp("contributor") / "checkout"
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for action, name, block in BLOCK.findall(GUIDE):
        if action == "Change":
            apply_diff(copy / name, block)
        else:
            assert not (copy / name).exists(), f"{name} is there already"
            (copy / name).write_text(block, encoding="utf-8")
    return copy


def test_every_block_says_where_it_goes() -> None:
    assert len(BLOCK.findall(GUIDE)) == len(re.findall(r"^```(?:python|diff)$", GUIDE, re.MULTILINE)) > 5


def test_lion_takes_the_steps_of_an_independent_loop_and_knows_foreign_checkpoints(checkout: Path) -> None:
    run("-c", f"{CHECK}\n{FOREIGN}", cwd=checkout)  # one process: most of its time is the import of torch


def test_lion_passes_the_tests_of_all_optimizers(checkout: Path) -> None:
    (command,) = COMMAND.findall(GUIDE)
    (passed,) = re.findall(r"(\d+) passed", run(*command.split(), cwd=checkout))
    assert int(passed) > 150


def test_the_blocks_keep_to_the_rules_of_the_code(checkout: Path) -> None:
    run("-c", PACKAGE, cwd=checkout)
    pytest.importorskip("ruff")
    files = [name for _, name, _ in BLOCK.findall(GUIDE)]
    run("-m", "ruff", "check", "--no-cache", *files, cwd=checkout)
    run("-m", "ruff", "format", "--no-cache", "--check", *files, cwd=checkout)
