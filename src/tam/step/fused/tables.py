"""The fused step: the tables its kernels read, and when they must be made anew.

A `Fused` belongs to one optimizer. It is made once every parameter that has a gradient has state, and
`fits` as long as parameters and state stay where they are; new gradients only change a column of
addresses. A backend (`cuda.py`, `native.py`) runs the step over the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from tam.sharding import Exchange, is_dtensor, local_gradient, local_tensor
from tam.sharding.dtensor import wait_for_collective
from tam.step.fused import cpu as native
from tam.step.fused.columns import KINDS, Option, Row, Segment
from tam.step.fused.fingerprint import Watch, check_memory, is_plain, is_within_storage
from tam.step.rule import Rule

if TYPE_CHECKING:
    from tam.optimizers.torque import TorqueOptimizer

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Backend(Protocol):
    """A device's way to run the step over the tables."""

    def new_gradients(self, gradients: list[int]) -> None:
        """Another table of gradients."""

    def new_options(self, options: list[list[float]]) -> None:
        """Another option table, a list for each group."""

    def set_lr(self, group: int, lr: Tensor) -> None:
        """The lr of a group from a tensor on the device."""

    def run(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """The step; |g| goes into `norm`."""

    def capturing(self) -> bool:
        """Whether what runs now becomes part of a CUDA graph."""

    def own_tables(self) -> Any:
        """A context in which gradients and options go into tables that belong to the graph alone."""


def obstacle(params: list[Tensor]) -> str | None:
    """Why these parameters cannot take the fused step; None where they can."""
    devices = {local_tensor(p).device for p in params}
    if not devices:
        return "there are no parameters"
    if len(devices) > 1:
        return f"the parameters lie on several devices: {', '.join(sorted(map(str, devices)))}"
    (device,) = devices
    if device.type == "cpu":
        missing, kinds = native.missing(), native.KINDS
    elif device.type == "cuda":
        missing, kinds = no_triton(device), ("float32", "bfloat16", "float16")
    else:
        return f"there is no fused kernel for {device.type} devices"
    if missing is not None:
        return missing
    for p in map(local_tensor, params):
        if type(p) not in (Tensor, Parameter):
            return f"a parameter is a {type(p).__name__}, not a plain tensor"
        if kind_of(p) not in kinds:
            return f"a parameter is {p.dtype}; on {device.type} the kernel takes {', '.join(kinds)}"
        if not is_plain(p):
            return f"a parameter of shape {tuple(p.shape)} is lazily conjugated or negated, or not aligned"
        if not dense(p):
            return f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} has gaps in memory"
    return None


