"""A training step that becomes a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

EAGER_STEPS = 3  # before the graph is captured: they compile kernels and create the optimizer's state


class CapturedStep:
    """Calls a function that works in place and never waits for the device; on a GPU, as a CUDA graph."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.run_eagerly, self._device = step, device  # the function itself runs hooks, a graph runs none
        self.reset()

    def reset(self) -> None:
        """Forget the graph: what the function does has changed."""
        self._graph: Any = None
        self._eager_steps = 0

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._device.type == "cuda" and self._eager_steps == EAGER_STEPS:
            gc.collect()  # an unused graph must not be destroyed during the capture
            self._graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()  # an engine's; the default stream cannot be captured
            on_default = stream == torch.cuda.default_stream()
            with torch.cuda.graph(self._graph, stream=None if on_default else stream):
                self.run_eagerly()
            self._graph.replay()
        else:
            self.run_eagerly()
            self._eager_steps += 1
