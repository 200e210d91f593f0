"""Segments: which parameters share one cosine, and the tensors in which they share its smoothed value s."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.sharding.agreement import SegmentInfo, agree_across_ranks
from tam.sharding.dtensor import has_other_ranks
from tam.sharding.exchange import Exchange
from tam.sharding.shard_group import ShardGroup

DOUBLE = (torch.float64, torch.complex128)


class Segments:
    """The segments of one optimizer under its scope, and the scalars its steps write in place.

    The parameters of a segment have one tensor s as `state[p]["alignment"]`.
    """

    def __init__(self, optimizer: Optimizer, momentum_key: str) -> None:
        self.momentum_key = momentum_key
        self.grad_norm: Tensor | None = None  # |g| of the last step
        # s of segments of which this rank has no state, but other ranks have some; by segment.
        self._alignments_without_state: dict[int, Tensor] = {}
        # Whether s is float64 by the parameters of all ranks, where they have agreed; by segment.
        self._is_float64: dict[int, bool] = {}
        self.attach(optimizer)

    def attach(self, optimizer: Optimizer) -> None:
        """Make these the segments of the optimizer, which a copy or an unpickled object must do again."""
        # Its groups and state are read from it each time: loading replaces them. The reference is weak: a
        # dropped optimizer then frees its memory at once.
        self.optimizer: Optimizer = weakref.proxy(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def has_state(self, p: Tensor) -> bool:
        """Return True if the parameter has had a gradient. Users may keep other entries in its state."""
        return self.momentum_key in self.optimizer.state.get(p, ())

    # ------------------------------------------------------------------ membership

    def members(self) -> list[list[Tensor]]:
        """Return the parameters of each segment, with or without gradients."""
        optimizer = self.optimizer
        groups = [group["params"] for group in optimizer.param_groups]
        scope = (optimizer.param_groups or [optimizer.defaults])[0]["scope"]
        if scope == "group":
            return groups
        if scope not in ("global", "tensor"):
            raise ValueError(f'scope must be "global", "group" or "tensor", got {scope!r}')
        everything = list(chain(*groups))
        return [everything] if scope == "global" else [[p] for p in everything]

    def alignments(self) -> list[Tensor]:
        """Return s of each segment: the tensor its parameters share."""
        return [self._alignment_of(k, segment) for k, segment in enumerate(self.members())]

    def _alignment_of(self, k: int, segment: Iterable[Tensor]) -> Tensor:
        """Return the tensor the parameters of segment k share; a new 0 before its first gradient."""
        state, params = self.optimizer.state, []
        for p in segment:
            entry = state.get(p, {})
            if "alignment" in entry:
                return entry["alignment"]  # type: ignore[no-any-return]
            params.append(p)
        return (
            self._alignments_without_state[k] if k in self._alignments_without_state else new_scalar(params)
        )

    def alignment_for(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the alignment of a parameter that gets state."""
        groups = self.optimizer.param_groups
        everything: Iterable[Tensor] = chain.from_iterable(g["params"] for g in groups)
        k, segment = 0, everything  # no list is made: this is done for each parameter
        if group["scope"] == "group":
            k, segment = next(i for i, g in enumerate(groups) if g is group), group["params"]
        elif group["scope"] == "tensor":
            known = self._alignments_without_state
            k, segment = next(i for i, q in enumerate(everything) if q is p) if known else 0, [p]
        return self._alignment_of(k, segment)

    # ------------------------------------------------------------------ shared tensors

    def share_alignments(self, values: Mapping[Tensor, Tensor]) -> None:
        """Give the parameters of each segment that have state one tensor, with the given s."""
        state = self.optimizer.state
        for k, segment in enumerate(self.members()):
            members = [*filter(self.has_state, segment)]
            if not members:
                continue
            home = next((p for p in members if p.grad is not None), members[0])
            shared = torch.zeros((), dtype=self._dtype_of(k, segment), device=home.device)
            s = next((values[p] for p in members if p in values), None)
            if s is not None:
                shared.copy_(s.detach().reshape(()))
            for p in members:  # last, so an interrupted call leaves the old tensors
                state[p]["alignment"] = shared

    def share_again(self) -> None:
        """Share the alignments that there are, after something about the parameters has changed."""
        state = self.optimizer.state
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = {p: state[p]["alignment"] for p in params if "alignment" in state.get(p, {})}
        if known:
            self.share_alignments(known)

    def share_after_step(self) -> None:
        """Share s with the parameters that had no gradient in a pure step, which made new tensors."""
        state = self.optimizer.state
        for segment in self.members():
            moved = [p for p in segment if p.grad is not None]
            for p in segment:
                if moved and "alignment" in state.get(p, {}):
                    state[p]["alignment"] = state[moved[0]]["alignment"]

    def move_state_to_params(self, state_keys: tuple[str, ...]) -> None:
        """Bring state to the devices of parameters that were moved, and s to their dtype."""
        state, has_changed = self.optimizer.state, False
        norm_home: torch.device | None = None
        seen: set[int] = set()  # the alignments of earlier segments: a finer scope must not share them
        for k, segment in enumerate(self.members()):
            members = [p for p in segment if self.momentum_key in state.get(p, ())]
            if not members:
                continue
            alignment = state[members[0]]["alignment"]
            for p in members:
                entry = state[p]
                for key in state_keys:
                    if key != "step" and entry[key].device != p.device:
                        entry[key] = entry[key].to(p.device)
                        has_changed = True
                # ZeroRedundancyOptimizer loads state by itself: each parameter then has a copy of s.
                has_changed |= entry["alignment"] is not alignment
            home = next((p for p in members if p.grad is not None), members[0])
            if norm_home is None and home.grad is not None:
                norm_home = home.device
            has_changed |= id(alignment) in seen or alignment.device != home.device
            seen.add(id(alignment))
            has_changed |= alignment.dtype != self._dtype_of(k, segment)
        if has_changed:
            self.share_again()
        norm = self.grad_norm
        if norm is not None and (has_changed or norm_home not in (None, norm.device)):
            self.grad_norm = self.new_grad_norm()

    def knows_grad_norm(self) -> bool:
        """Return True if |g| can be known: not if ranks exchange nothing."""
        optimizer = self.optimizer
        options = (optimizer.param_groups or [optimizer.defaults])[0]
        shards: ShardGroup | None = getattr(optimizer, "shards", None)
        if shards is None or options["max_grad_norm"] is not None or options["scope"] != "tensor":
            return True
        return shards.group is None or not has_other_ranks(shards.group)

    def clear_grad_norm(self) -> None:
        """Note that the last step had no gradient."""
        if self.grad_norm is not None:
            self.grad_norm.zero_()

    def new_grad_norm(self) -> Tensor:
        """Return a 0 of the dtype and on the device of |g|."""
        return new_scalar([p for group in self.optimizer.param_groups for p in group["params"]])

    def _dtype_of(self, k: int, segment: list[Tensor]) -> torch.dtype:
        """Return the dtype of s of segment k: float64 if all parameters are, on other ranks, too."""
        here = bool(segment) and all(p.dtype in DOUBLE for p in segment)
        is_float64 = self._is_float64.get(k, here) and (here or not segment)
        return torch.float64 if is_float64 else torch.float32

    # ------------------------------------------------------------------ other ranks

    def agree_across_ranks(self, exchange: Exchange, options: dict[str, object]) -> None:
        """Compare options and parameters with the other ranks, and take over s that only they know."""
        segments = self.members()
        known = [
            SegmentInfo(
                float(s) if any(map(self.has_state, segment)) else None,
                scalar_dtype(segment) == torch.float64 if segment else None,
            )
            for s, segment in zip(self.alignments(), segments, strict=True)
        ]
        agreed = agree_across_ranks(exchange, known, options)
        self._is_float64 = {k: bool(info.is_float64) for k, info in enumerate(agreed)}
        for k, (segment, ours, all_ranks) in enumerate(zip(segments, known, agreed, strict=True)):
            if ours.alignment is None:
                s = torch.zeros((), dtype=self._dtype_of(k, segment), device=exchange.device)
                self._alignments_without_state[k] = s.fill_(all_ranks.alignment or 0.0)
        self.share_again()
        for s, info in zip(self.alignments(), agreed, strict=True):
            if info.alignment is not None:
                s.fill_(info.alignment)  # to the bit

    def forget_other_ranks(self) -> None:
        """Forget s that only other ranks know: after a load all ranks agree again."""
        self._alignments_without_state.clear()


def new_scalar(params: list[Tensor]) -> Tensor:
    """Return a 0 for these parameters, on the device of the first that has a gradient."""
    home = next((p for p in params if p.grad is not None), params[0] if params else None)
    return torch.zeros((), dtype=scalar_dtype(params), device="cpu" if home is None else home.device)


def scalar_dtype(params: list[Tensor]) -> torch.dtype:
    """Return float64 if all parameters are (complex128 counts as float64), else float32."""
    is_double = bool(params) and all(p.dtype in DOUBLE for p in params)
    return torch.float64 if is_double else torch.float32