def no_triton(device: torch.device | None = None) -> str | None:
    """Why there are no kernels for CUDA (or for this GPU); None where there are."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    if device is not None and torch.cuda.get_device_capability(device) < (7, 0):
        return "triton needs a GPU of compute capability 7.0 or more"
    return None


def kind_of(p: Tensor) -> str:
    return str(_REAL.get(p.dtype, p.dtype)).removeprefix("torch.")


def dense(p: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order."""
    if p.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Fused:
    """The tables of one optimizer, as long as its parameters and state stay where and as they are."""

    def __init__(self, optimizer: TorqueOptimizer) -> None:
        self.rule: Rule = optimizer.rule
        self.shared = _shared(optimizer)
        self.everything = [p for group in optimizer.param_groups for p in group["params"]]
        self.sizes = [len(group["params"]) for group in optimizer.param_groups]
        keys = optimizer.state_keys(optimizer.param_groups[0])
        # What has no gradient takes no part, whatever became of it: its memory may have been freed.
        self.params = [
            p
            for p in self.everything
            if optimizer.has_state(p) and (p.grad is not None or _can_join(p, optimizer.state[p], keys))
        ]
        members = set(self.params)
        self.waiting = [p for p in self.everything if p not in members]
        for p in self.params:
            _lay_out(p, optimizer.state[p], keys)
        self.exchange = optimizer.exchange_at_hand()
        self.shards, self.plan = optimizer.shards, optimizer._exchange
        self._order(optimizer)
        for s in self.alignments:
            if s.numel() != 1:
                raise RuntimeError(f"an alignment must be one number, got a tensor of shape {tuple(s.shape)}")
        # Only our own keys: users and wrappers keep entries there, too.
        self.own = itemgetter(*keys, "alignment")
        self.entries = [*optimizer.state.values()]
        self.states = [optimizer.state[p] for p in self.params]
        self.state_tensors = [*chain.from_iterable(map(self.own, self.states))]
        # A step works on this rank's pieces.
        self.sharded = any(map(is_dtensor, self.params))
        self.pieces = [*map(local_tensor, self.params)]
        # Each tensor once: the parameters of a segment share an alignment.
        unique = {id(x): x for x in (*self.params, *self.state_tensors, *self.alignments)}
        self.tensors = tuple(unique.values())
        for x in self._watched():
            check_memory(x, "a parameter or its state")
        self.watch = Watch(self._watched())
        self.gradients: Watch | None = None  # as the tables have them
        self.copied = False  # some gradients had to be laid out anew
        self.options: list[tuple[Any, ...]] = []
        backend = _backend(self.pieces[0].device)
        self.backend: Backend = backend(self._rows(optimizer), self._segments(), self.rule, self.exchange)

    def _order(self, optimizer: TorqueOptimizer) -> None:
        """Which share each row belongs to, of which segment each share is, and each segment's s.

        A share is a run of rows, and a segment a run of shares.

        Without an exchange these are the segments of which there is state here, with one share each. With one
        they are all of its shares: every rank settles every segment.
        """
        if self.exchange is not None:
            share_of, self.segment = self.exchange.share_of, [k for k, _ in self.exchange.shares]
            self.alignments = optimizer.alignments()
        else:
            members = set(self.params)
            known = [[p for p in segment if p in members] for segment in optimizer.segments()]
            known = [members for members in known if members]
            share_of = {p: i for i, members in enumerate(known) for p in members}
            self.segment = list(range(len(known)))
            self.alignments = [optimizer.state[members[0]]["alignment"] for members in known]
        self.params.sort(key=share_of.__getitem__)
        self.share = [share_of[p] for p in self.params]

    def _rows(self, optimizer: TorqueOptimizer) -> Tensor:
        group_of = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        states = [optimizer.state[p] for p in self.params]
        columns: dict[Row, list[int]] = {
            Row.THETA: [p.data_ptr() for p in self.pieces],
            Row.MOMENTUM: [local_tensor(s[self.rule.momentum]).data_ptr() for s in states],
            Row.SECOND: [
                local_tensor(s["exp_avg_sq"]).data_ptr() if self.rule.adaptive else 0 for s in states
            ],
            Row.STEP: [s["step"].data_ptr() if self.rule.adaptive else 0 for s in states],
            Row.NUMEL: [p.numel() * (2 if p.is_complex() else 1) for p in self.pieces],
            Row.SHARE: self.share,
            Row.SEGMENT: [self.segment[k] for k in self.share],
            Row.GROUP: [group_of[p] for p in self.params],
            Row.KIND: [KINDS.index(kind_of(p)) for p in self.pieces],
        }
        return torch.tensor([columns[key] for key in Row], dtype=torch.int64)

    def _segments(self) -> Tensor:
        """Each segment is a run of shares."""
        table = [[0] * len(self.alignments) for _ in Segment]
        for i in reversed(range(len(self.segment))):
            table[Segment.FIRST][self.segment[i]] = i
            table[Segment.COUNT][self.segment[i]] += 1
        table[Segment.ALIGNMENT] = [s.data_ptr() for s in self.alignments]
        table[Segment.WIDE] = [int(s.dtype == torch.float64) for s in self.alignments]
        return torch.tensor(table, dtype=torch.int64)

    def fits(self, optimizer: TorqueOptimizer) -> bool:
        """Return True if parameters, state and rule are still those the tables were made of."""
        return (
            self._same_parameters(optimizer)
            and self._same_state(optimizer)
            and self.watch.holds(self._watched())
            and all(p.grad is None for p in self.waiting)
            and _shared(optimizer) == self.shared
            and optimizer.shards is self.shards
            and (self.plan is None or self._exchanges_as_before(optimizer))
        )

    def _same_parameters(self, optimizer: TorqueOptimizer) -> bool:
        groups = [group["params"] for group in optimizer.param_groups]
        return [*map(len, groups)] == self.sizes and all(map(is_, chain(*groups), self.everything))

    def _same_state(self, optimizer: TorqueOptimizer) -> bool:
        """Return True if the state consists of the same tensors as before."""
        entries = optimizer.state.values()
        if len(entries) != len(self.entries) or not all(map(is_, entries, self.entries)):
            # Looking each parameter up is slow; it is only needed where somebody's entries came or went.
            if not all(map(is_, map(optimizer.state.get, self.params), self.states)):
                return False
            self.entries = [*entries]
        try:
            return all(map(is_, chain.from_iterable(map(self.own, self.states)), self.state_tensors))
        except KeyError:
            return False

    def _watched(self) -> tuple[Tensor, ...]:
        """Return the tensors whose addresses the kernels have, gradients aside."""
        return tuple(map(local_tensor, self.tensors)) if self.sharded else self.tensors

    def _exchanges_as_before(self, optimizer: TorqueOptimizer) -> bool:
        plan, inf = optimizer._exchange, getattr(optimizer, "found_inf", None)
        if plan is None or plan is not self.plan:
            return False
        return plan.is_needed(self.rule.max_grad_norm, inf) == (self.exchange is not None)

    def step(self, optimizer: TorqueOptimizer, norm: Tensor) -> bool:
        """One step; |g| goes into `norm`. False, and nothing done, where the tables do not fit."""
        grads = [p.grad for p in self.params]
        if self.sharded:
            grads = [
                g if g is None or g.layout is not torch.strided else local_gradient(p, g)
                for p, g in zip(self.params, grads, strict=True)
            ]
        present = grads
        try:
            addresses = [*map(_address, grads)]
        except (TypeError, RuntimeError):  # some have none, or are sparse
            if any(g is not None and g.layout is not torch.strided for g in grads):
                return False
            addresses = [-1 if g is None else g.data_ptr() for g in grads]
            if max(addresses) < 0 and self.exchange is None:
                return True
        if min(addresses) <= 0:  # there are none, empty ones, or such as wrap another tensor
            grads = [g if g is None else wait_for_collective(local_tensor(g)) for g in grads]
            addresses = [-1 if g is None else g.data_ptr() for g in grads]
            present = [g for g in grads if g is not None]
            if any(g.numel() and not g.data_ptr() and type(g) is not Tensor for g in present):
                return False  # a subclass that has no memory of its own
        scale, inf = (_scalar(getattr(optimizer, name, None), norm) for name in ("grad_scale", "found_inf"))
        copies: list[Tensor] = []
        if self.backend.capturing():
            with self.backend.own_tables():
                self._set_gradients(self._usable(grads, copies))
                self._set_options(optimizer)
                self._set_device_rates(optimizer)
                self.backend.run(norm, scale, inf)
            # A graph's replay reads all of this.
            optimizer._captured.append((self, copies))
        else:
            self._follow_gradients(grads, present, addresses, copies)
            options = [*map(_own_options, optimizer.param_groups)]
            if options != self.options:
                self.options = []
                self._set_options(optimizer)
                self.options = options
            self._set_device_rates(optimizer)
            self.backend.run(norm, scale, inf)
        moved = [p for p, g in zip(self.params, grads, strict=True) if g is not None]
        torch.autograd.graph.increment_version(moved)  # as an operation of torch would
        return True

    def _set_options(self, optimizer: TorqueOptimizer) -> None:
        self.backend.new_options([_options(group, self.rule) for group in optimizer.param_groups])

    def _set_device_rates(self, optimizer: TorqueOptimizer) -> None:
        """An lr that is a tensor on the device is read at each step, and stays there."""
        for i, group in enumerate(optimizer.param_groups):
            if _on_device(group["lr"]):
                self.backend.set_lr(i, group["lr"])

    def _follow_gradients(
        self, grads: list[Tensor | None], present: list[Tensor], addresses: list[int], copies: list[Tensor]
    ) -> None:
        """Bring the table of gradients up to date; copy those that are laid out unlike their parameters."""
        seen = self.gradients
        same = seen is not None and not self.copied and seen.same_layouts(present)
        if seen is not None and same and addresses == seen.addresses:
            return
        # Noted when all is done: a step that is interrupted here leaves nothing that a later one trusts.
        self.gradients = None
        moved = seen is not None and same and min(addresses) > 0 and not any(a % 16 for a in addresses)
        if seen is not None and moved and seen.within_storage(present):
            self._set_gradients(addresses)  # they lie elsewhere, and are as they were
            seen.addresses = addresses
            self.gradients = seen
            return
        self._set_gradients(self._usable(grads, copies))
        self.copied = bool(copies)
        self.gradients = Watch(present, addresses)

    def _usable(self, grads: list[Tensor | None], copies: list[Tensor]) -> list[int]:
        """Return the gradients' addresses, 0 where there is none, of copies where a kernel needs them."""
        addresses = []
        for p, g in zip(self.pieces, grads, strict=True):
            if g is None:
                addresses.append(0)
                continue
            if g.shape != p.shape:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient of shape {tuple(g.shape)}: "
                    "set its grad to None, or compute it again"
                )
            check_memory(g, "a gradient")
            if (g.dtype, g.device) != (p.dtype, p.device) or not alike(g, p) or not is_plain(g):
                g = torch.empty_like(p, memory_format=torch.preserve_format).copy_(g)
                copies.append(g)
            addresses.append(g.data_ptr() or 16)  # an empty tensor has no address, but it is there
        return addresses

    def _set_gradients(self, addresses: list[int]) -> None:
        present = [0] * len(self.segment)
        for address, share in zip(addresses, self.share, strict=True):
            if address:
                present[share] = 1
        self.backend.new_gradients(addresses + present)


