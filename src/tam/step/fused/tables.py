"""The tables of addresses that the fused kernels read, and when they must be made again.

The tables belong to one optimizer. They are made once every parameter with a gradient has state, and fit as
long as parameters and state stay where they are; new gradients only change a column of addresses. An address
alone says little: allocators reuse it for tensors of another layout. `columns.py` describes the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tam.sharding.dtensor import is_dtensor, local_tensor, redistribute_gradient
from tam.sharding.exchange import Exchange
from tam.sharding.shard_group import ShardGroup
from tam.step import run_step
from tam.step.eager import GroupOptions
from tam.step.fused import FusedBackend, cpu, support
from tam.step.fused.columns import KINDS, Option, Row, Segment
from tam.step.rule import Rule

try:
    # Not public, but the same from torch 2.6 to 2.15: one call in C++ compares type, shape, strides, dtype,
    # device and lazy conjugation of a list of tensors in 0.06 us each. Python needs 0.35 us each.
    from torch._C._dynamo import guards
except ImportError:
    guards = None  # type: ignore[assignment]

_grad_of = attrgetter("grad")


class Fingerprint:
    """The addresses and layouts of some tensors, to be compared at every step."""

    def __init__(self, tensors: Sequence[Tensor], addresses: list[int] | None = None) -> None:
        self.addresses = [*map(Tensor.data_ptr, tensors)] if addresses is None else addresses
        self.layouts = [*map(_layout_of, tensors)]
        self.extents = [*map(support.extent_of, tensors)]
        self._guard = _make_guard(tensors)

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if every tensor is where, and as, it was."""
        return [*map(Tensor.data_ptr, tensors)] == self.addresses and self.has_layouts_of(tensors)

    def has_layouts_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if every tensor has the same layout as before, at any address."""
        if len(tensors) != len(self.layouts):
            return False
        if self._guard is not None and self._guard.check(*tensors):
            return True
        # The guard also fails if only requires_grad or a mode such as autocast differs.
        if [*map(_layout_of, tensors)] != self.layouts:
            return False
        self._guard = _make_guard(tensors)
        return True


def _layout_of(x: Tensor) -> tuple[object, ...]:
    """Return what a kernel assumes of a tensor besides its address."""
    return x.dtype, x.device, x.shape, x.stride(), x.is_conj(), x.is_neg()


def _make_guard(tensors: Sequence[Tensor]) -> Any:
    """Return a guard of these tensors' layouts; None if torch has none for them."""
    if guards is None or len(set(map(id, tensors))) < len(tensors):  # it takes each tensor once
        return None
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    try:
        return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (AttributeError, TypeError, RuntimeError):  # it has changed, or does not take such tensors
        return None


