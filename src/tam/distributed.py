"""Parameters whose pieces lie on several ranks.

A step works on each rank's own piece. Only the sums of the cosine, and with them |g|, are over all of it:
between measuring and settling they are added over the ranks that hold the other pieces (`Exchange.add_up`).
Nothing else knows about ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
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
    return arrived(x._local_tensor) if is_sharded(x) else x  # type: ignore[attr-defined]


def arrived(x: Tensor) -> Tensor:
    """The tensor, once the collective it comes from is done; any other itself."""
    wait = getattr(x, "trigger_wait", None)
    return x if wait is None else wait()


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
    if not is_sharded(p) or p.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return ()  # plain, or this rank has nothing of it
    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    # Not `is_shard`: it does not know the strided shards of two-dimensional meshes.
    sharded = [
        i for i, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(i) > 1
    ]
    return tuple(mesh.get_group(i) for i in sharded)


def several(group: Any) -> bool:
    return dist.get_world_size(group) > 1


@dataclass(frozen=True)
class Known:
    """What a rank knows of a segment: s where it has state, whether s is float64 where it has parameters."""

    s: float | None
    wide: bool | None


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
            outside = " (this rank is not in it)" if group == dist.GroupMember.NON_GROUP_MEMBER else ""
            raise ValueError(
                f"shard_group={group!r}: must be a torch.distributed process group this rank is in{outside}"
            )
        found = ShardGroup(group, whole_tensors)
        found.check(scope)
        return found

    def check(self, scope: str) -> None:
        if scope == "tensor" and not self.whole_tensors:
            raise ValueError(
                "scope='tensor' with shard_group: which tensors of other ranks belong to one of this rank's "
                "is not known. Where no tensor is split (ZeroRedundancyOptimizer), say whole_tensors=True"
            )


class Exchange:
    """Which sums an optimizer adds over which ranks.

    Those parameters of a segment that the same ranks hold in pieces are a share of it. The sums are a tensor
    [shares + 1, 4] in float64: for each share <m, g>, |m|^2, |g|^2 and whether any of it has a gradient; in
    the last row whether a gradient was not finite (GradScaler's verdict) and |g|^2 of everything. What is
    exchanged has the same shape at every step and on every rank.
    """

    def __init__(self, segments: list[list[Tensor]], scope: str, shards: ShardGroup | None) -> None:
        self.lengths, self.scope, self.shards = [*map(len, segments)], scope, shards
        self.params = [p for segment in segments for p in segment]
        self.own: Any = None  # the group of plain shards
        if shards is not None:
            shards.check(scope)
            if shards.group is None:
                raise RuntimeError(
                    "a pickle does not take a process group along: set the optimizer's shard_group again"
                )
            self.own = shards.group if several(shards.group) else None
        # Whole tensors are segments of their own: nothing of them is added up but |g|.
        self.whole = self.own is not None and scope == "tensor"
        plain: Ranks = () if self.own is None or self.whole else (self.own,)
        found: dict[tuple[int, Ranks], list[Tensor]] = {}
        for k, segment in enumerate(segments):
            if plain:
                found[k, plain] = []  # also where this rank has none of it
            for p in segment:
                found.setdefault((k, ranks_of(p) if is_sharded(p) else plain), []).append(p)
        self.shares = list(found)  # ordered by segment
        self.share_of = {p: i for i, members in enumerate(found.values()) for p in members}
        own = [] if self.own is None else [self.own]
        self.groups = list(dict.fromkeys([*own, *(group for _, ranks in self.shares for group in ranks)]))
        self.device: torch.device | None = local(self.params[0]).device if self.params else None
        self.checked = False
        # Else torch's GradScaler finds one verdict for all ranks by itself.
        self.uneven = bool(own) or len({getattr(p, "device_mesh", None) for p in self.params}) > 1
        # The rows of the sums, by what is done with them.
        self.counts = [0] * len(segments)  # shares of each segment
        for k, _ in self.shares:
            self.counts[k] += 1
        self.mine = [
            i for i, members in enumerate(found.values()) if self.whole and not is_sharded(members[0])
        ]
        mine = set(self.mine)
        self.others = [i for i in range(len(self.shares)) if i not in mine]
        self.concerned = [[i for i, (_, ranks) in enumerate(self.shares) if g in ranks] for g in self.groups]
        self._rows: dict[Any, Tensor] = {}

    def fits(self, segments: list[list[Tensor]], scope: str, shards: ShardGroup | None) -> bool:
        """Whether it is the exchange of these parameters and options."""
        params = [p for segment in segments for p in segment]
        return (
            ([*map(len, segments)], scope, shards) == (self.lengths, self.scope, self.shards)
            and len(params) == len(self.params)
            and all(map(is_, params, self.params))
        )

    def needed(self, max_grad_norm: float | None, found_inf: Tensor | None) -> bool:
        """Whether a step has anything to exchange."""
        if any(self.concerned):
            return True
        # Whole tensors: the cosines need nothing.
        return bool(self.groups) and (max_grad_norm is not None or found_inf is not None)

    def blank(self) -> Tensor:
        """Sums of nothing."""
        return torch.zeros(len(self.shares) + 1, 4, dtype=torch.float64, device=self.device)

    def add_up(self, sums: Tensor, found_inf: Any = None) -> None:
        """Adds each share's sums over the ranks that hold pieces of it, in place.

        One all-reduce for each process group, whatever the number of parameters.
        """
        # In place: to assign a number would wait for the device.
        whole = sums[-1].zero_()
        if found_inf is not None:
            whole[FOUND_INF].copy_(torch.as_tensor(found_inf).reshape(()))
        if self.mine:
            whole[GG].copy_(self._total(sums, self.mine))
        elsewhere = None  # |g|^2 of whole tensors on all ranks
        for group, concerned in zip(self.groups, self.concerned, strict=True):
            self._add_over(group, concerned, sums)
            if self.whole and group is self.own:  # other groups must not add it once more
                elsewhere = whole[GG].clone()
                whole[GG].zero_()
        whole[GG].copy_(self._total(sums, self.others))
        if elsewhere is not None:
            whole[GG].add_(elsewhere)

    def reduce(self, rows: Tensor) -> None:
        """Adds the row of each share over its ranks, in place."""
        for group, concerned in zip(self.groups, self.concerned, strict=True):
            self._add_over(group, concerned, rows)

    def _add_over(self, group: Any, concerned: list[int], rows: Tensor) -> None:
        """Adds these rows, and what is behind the shares' rows, over a group."""
        chosen = [*concerned, *range(len(self.shares), len(rows))]
        if len(chosen) == len(rows):
            dist.all_reduce(rows, group=group)
        elif chosen:
            index = self.index(chosen, rows.device)
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
            if len(self._rows) > 64:  # gradients that come and go make ever new ones
                self._rows.clear()
            self._rows[key] = torch.tensor(rows, dtype=torch.int64, device=device)
        return self._rows[key]

    def agree(self, mine: list[Known], options: dict[str, Any]) -> list[Known]:
        """What the ranks know together of each segment, given what this one knows; done once.

        Raises, on all ranks alike, where ranks that will add up their sums differ in parameters or options:
        they would add what does not belong together, or wait for each other for ever.
        """
        listed, difference = self._list(), ""
        digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()
        for group in self.groups:
            # A difference found in one group is told to the next: there are ranks that are only in that one.
            told = {
                "digest": digest,
                "options": options,
                "device": self.device,
                "known": mine,
                "found": difference,
            }
            everyone = _gather(told, group)
            lists = [listed] * len(everyone)
            if len({x["digest"] for x in everyone}) > 1:
                lists = _gather(listed, group)
            first = everyone[0]
            for i, theirs in enumerate(everyone):
                names = [f"rank {dist.get_global_rank(group, j)}" for j in (i, 0)]
                difference = difference or theirs["found"] or _difference(lists[0], lists[i], *names)
                difference = difference or _other_option(first["options"], theirs["options"], *names)
                if not self.whole:
                    difference = difference or _other_s(first["known"], theirs["known"], *names)
            kinds = sorted({x["device"].type for x in everyone if x["device"] is not None})
            if len(kinds) > 1:
                difference = difference or f"the ranks' parameters are on different kinds of devices: {kinds}"
            elif self.device is None and kinds:
                index = torch.cuda.current_device() if kinds == ["cuda"] else 0
                self.device = torch.device("cuda", index) if kinds == ["cuda"] else torch.device(kinds[0])
            if not self.whole and not difference:
                mine = [_together(known) for known in zip(*(x["known"] for x in everyone), strict=True)]
        if difference:
            raise RuntimeError(difference)
        self.checked = True
        return mine

    def _list(self) -> list[str]:
        """What of the parameters must be the same on all ranks: with `shard_group` nothing of plain ones."""
        found = []
        for i, p in enumerate(self.params):
            if is_sharded(p):
                mesh: Any = p.device_mesh  # type: ignore[attr-defined]
                # Plain shards are added over one group, so that DTensors beside them must lie on one mesh.
                where = "" if self.own is None else f" over ranks {mesh.mesh.flatten().tolist()}"
                kind = f"{tuple(p.shape)} {p.dtype} {p.placements}"  # type: ignore[attr-defined]
                found.append(f"parameter {i} is {kind}{where}")
            elif self.shards is None:
                found.append(f"parameter {i} is {tuple(p.shape)} {p.dtype}")
        return found


def _gather(mine: Any, group: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _together(known: Sequence[Known]) -> Known:
    """s of whoever knows it, and whether all that have parameters have wide ones."""
    s = next((x.s for x in known if x.s is not None), None)
    wide = [x.wide for x in known if x.wide is not None]
    return Known(s, all(wide) if wide else None)


def _difference(ours: list[str], theirs: list[str], there: str, here: str) -> str:
    """The first difference of two lists; empty where there is none."""
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return f"{b} on {there}, but {a} on {here}"
    if len(ours) != len(theirs):
        return f"{there} has {len(theirs)} parameters and {here} has {len(ours)}"
    return ""


def _other_option(ours: dict[str, Any], theirs: dict[str, Any], there: str, here: str) -> str:
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name)!r} on {there} and {ours.get(name)!r} on {here}"
    return ""


def _other_s(ours: list[Known], theirs: list[Known], there: str, here: str) -> str:
    for k, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.s is not None and b.s is not None and abs(a.s - b.s) > 1e-6:
            return f"the alignment of segment {k} is {b.s} on {there} and {a.s} on {here}"
    return ""


def exchange_of(optimizer: Optimizer) -> Exchange:
    """Of sums over all parameters of any optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return Exchange([params], "global", shards_of(optimizer))


def shards_of(optimizer: Optimizer) -> ShardGroup | None:
    """What was said of its plain tensors; a Warmup tells both of its optimizers."""
    return getattr(unwrap(optimizer), "_shards", None)


def tell_shards(optimizer: Optimizer, shards: ShardGroup | None) -> None:
    """Tells torch's optimizers what one of ours was told: their steps need it not, but a Recorder does."""
    if shards is not None and not hasattr(optimizer, "_shards"):
        optimizer._shards = shards  # type: ignore[attr-defined]


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