def alike(x: Tensor, p: Tensor) -> bool:
    """Whether two tensors are laid out alike; a dimension of size 1 may have any stride."""
    if x.shape != p.shape:
        return False
    return x.stride() == p.stride() or all(
        a == b or n <= 1 for a, b, n in zip(x.stride(), p.stride(), p.shape, strict=True)
    )


def _scalar(x: Any, norm: Tensor) -> Tensor | None:
    """GradScaler's; a number where it has seen no gradient."""
    return None if x is None else torch.as_tensor(x, dtype=torch.float32, device=norm.device)


def _lay_out(p: Tensor, state: dict[str, Tensor], keys: tuple[str, ...]) -> None:
    """Lay a parameter's state out as the parameter is: a kernel walks through them side by side.

    They differ after a load of a checkpoint made with other strides, and after the parameter was moved.
    """
    for key in keys:
        x = state[key]
        if key == "step":  # counted where the parameter is
            if x.numel() != 1:
                raise RuntimeError(f"a step count must be one number, got a tensor of shape {tuple(x.shape)}")
            state[key] = x.to(p.device, torch.float32)
            continue
        if x.shape != p.shape:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has a {key} of shape {tuple(x.shape)}: parameters "
                "that change their shape need a new optimizer"
            )
        own = local_tensor(x)
        if x.dtype != p.dtype or x.device != p.device or not alike(own, local_tensor(p)) or not is_plain(own):
            state[key] = torch.empty_like(p, memory_format=torch.preserve_format).copy_(x)


