"""Settings for all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# The same examples on every run and every machine; a step can be slow on a busy one.
settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")

for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # tests read what is printed where there is no terminal
    os.environ.pop(name, None)

torch.set_num_threads(1)  # tensors here are small; on a busy machine two threads wait for each other
