"""DTensors: this rank's shard of a tensor, and the process groups that hold the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_dtensor(x: object) -> bool:
    """Return True for a DTensor, without importing its class: few need it, and it takes a while."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def local_tensor(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares its memory; any other tensor itself."""
    if is_dtensor(x):
        x = x._local_tensor  # type: ignore[attr-defined]
    wait: Any = getattr(x, "trigger_wait", None)  # the result of an asynchronous collective
    return x if wait is None else wait()


def redistribute_gradient(p: Tensor, gradient: Tensor) -> Tensor:
    """Return this rank's shard of the gradient, placed like the parameter.

    A gradient with other placements (`Partial`: each rank has a summand) is redistributed into a new tensor,
    at the cost of a gradient's size.
    """
    if is_dtensor(gradient) and gradient.placements != p.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local_tensor(gradient)


def shard_groups(p: Tensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups whose ranks hold other shards of the parameter, one per mesh dimension."""
    if not is_dtensor(p) or p.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return ()  # plain, or this rank has nothing of it
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    # Not `is_shard`: it does not know the strided shards of two-dimensional meshes.
    sharded = [
        i for i, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(i) > 1
    ]
    return tuple(mesh.get_group(i) for i in sharded)


def has_other_ranks(group: ProcessGroup) -> bool:
    """Return True if the process group has more than one rank."""
    return dist.get_world_size(group) > 1
