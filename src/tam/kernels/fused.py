"""The fused step: the tables its kernels read, and when they must be made anew.

A `Fused` belongs to one optimizer. It is made once every parameter that has a gradient has state, and
`fits` as long as parameters and state stay where they are; new gradients only change a column of
addresses. A backend (`cuda.py`, `native.py`) runs the step over the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from tam.distributed import Exchange, arrived, is_sharded, local, local_gradient
from tam.kernels import native
from tam.kernels.tables import KINDS, Option, Row, Segment
from tam.kernels.torque import Rule

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
    devices = {local(p).device for p in params}
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
    for p in map(local, params):
        if type(p) not in (Tensor, Parameter):
            return f"a parameter is a {type(p).__name__}, not a plain tensor"
        if kind_of(p) not in kinds:
            return f"a parameter is {p.dtype}; on {device.type} the kernel takes {', '.join(kinds)}"
        if p.is_conj() or p.is_neg():
            return "a parameter is lazily conjugated or negated"
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
    """The tables of one optimizer, as long as its parameters and state stay where they are."""

    def __init__(self, optimizer: TorqueOptimizer) -> None:
        self.rule: Rule = optimizer.rule
        self.shared = _shared(optimizer)
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self.params = [p for p in everything if optimizer.state.get(p)]
        self.waiting = [p for p in everything if not optimizer.state.get(p)]
        for p in self.params:
            _lay_out(p, optimizer.state[p], optimizer.state_keys(optimizer.param_groups[0]))
        self.exchange = optimizer.exchange_at_hand()
        self.shards, self.plan = optimizer._shards, optimizer._exchange
        self._order(optimizer)
        self.tensors = [*all_tensors(optimizer)]
        self.counts = counts(optimizer)
        # A step works on this rank's pieces.
        self.sharded = any(map(is_sharded, self.params))
        self.pieces = [*map(local, self.params)]
        self.addresses = [*map(_address, self.pieces)]
        self.layouts = [*map(_layout, self.pieces)]
        self.gradients: list[int] = []  # their addresses, as the tables have them
        self.copied = False  # some gradients had to be laid out anew
        self.options: list[tuple[Any, ...]] = []
        self.some_state = self._address_of_some_state()
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
            known = [[p for p in segment if optimizer.state.get(p)] for segment in optimizer.segments()]
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
            Row.THETA: self.addresses,
            Row.MOMENTUM: [local(s[self.rule.momentum]).data_ptr() for s in states],
            Row.SECOND: [local(s["exp_avg_sq"]).data_ptr() if self.rule.adaptive else 0 for s in states],
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
        """Whether parameters, state and rule are still those the tables were made of.

        State is compared by identity, and by the address of one parameter's: whoever moves state
        behind its tensors' backs (`x.data = ...`) moves all of it.
        """
        return (
            counts(optimizer) == self.counts
            and all(map(is_, all_tensors(optimizer), self.tensors))
            and [*map(_address, self._pieces())] == self.addresses
            and self._address_of_some_state() == self.some_state
            and all(p.grad is None for p in self.waiting)
            and _shared(optimizer) == self.shared
            and optimizer._shards is self.shards
            and (self.plan is None or self._exchanges_as_before(optimizer))
        )

    def _exchanges_as_before(self, optimizer: TorqueOptimizer) -> bool:
        plan, inf = optimizer._exchange, getattr(optimizer, "found_inf", None)
        if plan is None or plan is not self.plan:
            return False
        return plan.needed(self.rule.max_grad_norm, inf) == (self.exchange is not None)

    def _address_of_some_state(self) -> list[int]:
        return [local(x).data_ptr() for x in self.tensors[-4:]]

    def _pieces(self) -> list[Tensor]:
        return [*map(local, self.params)] if self.sharded else self.params

    def step(self, optimizer: TorqueOptimizer, norm: Tensor) -> bool:
        """One step; |g| goes into `norm`. False, and nothing done, where the tables do not fit."""
        grads = [p.grad for p in self.params]
        if self.sharded:
            grads = [
                g if g is None or g.layout is not torch.strided else local_gradient(p, g)
                for p, g in zip(self.params, grads, strict=True)
            ]
        try:
            gradients = [*map(_address, grads)]
        except (TypeError, RuntimeError):  # some have none, or are sparse
            if any(g is not None and g.layout is not torch.strided for g in grads):
                return False
            gradients = [-1 if g is None else g.data_ptr() for g in grads]
            if max(gradients) < 0 and self.exchange is None:
                return True
        if 0 in gradients:  # empty ones, or such as wrap another tensor
            grads = [g if g is None else arrived(local(g)) for g in grads]
            gradients = [-1 if g is None else g.data_ptr() for g in grads]
        scale, inf = (_scalar(getattr(optimizer, name, None), norm) for name in ("grad_scale", "found_inf"))
        copies: list[Tensor] = []
        if self.backend.capturing():
            with self.backend.own_tables():
                self._set_gradients(grads, copies)
                self._set_options(optimizer)
                self._set_device_rates(optimizer)
                self.backend.run(norm, scale, inf)
            # A graph's replay reads all of this.
            optimizer._captured.append((self, copies))
        else:
            if gradients != self.gradients or self.copied:
                if [*map(_layout, self._pieces())] != self.layouts:
                    return False
                self._set_gradients(grads, copies)
                self.gradients, self.copied = gradients, bool(copies)
            options = [*map(_own_options, optimizer.param_groups)]
            if options != self.options:
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

    def _set_gradients(self, grads: list[Tensor | None], copies: list[Tensor]) -> None:
        addresses, present = [], [0] * len(self.segment)
        for p, g, share in zip(self.pieces, grads, self.share, strict=True):
            if g is None:
                addresses.append(0)
                continue
            present[share] = 1
            if g.dtype != p.dtype or not alike(g, p) or g.is_conj() or g.is_neg():
                g = torch.empty_like(p, memory_format=torch.preserve_format).copy_(g)
                copies.append(g)
            addresses.append(g.data_ptr() or 16)  # an empty tensor has no address, but it is there
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
    """Lays a parameter's state out as the parameter is: a kernel walks through them side by side.

    They differ after a load of a checkpoint made with other strides, and after the parameter was moved.
    """
    for key in keys:
        x = state[key]
        if key == "step":  # counted where the parameter is
            state[key] = x.to(p.device, torch.float32)
        elif x.dtype != p.dtype or x.device != p.device or not alike(local(x), local(p)):
            state[key] = torch.empty_like(p, memory_format=torch.preserve_format).copy_(x)


def _backend(device: torch.device) -> Callable[[Tensor, Tensor, Rule, Exchange | None], Backend]:
    if device.type == "cpu":
        return native.Native
    from tam.kernels import cuda

    return partial(cuda.Cuda, device=device)


_address = Tensor.data_ptr


def _layout(p: Tensor) -> tuple[Any, ...]:
    return p.dtype, p.device, p.shape, p.stride()


def all_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """All parameters, then all state."""
    groups = (group["params"] for group in optimizer.param_groups)
    return chain(*groups, chain.from_iterable(map(dict.values, optimizer.state.values())))


def _shared(optimizer: TorqueOptimizer) -> list[list[Any]]:
    """The options every group must have alike, of each: where they differ, the making of tables tells."""
    return [[group[name] for name in optimizer.shared_options] for group in optimizer.param_groups]


def counts(optimizer: Optimizer) -> tuple[list[int], int, int]:
    groups = [len(group["params"]) for group in optimizer.param_groups]
    return groups, len(optimizer.state), sum(map(len, optimizer.state.values()))


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
    }
    return [found[key] for key in Option]
