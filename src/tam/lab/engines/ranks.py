"""The processes a trial runs on: one, or those of a torchrun job."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """This process among those of a trial."""

    def __init__(self, device: torch.device) -> None:
        self.device, many = device, dist.is_available() and dist.is_initialized()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)

    def add(self, *values: float | Tensor) -> list[float]:
        """Return the sum of each value over all ranks."""
        sums = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        if self.count > 1:
            dist.all_reduce(sums)
        return list(map(float, sums))

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in the order of ranks."""
        tensors = [x]
        if self.count > 1:
            tensors = [torch.empty_like(x) for _ in range(self.count)]
            dist.all_gather(tensors, x)
        return torch.stack(tensors)

    def share(self, x: Tensor) -> None:
        """Overwrite a tensor with that of rank 0."""
        if self.count > 1:
            dist.broadcast(x, 0)

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.count > 1:
            dist.barrier()