class GradientTable:
    """The addresses of gradients in a kernel's table, kept up to date from step to step."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self._fingerprint: Fingerprint | None = None  # of the gradients in the table
        self._has_copies = False

    def update(
        self, grads: Sequence[Tensor | None], present: Sequence[Tensor], addresses: list[int],
        copies: list[Tensor] | None, upload: Callable[[list[int]], None],
    ) -> bool:  # fmt: skip
        """Upload the addresses of the gradients if the table has others; -1 stands for no gradient.

        `present` are the gradients that there are.

        A gradient that a kernel cannot walk through along with its parameter is copied, and the copy added to
        `copies`. If that is None the table stays as it is, and the result is False.
        """
        known = self._fingerprint
        if known is not None and (self._has_copies or not known.has_layouts_of(present)):
            known = None
        if known is not None and addresses == known.addresses:
            return True
        is_aligned = min(addresses) > 0 and not any(address % 16 for address in addresses)
        if known is not None and is_aligned and all(map(support.is_within_storage, present, known.extents)):
            # None until all is done: an interrupted step leaves nothing that a later one trusts.
            self._fingerprint = None
            upload(addresses)  # the gradients are elsewhere, and as they were
            known.addresses = addresses
            self._fingerprint = known
            return True
        usable = self._usable_addresses(grads, copies)
        if usable is None:
            return False
        self._fingerprint = None
        upload(usable)
        self._has_copies = bool(copies)
        self._fingerprint = Fingerprint(present, addresses)
        return True

    def _usable_addresses(
        self, grads: Sequence[Tensor | None], copies: list[Tensor] | None
    ) -> list[int] | None:
        """Return addresses a kernel can use, 0 for no gradient; None if a copy is needed and not allowed."""
        addresses = []
        for p, g in zip(self.params, grads, strict=True):
            if g is None:
                addresses.append(0)
                continue
            if copies is None:
                if not (
                    support.can_walk_together(g, p) and support.is_plain(g) and support.is_within_storage(g)
                ):
                    return None
            else:
                if g.shape != p.shape:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(p.shape)} has a gradient of shape {tuple(g.shape)}: "
                        "set its grad to None, or compute it again"
                    )
                support.check_memory(g, "a gradient")
                if not support.can_walk_together(g, p) or not support.is_plain(g):
                    g = torch.empty_like(p, memory_format=torch.preserve_format).copy_(g)
                    copies.append(g)
            addresses.append(g.data_ptr() or 16)  # an empty tensor has no address, but it is there
        return addresses


class TableInputs(NamedTuple):
    """What the tables are made of."""

    groups: list[GroupOptions]
    state: dict[Tensor, dict[str, Tensor]]
    state_keys: tuple[str, ...]
    shared_options: tuple[str, ...]
    rule: Rule
    segments: list[list[Tensor]]  # the parameters of each segment
    alignments: list[Tensor]  # s of each segment; with an exchange, those the ranks have agreed on
    shards: ShardGroup | None
    possible_exchange: Exchange | None
    exchange: Exchange | None  # the same where the step needs it


class FusedTables:
    """The tables of one optimizer, as long as its parameters and state stay where and as they are."""

    def __init__(self, inputs: TableInputs) -> None:
        groups, state, keys, rule = inputs.groups, inputs.state, inputs.state_keys, inputs.rule
        self.rule, self.exchange = rule, inputs.exchange
        self._shards, self._possible_exchange = inputs.shards, inputs.possible_exchange
        self._shared_options = itemgetter(*inputs.shared_options)
        self._shared_values = [*map(self._shared_options, groups)]
        self._every_param = [p for group in groups for p in group["params"]]
        self._group_sizes = [len(group["params"]) for group in groups]
        with_state = [p for p in self._every_param if rule.momentum_key in state.get(p, ())]
        device = local_tensor(next(p for p in with_state if p.grad is not None)).device
        # One without a gradient takes no part: it may be on another device, or its memory freed.
        self.params = [
            p for p in with_state if p.grad is not None or support.can_join(p, state[p], keys, device)
        ]
        members = set(self.params)
        self._waiting = [p for p in self._every_param if p not in members]
        for p in self.params:
            support.match_layout(p, state[p], keys)
        share_of = self._number_shares(inputs, members)
        self.params.sort(key=share_of.__getitem__)
        self.share_of_row = [share_of[p] for p in self.params]
        # Only our own keys: users and wrappers keep entries there, too.
        self._own_state = itemgetter(*keys, "alignment")
        self._entries = [*state.values()]
        self._states = [state[p] for p in self.params]
        self._state_tensors = [*chain.from_iterable(map(self._own_state, self._states))]
        # A step works on this rank's shards.
        self.has_dtensors = any(map(is_dtensor, self.params))
        shards = [*map(local_tensor, self.params)]
        # Each tensor once: the parameters of a segment share an alignment.
        unique = {id(x): x for x in (*self.params, *self._state_tensors, *self.alignments)}
        self._tensors = tuple(unique.values())
        for x in map(local_tensor, self._tensors):
            support.check_memory(x, "a parameter or its state")
        self._fingerprint = Fingerprint([*map(local_tensor, self._tensors)])
        self._options: list[tuple[object, ...]] = []
        self.backend = _make_backend(
            self._row_table(groups, shards), self._segment_table(), rule, self.exchange is not None, shards
        )
        self._gradients = GradientTable(shards)

    # ------------------------------------------------------------------ making the tables

    def _number_shares(self, inputs: TableInputs, members: set[Tensor]) -> dict[Tensor, int]:
        """Return the share of each parameter; note the segment of each share, and s of each segment.

        Rows are ordered by share, and shares by segment. Without an exchange there is one share per segment,
        and only segments with state take part. With one, every rank settles every segment.
        """
        if inputs.exchange is not None:
            self.segment_of_share = [k for k, _ in inputs.exchange.shares]
            self.alignments = inputs.alignments
            share_of = inputs.exchange.share_of
        else:
            segments = [[p for p in segment if p in members] for segment in inputs.segments]
            segments = [segment for segment in segments if segment]
            self.segment_of_share = list(range(len(segments)))
            self.alignments = [inputs.state[segment[0]]["alignment"] for segment in segments]
            share_of = {p: i for i, segment in enumerate(segments) for p in segment}
        for s in self.alignments:
            if s.numel() != 1:
                raise RuntimeError(f"an alignment must be one number, got a tensor of shape {tuple(s.shape)}")
        return share_of

    def _row_table(self, groups: list[GroupOptions], shards: list[Tensor]) -> Tensor:
        group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        adaptive, momentum_key = self.rule.adaptive, self.rule.momentum_key
        columns: dict[Row, list[int]] = {
            Row.THETA: [p.data_ptr() for p in shards],
            Row.MOMENTUM: [local_tensor(s[momentum_key]).data_ptr() for s in self._states],
            Row.SECOND: [local_tensor(s["exp_avg_sq"]).data_ptr() if adaptive else 0 for s in self._states],
            Row.STEP: [s["step"].data_ptr() if adaptive else 0 for s in self._states],
            Row.NUMEL: [*map(support.numel_as_real, shards)],
            Row.SHARE: self.share_of_row,
            Row.SEGMENT: [self.segment_of_share[k] for k in self.share_of_row],
            Row.GROUP: [group_of[p] for p in self.params],
            Row.KIND: [KINDS.index(support.dtype_name(p)) for p in shards],
        }
        return torch.tensor([columns[key] for key in Row], dtype=torch.int64, device="cpu")

    def _segment_table(self) -> Tensor:
        table = [[0] * len(self.alignments) for _ in Segment]
        for i in reversed(range(len(self.segment_of_share))):
            table[Segment.FIRST][self.segment_of_share[i]] = i
            table[Segment.COUNT][self.segment_of_share[i]] += 1
        table[Segment.ALIGNMENT] = [s.data_ptr() for s in self.alignments]
        table[Segment.WIDE] = [int(s.dtype == torch.float64) for s in self.alignments]
        return torch.tensor(table, dtype=torch.int64, device="cpu")

    # ------------------------------------------------------------------ using the tables

    def fits(
        self, groups: list[GroupOptions], state: dict[Tensor, dict[str, Tensor]], shards: ShardGroup | None,
        exchange: Exchange | None, found_inf: Tensor | None,
    ) -> bool:  # fmt: skip
        """Return True if parameters, state and shared options are still those the tables were made of."""
        params = [group["params"] for group in groups]
        if [*map(len, params)] != self._group_sizes or not all(map(is_, chain(*params), self._every_param)):
            return False
        entries = state.values()
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            # Looking each parameter up is slow; it is only needed if somebody's entries came or went.
            if not all(map(is_, map(state.get, self.params), self._states)):
                return False
            self._entries = [*entries]
        try:
            own_state = chain.from_iterable(map(self._own_state, self._states))
            if not all(map(is_, own_state, self._state_tensors)):
                return False
        except KeyError:
            return False
        if shards is not self._shards or [*map(self._shared_options, groups)] != self._shared_values:
            return False
        if self._possible_exchange is not None:
            if exchange is not self._possible_exchange:
                return False
            is_needed = exchange.is_needed(self.rule.max_grad_norm, found_inf)
            if is_needed != (self.exchange is not None):
                return False
        tensors = tuple(map(local_tensor, self._tensors)) if self.has_dtensors else self._tensors
        return self._fingerprint.matches(tensors) and all(p.grad is None for p in self._waiting)

    def step(
        self, groups: list[GroupOptions], norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None,
        captured: list[object],
    ) -> bool:  # fmt: skip
        """Take one step; |g| goes into `norm`. Return False, and change nothing, if a gradient does not fit.

        What a CUDA graph that captures the step will read is added to `captured`.
        """
        grads: list[Any] = [*map(_grad_of, self.params)]
        if self.has_dtensors:
            grads = [
                g if g is None or g.layout is not torch.strided else redistribute_gradient(p, g)
                for p, g in zip(self.params, grads, strict=True)
            ]
        present = grads
        try:
            addresses = [*map(Tensor.data_ptr, grads)]
        except (TypeError, RuntimeError):  # some have none, or are sparse
            if any(g is not None and g.layout is not torch.strided for g in grads):
                return False
            addresses = [-1 if g is None else g.data_ptr() for g in grads]
            if max(addresses) < 0 and self.exchange is None:
                norm.zero_()
                return True
        if min(addresses) <= 0:  # there are none, empty ones, or such as wrap another tensor
            grads = [g if g is None else local_tensor(g) for g in grads]
            addresses = [-1 if g is None else g.data_ptr() for g in grads]
            present = [g for g in grads if g is not None]
            if any(g.numel() and not g.data_ptr() and type(g) is not Tensor for g in present):
                return False  # a subclass that has no memory of its own
        copies: list[Tensor] = []  # of gradients; alive until the kernels have been started
        if self.backend.is_capturing():
            with self.backend.tables_of_graph():
                table = GradientTable(self._gradients.params)
                table.update(grads, present, addresses, copies, self._upload_gradients)
                eager_options, self._options = self._options, []
                try:
                    self._launch(groups, norm, grad_scale, found_inf)
                finally:
                    self._options = eager_options
            captured.append((self, copies))
        else:
            self._gradients.update(grads, present, addresses, copies, self._upload_gradients)
            self._launch(groups, norm, grad_scale, found_inf)
        moved = [p for p, g in zip(self.params, grads, strict=True) if g is not None]
        torch.autograd.graph.increment_version(moved)  # as an operation of torch would
        return True

    def _launch(
        self, groups: list[GroupOptions], norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Run the kernels, with the options as they are now."""
        options = [*map(_own_options, groups)]
        if options != self._options:
            self._options = []
            self.backend.set_options([_option_row(own, self.rule) for own in options])
            self._options = options
        for i, own in enumerate(options):
            if own[0] is None:  # an lr on the device is read at each step, and stays there
                self.backend.set_lr(i, groups[i]["lr"])
        if grad_scale is not None:
            grad_scale = torch.as_tensor(grad_scale, dtype=torch.float32, device=norm.device)
        if found_inf is not None:  # a number if GradScaler has seen no gradient
            found_inf = torch.as_tensor(found_inf, dtype=torch.float32, device=norm.device)
        self.backend.begin(norm, grad_scale, found_inf)
        if self.exchange is None:
            self.backend.step_alone()
        else:
            run_step(self.backend, self.exchange, found_inf)

    def _upload_gradients(self, addresses: list[int]) -> None:
        """Write the addresses, and behind them for each share whether any of its rows has a gradient."""
        present = [0] * len(self.segment_of_share)
        for address, share in zip(addresses, self.share_of_row, strict=True):
            if address:
                present[share] = 1
        self.backend.set_gradients(addresses + present)


