"""Parameters whose pieces lie on several ranks.

A step works on each rank's own piece. Only the sums of the cosine, and with them |g|, are over all of it:
between measuring and settling they are added over the ranks that hold the other pieces (`Exchange.add_up`).
Nothing else knows about ranks.
"""

from __future__ import annotations

from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tam._wrappers import unwrap

Ranks = tuple[Any, ...]  # the process groups over which a parameter is sharded, one for each mesh dimension

DOT, MM, GG, PRESENT = range(4)  # the columns of the sums
FOUND_INF = DOT  # of their last row, which has |g|^2 besides


def is_sharded(x: Any) -> bool:
    """Whether it is a DTensor. Its class is not imported for that: few need it, and it takes a while."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def local(x: Tensor) -> Tensor:
    """This rank's piece of a DTensor, which shares its memory; any other tensor itself."""
    if not is_sharded(x):
        return x
    piece: Any = x._local_tensor  # type: ignore[attr-defined]
    wait = getattr(piece, "trigger_wait", None)  # it may still be on its way from a collective
    return piece if wait is None else wait()  # type: ignore[no-any-return]


def local_gradient(p: Tensor, gradient: Tensor) -> Tensor:
    """This rank's piece of the gradient, laid out over the ranks as the parameter is.

    A gradient that is not (a `Partial` one: each rank has a summand) is redistributed into a new tensor: the
    cost is a gradient's size.
    """
    if is_sharded(gradient) and gradient.placements != p.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local(gradient)


def ranks_of(p: Tensor) -> Ranks:
    """The groups of ranks that hold different pieces of the parameter. Replicas are not among them."""
    if not is_sharded(p):
        return ()
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    # Not `is_shard`: it does not know the strided shards of two-dimensional meshes.
    sharded = [
        i for i, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(i) > 1
    ]
    return tuple(mesh.get_group(i) for i in sharded)


def several(group: Any) -> bool:
    return dist.get_world_size(group) > 1


class ShardGroup:
    """What `shard_group=` and `whole_tensors=` say of plain tensors.

    A deep copy shares the process group; a pickle does not take it along.
    """

    def __init__(self, group: Any, whole_tensors: bool) -> None:
        self.group, self.whole_tensors = group, whole_tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardGroup, (None, self.whole_tensors)

    @staticmethod
    def of(group: Any, whole_tensors: bool, scope: str) -> ShardGroup | None:
        """The options, checked."""
        if not isinstance(whole_tensors, bool):
            raise ValueError(f"whole_tensors={whole_tensors!r}: must be True or False")
        if group is None:
            if whole_tensors:
                raise ValueError(
                    "whole_tensors=True says how the ranks of shard_group hold tensors: give it, too"
                )
            return None
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"shard_group={group!r}: must be a torch.distributed process group this rank is in"
            )
        if scope == "tensor" and not whole_tensors:
            raise ValueError(
                "scope='tensor' with shard_group: which tensors of other ranks belong to one of this rank's "
                "is not known. Where no tensor is split (ZeroRedundancyOptimizer), say whole_tensors=True"
            )
        return ShardGroup(group, whole_tensors)