def _can_join(p: Tensor, state: dict[str, Tensor], keys: tuple[str, ...]) -> bool:
    """Return True if the kernels can take a parameter that has state and no gradient now."""
    tensors = [local_tensor(p), *(local_tensor(state[key]) for key in keys)]
    shapes = all(state[key].shape == p.shape for key in keys if key != "step")
    return shapes and obstacle([p]) is None and all(map(is_within_storage, tensors))


def _backend(device: torch.device) -> Callable[[Tensor, Tensor, Rule, Exchange | None], Backend]:
    if device.type == "cpu":
        return native.Native
    from tam.step.fused import cuda

    return partial(cuda.Cuda, device=device)


_address = Tensor.data_ptr


def _shared(optimizer: TorqueOptimizer) -> list[list[Any]]:
    """The options every group must have alike, of each: where they differ, the making of tables tells."""
    return [[group[name] for name in optimizer.shared_options] for group in optimizer.param_groups]


def _on_device(lr: Any) -> bool:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def _own_options(group: dict[str, Any]) -> tuple[Any, ...]:
    """What `_options` makes a row of, as it is compared at each step."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = None if _on_device(lr) else float(lr)
    beta = tuple(group["betas"]) if "betas" in group else group["momentum"]
    return lr, beta, group.get("eps"), group["floor"], group["weight_decay"], group["maximize"]


def _options(group: dict[str, Any], rule: Rule) -> list[float]:
    lr, beta, eps, floor, decay, maximize = _own_options(group)
    beta1, beta2 = beta if rule.adaptive else (beta, 0.0)
    found = {
        Option.LR: lr or 0.0,
        Option.BETA1: beta1,
        Option.BETA2: beta2,
        Option.EPS: eps or 0.0,
        Option.FLOOR: floor,
        Option.DECAY: decay,
        Option.SIGN: -1.0 if maximize else 1.0,
        Option.SMOOTHING: rule.smoothing,
        Option.MAX_NORM: 0.0 if rule.max_grad_norm is None else rule.max_grad_norm,
        Option.GAIN: rule.gain,
    }
    return [found[key] for key in Option]
