"""Which sums an optimizer adds up over which ranks: the only all-reduce of a step."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tam.sharding.dtensor import has_other_ranks, is_dtensor, local_tensor, shard_groups
from tam.sharding.shard_group import ShardGroup, shards_of
from tam.sharding.sums import FOUND_INF, Sum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Exchange:
    """Which sums an optimizer adds up over which ranks.

    A share is the parameters of one segment that the same ranks hold shards of. The sums are a float64 tensor
    [shares + 1, 4] with the columns of `Sum`. What is exchanged has the same shape at every step and on every
    rank.
    """

    def __init__(self, segments: list[list[Tensor]], scope: str, shards: ShardGroup | None) -> None:
        self.lengths, self.scope, self.shards = [*map(len, segments)], scope, shards
        self.params = [p for segment in segments for p in segment]
        self.plain_group: ProcessGroup | None = None  # over which plain tensors are sharded
        if shards is not None:
            shards.check_scope(scope)
            if shards.group is None:
                raise RuntimeError(
                    "the optimizer has no process group, since a pickle does not contain one: set its "
                    "shard_group again"
                )
            self.plain_group = shards.group if has_other_ranks(shards.group) else None
        plain_groups = () if self.plain_group is None else (self.plain_group,)
        # Each whole tensor is one segment: only |g| is added up over the ranks.
        self.has_whole_tensors = self.plain_group is not None and scope == "tensor"
        summed_over = () if self.has_whole_tensors else plain_groups
        members: dict[tuple[int, tuple[ProcessGroup, ...]], list[Tensor]] = {}
        everyone = set(range(dist.get_world_size())) if dist.is_initialized() else {0}
        self.holders = [set(everyone) for _ in segments]  # the ranks that hold every parameter of a segment
        holders_of_plain = {rank for group in plain_groups for rank in dist.get_process_group_ranks(group)}
        holders_by_mesh: dict[Any, set[int]] = {None: holders_of_plain}
        for k, segment in enumerate(segments):
            if summed_over:
                members[k, summed_over] = []  # also if this rank has none of it
            for p in segment:
                groups = shard_groups(p) if is_dtensor(p) else summed_over
                members.setdefault((k, groups), []).append(p)
                mesh: Any = getattr(p, "device_mesh", None)
                if mesh not in holders_by_mesh:
                    holders_by_mesh[mesh] = set(mesh.mesh.flatten().tolist())
                self.holders[k] &= holders_by_mesh[mesh]
        self.shares = list(members)  # ordered by segment
        self.share_of = {p: i for i, params in enumerate(members.values()) for p in params}
        self.groups = list(
            dict.fromkeys([*plain_groups, *(group for _, groups in self.shares for group in groups)])
        )
        home = next((p for p in self.params if p.grad is not None), self.params[0] if self.params else None)
        self.device: torch.device | None = None if home is None else local_tensor(home).device
        self.has_agreed = False
        self.share_counts = [0] * len(segments)  # per segment
        for k, _ in self.shares:
            self.share_counts[k] += 1
        self.local_rows = [
            i
            for i, params in enumerate(members.values())
            if self.has_whole_tensors and not is_dtensor(params[0])
        ]
        self.summed_rows = [i for i in range(len(self.shares)) if i not in set(self.local_rows)]
        self.rows_of_group = [
            [i for i, (_, groups) in enumerate(self.shares) if group in groups] for group in self.groups
        ]
        self.adds_cosines = any(self.rows_of_group)  # not those of whole tensors
        self._index_tensors: dict[tuple[object, ...], Tensor] = {}

    def fits(self, segments: list[list[Tensor]], scope: str, shards: ShardGroup | None) -> bool:
        """Return True if this is the exchange of these parameters and options."""
        params = [p for segment in segments for p in segment]
        return (
            ([*map(len, segments)], scope, shards) == (self.lengths, self.scope, self.shards)
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
        )

    def is_needed(self, max_grad_norm: float | None, found_inf: Tensor | None) -> bool:
        """Return True if a step has anything to exchange."""
        adds_norm = bool(self.groups) and (max_grad_norm is not None or found_inf is not None)
        return self.adds_cosines or adds_norm

    def all_reduce_sums(self, sums: Tensor, found_inf: Tensor | None = None) -> None:
        """Add each share's sums over the ranks that hold shards of it, in place.

        One all-reduce per process group, for any number of parameters.
        """
        # In place: to assign a number would wait for the device.
        total = sums[-1].zero_()
        if found_inf is not None:
            total[FOUND_INF].copy_(torch.as_tensor(found_inf, device=total.device).reshape(()))
        if self.local_rows:
            total[Sum.GG].copy_(sums[self.index_tensor(self.local_rows, sums.device), Sum.GG].sum())
        whole_tensors_gg = None
        for group, rows in zip(self.groups, self.rows_of_group, strict=True):
            if len(rows) == len(self.shares):
                dist.all_reduce(sums, group=group)
            else:
                self._all_reduce(group, rows, sums)
            if self.has_whole_tensors and group is self.plain_group:  # other groups must not add it once more
                whole_tensors_gg = total[Sum.GG].clone()
                total[Sum.GG].zero_()
        column = sums[:-1, Sum.GG]
        if self.local_rows:
            column = column[self.index_tensor(self.summed_rows, sums.device)]
        total[Sum.GG].copy_(column.sum())
        if whole_tensors_gg is not None:
            total[Sum.GG].add_(whole_tensors_gg)

    def all_reduce_rows(self, rows: Tensor) -> None:
        """Add the row of each share over its ranks, in place."""
        for group, concerned in zip(self.groups, self.rows_of_group, strict=True):
            self._all_reduce(group, concerned, rows)

    def _all_reduce(self, group: ProcessGroup, rows: list[int], table: Tensor) -> None:
        """Add these rows, and those behind the shares' rows, over a group."""
        chosen = [*rows, *range(len(self.shares), len(table))]
        if len(chosen) == len(table):
            dist.all_reduce(table, group=group)
        elif chosen:
            index = self.index_tensor(chosen, table.device)
            part = table[index]
            dist.all_reduce(part, group=group)
            table[index] = part

    def index_tensor(self, rows: list[int], device: torch.device) -> Tensor:
        """Return the rows as a tensor, which is copied to the device once."""
        key = device, *rows
        if key not in self._index_tensors:
            if len(self._index_tensors) > 64:  # gradients that come and go make ever new ones
                self._index_tensors.clear()
            self._index_tensors[key] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self._index_tensors[key]


def verdicts_differ(params: list[Tensor], shards: ShardGroup | None) -> bool:
    """Return True if GradScaler's verdicts may differ between ranks that exchange sums.

    torch's GradScaler finds one verdict for the DTensors of one mesh by itself.
    """
    if shards is not None and shards.group is not None and has_other_ranks(shards.group):
        return True
    meshes = {getattr(p, "device_mesh", None) for p in params}
    return len(meshes) > 1 and any(map(shard_groups, params))


def exchange_of(optimizer: Optimizer, cached: Exchange | None = None) -> Exchange:
    """Return the exchange of sums over all parameters of any optimizer; the cached one if it still fits."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    shards = shards_of(optimizer)
    if cached is not None and cached.fits([params], "global", shards):
        return cached
    return Exchange([params], "global", shards)