class Exchange:
    """Which sums an optimizer adds over which ranks.

    Those parameters of a segment that the same ranks hold in pieces are a share of it. The sums are a tensor
    [shares + 1, 4] in float64: for each share <m, g>, |m|^2, |g|^2 and whether any of it has a gradient; in
    the last row whether a gradient was not finite (GradScaler's verdict) and |g|^2 of everything. What is
    exchanged has the same shape at every step and on every rank.
    """

    def __init__(self, segments: list[list[Tensor]], scope: str, shards: ShardGroup | None) -> None:
        self.params = [p for segment in segments for p in segment]
        self.segments, self.scope, self.shards = len(segments), scope, shards
        own: Ranks = ()
        if shards is not None:
            if shards.group is None:
                raise RuntimeError(
                    "a pickle does not take a process group along: set the optimizer's shard_group again"
                )
            own = (shards.group,) if several(shards.group) else ()
        # Whole tensors are segments of their own: nothing of them is added up but |g|.
        self.whole = bool(own) and scope == "tensor"
        found: dict[tuple[int, Ranks], list[Tensor]] = {}
        for k, segment in enumerate(segments):
            if own and not self.whole:
                found[k, own] = []  # also where this rank has none of it
            for p in segment:
                ranks = ranks_of(p) if is_sharded(p) or self.whole else own
                found.setdefault((k, ranks), []).append(p)
        self.shares = list(found)  # ordered by segment
        self.share_of = {p: i for i, members in enumerate(found.values()) for p in members}
        self.mine = [
            i for i, members in enumerate(found.values()) if self.whole and not is_sharded(members[0])
        ]
        self.groups = list(dict.fromkeys([*own, *(group for _, ranks in self.shares for group in ranks)]))
        # Else torch's GradScaler finds one verdict for all ranks by itself.
        self.uneven = bool(own) or len({getattr(p, "device_mesh", None) for p in self.params}) > 1
        self.device: torch.device | None = local(self.params[0]).device if self.params else None
        self._rows: dict[Any, Tensor] = {}
        self.checked = False

    def fits(self, segments: list[list[Tensor]], scope: str, shards: ShardGroup | None) -> bool:
        """Whether it is the exchange of these parameters and options."""
        params = [p for segment in segments for p in segment]
        return (
            (len(segments), scope, shards) == (self.segments, self.scope, self.shards)
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
        )

    def needed(self, max_grad_norm: float | None, found_inf: Tensor | None) -> bool:
        """Whether a step has anything to exchange."""
        if self.whole and len(self.groups) == 1:  # the cosines need nothing
            return max_grad_norm is not None or found_inf is not None
        return bool(self.groups)

    def counts(self) -> list[int]:
        """How many shares each segment has."""
        counts = [0] * self.segments
        for k, _ in self.shares:
            counts[k] += 1
        return counts

    def blank(self) -> Tensor:
        """Sums of nothing."""
        return torch.zeros(len(self.shares) + 1, 4, dtype=torch.float64, device=self.device)

    def add_up(self, sums: Tensor, found_inf: Tensor | None = None) -> None:
        """Adds each share's sums over the ranks that hold pieces of it, in place.

        One all-reduce for each process group, whatever the number of parameters.
        """
        # In place: to assign a number would wait for the device.
        whole = sums[-1].zero_()
        if found_inf is not None:
            whole[FOUND_INF].copy_(found_inf.reshape(()))
        if self.mine:
            whole[GG].copy_(self._total(sums, self.mine))
        self.reduce(sums)
        others = [i for i in range(len(self.shares)) if i not in set(self.mine)]
        if others:
            whole[GG].add_(self._total(sums, others))

    def reduce(self, rows: Tensor) -> None:
        """Adds the row of each share over its ranks, in place; a row behind them over all ranks."""
        last = list(range(len(self.shares), len(rows)))
        for group in self.groups:
            concerned = [i for i, (_, ranks) in enumerate(self.shares) if group in ranks]
            if len(concerned) == len(self.shares):
                dist.all_reduce(rows, group=group)
            elif concerned + last:
                index = self.index(concerned + last, rows.device)
                part = rows[index]
                dist.all_reduce(part, group=group)
                rows[index] = part

    def _total(self, sums: Tensor, rows: list[int]) -> Tensor:
        column = sums[:-1, GG]
        return (column if len(rows) == len(self.shares) else column[self.index(rows, sums.device)]).sum()

    def index(self, rows: list[int], device: torch.device) -> Tensor:
        """The rows as a tensor, which goes to the device once."""
        key = device, *rows
        if key not in self._rows:
            self._rows[key] = torch.tensor(rows, device=device)
        return self._rows[key]

    def agree(self, s: list[float | None], options: dict[str, Any]) -> list[float]:
        """Each segment's s, given those this rank knows, as the ranks know it together; done once.

        Raises, on all ranks alike, where ranks that will add up their sums differ in parameters or options:
        they would add what does not belong together, or wait for each other for ever.
        """
        for group in self.groups:
            mine = {"parameters": self._list(), "options": options, "device": self.device, "s": s}
            everyone: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, mine, group=group)
            for i, theirs in enumerate(everyone):
                difference = _difference(everyone[0], theirs)
                if difference:
                    there, first = (dist.get_global_rank(group, j) for j in (i, 0))
                    raise RuntimeError(difference.format(there=there, first=first))
            kinds = {x["device"].type for x in everyone if x["device"] is not None}
            if len(kinds) > 1:
                raise RuntimeError(
                    f"the ranks have their parameters on different kinds of devices: {sorted(kinds)}"
                )
            if self.device is None and kinds:
                (kind,) = kinds
                self.device = (
                    torch.device("cuda", torch.cuda.current_device())
                    if kind == "cuda"
                    else torch.device(kind)
                )
            if not self.whole:
                all_known = zip(*(x["s"] for x in everyone), strict=True)
                s = [next((x for x in known if x is not None), None) for known in all_known]
        self.checked = True
        return [x or 0.0 for x in s]

    def _list(self) -> list[str]:
        """What of the parameters must be the same on all ranks: with `shard_group` nothing of plain ones."""
        found = []
        for p in self.params:
            if is_sharded(p):
                found.append(f"{tuple(p.shape)} {p.dtype} {p.placements}")  # type: ignore[attr-defined]
            elif self.shards is None:
                found.append(f"{tuple(p.shape)} {p.dtype}")
        return found


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The first difference that matters, with places for the ranks; empty where there is none."""
    for i, (a, b) in enumerate(zip(ours["parameters"], theirs["parameters"], strict=False)):
        if a != b:
            return f"parameter {i} is {b} on rank {{there}} and {a} on rank {{first}}"
    a, b = len(ours["parameters"]), len(theirs["parameters"])
    if a != b:
        return f"rank {{there}} has {b} parameters and rank {{first}} has {a}"
    for name, a in ours["options"].items():
        b = theirs["options"].get(name)
        if a != b:
            return f"{name} is {b!r} on rank {{there}} and {a!r} on rank {{first}}"
    return ""


def exchange_of(optimizer: Optimizer) -> Exchange:
    """Of sums over all parameters of any optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return Exchange([params], "global", getattr(unwrap(optimizer), "_shards", None))


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for gradients that lie in pieces on several ranks.

    torch's own takes DTensors of one mesh only. This one takes whatever the optimizer takes (several meshes,
    plain parameters among DTensors, `shard_group`, ranks without gradients), and all ranks that exchange sums
    find the same verdict, so that they skip alike and keep one scale.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups = []  # what torch's own code reads of an optimizer, with each rank's pieces for gradients
        for group in optimizer.param_groups:
            pieces = [local(p.grad) for p in group["params"] if p.grad is not None]
            holders = [g.detach() for g in pieces]
            for holder, g in zip(holders, pieces, strict=True):
                holder.grad = g
            groups.append({"params": holders})
        stand_in: Any = SimpleNamespace(param_groups=groups)
        found = super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)
        if not found:
            found[found_inf.device] = found_inf
        for verdict in found.values():
            for group in exchange_of(optimizer).groups:
                dist.all_reduce(verdict, group=group)
        return found
