"""A step that becomes a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

EAGER = 3  # steps before the graph is captured: they compile, and make the optimizer's state


class Graphed:
    """Calls a function that reads and writes tensors in place; on a GPU, after some calls, as one graph."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.step, self.device = step, device
        self.forget()

    def forget(self) -> None:
        """What the function does has changed: capture it anew."""
        self.graph: Any = None
        self.eager = 0

    def plainly(self) -> None:
        """A call that is no replay: hooks run."""
        self.step()

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        elif self.device.type == "cuda" and self.eager == EAGER:
            gc.collect()  # a graph that nobody has any more must not be destroyed during the capture
            self.graph = torch.cuda.CUDAGraph()
            here = torch.cuda.current_stream()  # an engine's; the default stream cannot be captured
            with torch.cuda.graph(self.graph, stream=None if here == torch.cuda.default_stream() else here):
                self.step()
            self.graph.replay()
        else:
            self.step()
            self.eager += 1
