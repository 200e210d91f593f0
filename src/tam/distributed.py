"""Parameters whose parts lie on several ranks.

A step works on each rank's own part of a DTensor. Only the sums of the cosine, and with them |g|, are over
all of it: between measuring and settling they are added over the ranks that hold different parts. Nothing
else knows about ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tam.kernels.bucket import Bucket
    from tam.kernels.torque import Rule

Ranks = tuple[Any, ...]  # the process groups over which a parameter is sharded, one for each mesh dimension


def is_sharded(x: Any) -> bool:
    """Whether it is a DTensor. Its class is not imported for that: few need it, and it takes a while."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, which shares its memory; any other tensor itself."""
    return x._local_tensor if is_sharded(x) else x  # type: ignore[attr-defined]


def local_gradient(p: Tensor, gradient: Tensor) -> Tensor:
    """This rank's part of the gradient, laid out over the ranks as the parameter is.

    A gradient that is not (a `Partial` one: each rank has a summand) is redistributed into a new tensor: the
    cost is a gradient's size.
    """
    if is_sharded(gradient) and gradient.placements != p.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local(gradient)


def ranks_of(p: Tensor) -> Ranks:
    """The groups of ranks that hold different parts of the parameter. Replicas are not among them."""
    if not is_sharded(p):
        return ()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    # Not `is_shard`: it does not know the strided shards of two-dimensional meshes.
    sharded = [
        i for i, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(i) > 1
    ]
    return tuple(mesh.get_group(i) for i in sharded)


def check_lists(params: list[Tensor]) -> None:
    """Raises, on all ranks alike, where ranks that will add up their sums hold different parameters.

    Else they would add what does not belong together, or wait for each other for ever.
    """
    lists: dict[Any, list[str]] = {}
    for p in params:
        for group in ranks_of(p):
            placements = p.placements  # type: ignore[attr-defined]
            lists.setdefault(group, []).append(f"{tuple(p.shape)} {p.dtype} {placements}")
    for group, mine in lists.items():
        everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(everyone, mine, group=group)
        first = torch.distributed.get_global_rank(group, 0)
        for i, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                rank = torch.distributed.get_global_rank(group, i)
                raise RuntimeError(_difference(first, everyone[0], rank, theirs))


def _difference(first: int, ours: list[str], rank: int, theirs: list[str]) -> str:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"sharded parameter {i} is {b} on rank {rank} and {a} on rank {first}"
    return f"rank {rank} has {len(theirs)} sharded parameters and rank {first} has {len(ours)}"


def add_up(rule: Rule, buckets: list[Bucket], sums: list[Tensor]) -> list[Tensor]:
    """The sums [rows, 3] of each bucket, those of sharded parameters over all ranks that hold a part.

    One all-reduce for each process group, whatever the number of parameters: of three numbers for each
    segment, or for each parameter with scope "tensor". Where rows share a segment, their total comes back in
    the first of them and the others are 0.
    """
    places: dict[tuple[Ranks, int], list[tuple[int, int]]] = {}  # bucket and row
    for b, bucket in enumerate(buckets):
        for row, ranks in enumerate(bucket.ranks):
            if ranks:
                segment = len(places) if rule.scope == "tensor" else rule.segment(bucket)
                places.setdefault((ranks, segment), []).append((b, row))
    if not places:
        return sums
    home = sums[0].device
    found = [part.clone() for part in sums]
    totals = torch.stack([
        torch.stack([found[b][row].to(home) for b, row in members]).sum(0) for members in places.values()
    ])  # fmt: skip
    for group in dict.fromkeys(group for ranks, _ in places for group in ranks):
        concerned = [i for i, (ranks, _) in enumerate(places) if group in ranks]
        part = totals[concerned].contiguous()
        torch.distributed.all_reduce(part, group=group)
        totals[concerned] = part
    for total, members in zip(totals, places.values(), strict=True):
        for i, (b, row) in enumerate(members):
            found[b][row] = total.to(found[b].device) if i == 0 else 0.0
    return found
