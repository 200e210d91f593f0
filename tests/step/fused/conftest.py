"""The Triton kernels are tested in Triton's interpreter, in a process of its own: `make test` starts it."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_kernels.py"]
