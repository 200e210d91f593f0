"""Settings for all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

# The same examples on every run and every machine; a step can be slow on a busy one.
settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")

torch.set_num_threads(1)  # tensors here are small; on a busy machine two threads wait for each other