def _make_backend(
    rows: Tensor, segments: Tensor, rule: Rule, exchanges: bool, shards: list[Tensor]
) -> FusedBackend:
    device = shards[0].device
    if device.type == "cpu":
        return cpu.CpuBackend(rows, segments, rule, exchanges)
    from tam.step.fused import cuda  # imports triton

    return cuda.CudaBackend(rows, segments, rule, exchanges, device)


def _own_options(group: GroupOptions) -> tuple[Any, ...]:
    """Return a group's own options as they are compared at each step; lr is None if it is on the device."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = float(lr) if lr.device.type == "cpu" else None
    decay = group["weight_decay"]
    if isinstance(decay, Tensor):  # which somebody may change in place
        decay = float(decay)
    betas = tuple(group["betas"]) if "betas" in group else (group["momentum"], 0.0)
    return lr, betas, group.get("eps", 0.0), group["floor"], decay, group["maximize"]


def _option_row(own: tuple[Any, ...], rule: Rule) -> list[float]:
    lr, (beta1, beta2), eps, floor, decay, maximize = own
    values = {
        Option.LR: lr or 0.0, Option.BETA1: beta1, Option.BETA2: beta2, Option.EPS: eps, Option.FLOOR: floor,
        Option.DECAY: decay, Option.SIGN: -1.0 if maximize else 1.0, Option.SMOOTHING: rule.smoothing,
        Option.MAX_NORM: 0.0 if rule.max_grad_norm is None else rule.max_grad_norm, Option.GAIN: rule.gain,
    }  # fmt: skip
    return [values[key] for key in Option]
