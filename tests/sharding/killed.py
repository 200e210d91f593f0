"""Runs a script whose rank 1 kills itself after a step, once: killed.py SCRIPT STEP MARK ARGUMENTS"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

script, step, mark = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
taken = 0


def count(*_: object) -> None:
    global taken
    taken += 1
    if taken == step and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(count)
sys.argv = [str(script), *sys.argv[4:]]
sys.path.insert(0, str(script.parent))
runpy.run_path(str(script), run_name="__main__")
