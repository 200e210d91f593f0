"""The examples run as they stand, and go on after a rank was killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.sharding.harness import NEEDS_FSDP

ROOT = Path(__file__).parent.parent.parent
TEXT = ROOT / "README.md"


def torchrun(*command: str, restarts: int = 0) -> str:
    """What the job printed."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    # Else new processes may find the addresses of dead ones (pytorch/pytorch#135712).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        "--max-restarts", str(restarts),
    ]  # fmt: skip
    done = subprocess.run(
        [*launcher, *command], capture_output=True, text=True, env=environment, timeout=240
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def state(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, by name."""
    path = folder / "latest.pt"
    if name == "fsdp2":
        path = folder / "whole.pt"
        dcp_to_torch_save(folder / f"step-{(folder / 'latest').read_text()}", path)
    found: dict[str, torch.Tensor] = {}

    def collect(prefix: str, x: object) -> None:
        if isinstance(x, torch.Tensor):
            found[prefix] = x
        elif isinstance(x, dict):
            for key, value in x.items():
                collect(f"{prefix}.{key}", value)

    collect("", torch.load(path, weights_only=False))
    return found


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp2", marks=NEEDS_FSDP)])
def test_a_killed_rank_changes_nothing(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"{name}.py"
    options = ["--steps", "12", "--every", "4", "--text", str(TEXT), "--folder"]
    printed = torchrun(str(script), *options, str(tmp_path / "whole"))
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    alignments = [float(x) for x in re.findall(r"s ([+-][\d.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < losses[0] and max(map(abs, alignments)) > 0.01
    killer, mark = ROOT / "tests" / "sharding" / "killed.py", tmp_path / "killed"
    run = str(tmp_path / "killed-run")
    printed = torchrun(str(killer), str(script), "6", str(mark), *options, run, restarts=1)
    assert mark.exists()
    assert re.findall(r"step (\d+):", printed) == ["4", "8", "12"]  # 5 and 6 twice
    expected, found = state(name, tmp_path / "whole"), state(name, tmp_path / "killed-run")
    assert expected.keys() == found.keys() and len(found) > 20
    for key, x in expected.items():
        torch.testing.assert_close(found[key], x, rtol=1e-6, atol=1e-6)
