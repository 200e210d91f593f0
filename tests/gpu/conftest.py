"""Tests that need a GPU; run there with `python3 -m pytest tests/gpu`. Elsewhere they are not collected."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
