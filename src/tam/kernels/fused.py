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

from tam.kernels import native
from tam.kernels.tables import KINDS, Option, Row, Segment
from tam.kernels.torque import Rule

if TYPE_CHECKING:
    from tam.optimizers.torque import TorqueOptimizer

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Backend(Protocol):
    """A device's way to run the step over the tables."""

    def new_gradients(self, gradients: Tensor) -> None:
        """Another table of gradients."""

    def new_options(self, options: Tensor) -> None:
        """Another option table."""

    def set_lr(self, group: int, lr: Tensor) -> None:
        """The lr of a group from a tensor on the device."""

    def measure(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Measures and settles; |g| goes into `norm`."""

    def update(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Moves the parameters. What was not measured before is measured here."""

    def take_over(self, other: Any) -> None:
        """What another backend of the same kind, with the same segments, has measured."""


def obstacle(params: list[Tensor]) -> str | None:
    """Why these parameters cannot take the fused step; None where they can."""
    devices = {p.device for p in params}
    if not devices:
        return "there are no parameters"
    if len(devices) > 1:
        return f"the parameters lie on several devices: {', '.join(sorted(map(str, devices)))}"
    (device,) = devices
    if device.type == "cpu":
        missing, kinds = native.missing(), native.KINDS
    elif device.type == "cuda":
        missing, kinds = no_triton(), ("float32", "bfloat16", "float16")
    else:
        return f"there is no fused kernel for {device.type} devices"
    if missing is not None:
        return missing
    for p in params:
        if type(p) not in (Tensor, Parameter):
            return f"a parameter is a {type(p).__name__}, not a plain tensor"
        if _kind(p) not in kinds:
            return f"a parameter is {p.dtype}; on {device.type} the kernel takes {', '.join(kinds)}"
        if not _dense(p):
            return f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} has gaps in memory"
    return None


def no_triton() -> str | None:
    """Why there are no kernels for CUDA; None where there are."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None


def _kind(p: Tensor) -> str:
    return str(_REAL.get(p.dtype, p.dtype)).removeprefix("torch.")


def _dense(p: Tensor) -> bool:
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
        self.params = [p for p in everything if p in optimizer.state]
        self.waiting = [p for p in everything if p not in optimizer.state]
        for p in self.params:
            _lay_out(p, optimizer.state[p])
        self.tensors = [*_tensors(optimizer)]
        self.count = _count(optimizer)
        self.addresses = [*map(_address, self.params)]
        self.sorts = [*map(_sort, self.params)]
        self.grads: list[Tensor | None] = []
        self.found: list[int] = []  # addresses of the gradients now
        self.gradients: list[int] = []  # and as the tables have them
        self.copies: list[Tensor] = []  # gradients laid out anew, as their parameters are
        self.options: list[tuple[Any, ...]] = []
        rows, segments = self._rows(optimizer), self._segments(optimizer)
        self.backend: Backend = _backend(self.params[0].device)(rows, segments, self.rule)

    def _rows(self, optimizer: TorqueOptimizer) -> Tensor:
        state = optimizer.state
        groups = [i for i, g in enumerate(optimizer.param_groups) for p in g["params"] if p in state]
        self.segment = {
            "global": [0] * len(groups),
            "group": [sorted(set(groups)).index(i) for i in groups],
            "tensor": list(range(len(groups))),
        }[self.rule.scope]
        states = [state[p] for p in self.params]
        columns: dict[Row, list[int]] = {
            Row.THETA: self.addresses,
            Row.MOMENTUM: [s[self.rule.momentum].data_ptr() for s in states],
            Row.SECOND: [s["exp_avg_sq"].data_ptr() if self.rule.adaptive else 0 for s in states],
            Row.STEP: [s["step"].data_ptr() if self.rule.adaptive else 0 for s in states],
            Row.NUMEL: [p.numel() * (2 if p.is_complex() else 1) for p in self.params],
            Row.SEGMENT: self.segment,
            Row.GROUP: groups,
            Row.KIND: [KINDS.index(_kind(p)) for p in self.params],
        }
        return torch.tensor([columns[key] for key in Row], dtype=torch.int64)

    def _segments(self, optimizer: TorqueOptimizer) -> Tensor:
        """Each segment is a run of rows."""
        table = [[0] * (self.segment[-1] + 1) for _ in Segment]
        for j in reversed(range(len(self.params))):
            k, s = self.segment[j], optimizer.state[self.params[j]]["alignment"]
            table[Segment.FIRST][k] = j
            table[Segment.COUNT][k] += 1
            table[Segment.ALIGNMENT][k] = s.data_ptr()
            table[Segment.WIDE][k] = int(s.dtype == torch.float64)
        return torch.tensor(table, dtype=torch.int64)

    def fits(self, optimizer: TorqueOptimizer) -> bool:
        """Whether parameters, state and rule are still those the tables were made of.

        Parameters may have been moved in memory: `step` sees to that.
        """
        return (
            _count(optimizer) == self.count
            and all(map(is_, _tensors(optimizer), self.tensors))
            and all(p.grad is None for p in self.waiting)
            and _shared(optimizer) == self.shared
            and (self._same_gradients() or [*map(_sort, self.params)] == self.sorts)
        )

    def _same_gradients(self) -> bool:
        """Looks up the gradients; whether they are where they were."""
        self.grads = [p.grad for p in self.params]
        try:
            self.found = [*map(_address, self.grads)]  # type: ignore[arg-type]
        except TypeError:  # some have none
            self.found = [-1 if g is None else g.data_ptr() for g in self.grads]
        return self.found == self.gradients

    def step(self, optimizer: TorqueOptimizer, norm: Tensor) -> Fused:
        """One step; |g| goes into `norm`. Returns the tables that fit from here on.

        The device measures while the host still looks whether the parameters are where they were.
        """
        amp = (norm, getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))
        self._refresh(optimizer)
        self.backend.measure(*amp)
        if [*map(_address, self.params)] == self.addresses:
            self.backend.update(*amp)
            return self
        moved = Fused(optimizer)
        moved._same_gradients()
        moved._refresh(optimizer)
        moved.backend.take_over(self.backend)
        moved.backend.update(*amp)
        return moved

    def _refresh(self, optimizer: TorqueOptimizer) -> None:
        """Gradients and options as they are now."""
        if self.found != self.gradients or self.copies:
            self._new_gradients()
            self.gradients = self.found
        options = [*map(_own_options, optimizer.param_groups)]
        if options != self.options:
            table = [_options(group, self.rule) for group in optimizer.param_groups]
            self.backend.new_options(torch.tensor(table, dtype=torch.float64))
            self.options = options
        for i, group in enumerate(optimizer.param_groups):
            if _on_device(group["lr"]):
                self.backend.set_lr(i, group["lr"])

    def _new_gradients(self) -> None:
        self.copies = []
        addresses, active = [], [0] * (self.segment[-1] + 1)
        for p, g, segment in zip(self.params, self.grads, self.segment, strict=True):
            if g is None:
                addresses.append(0)
                continue
            active[segment] = 1
            if g.dtype != p.dtype or g.stride() != p.stride() or g.is_conj() or g.is_neg():
                g = torch.empty_like(p, memory_format=torch.preserve_format).copy_(g)
                self.copies.append(g)
            addresses.append(g.data_ptr() or 16)  # an empty tensor has no address, but it is there
        self.backend.new_gradients(torch.tensor(addresses + active, dtype=torch.int64))


def _lay_out(p: Tensor, state: dict[str, Tensor]) -> None:
    """Lays a parameter's state out as the parameter is: a kernel walks through them side by side.

    They differ after a load of a checkpoint made with other strides, and after the parameter was moved.
    """
    for key, x in state.items():
        if key == "step":  # counted where the parameter is
            state[key] = x.to(p.device, torch.float32)
        elif key == "alignment":
            continue
        elif x.dtype != p.dtype or x.device != p.device or x.stride() != p.stride():
            state[key] = torch.empty_like(p, memory_format=torch.preserve_format).copy_(x)


def _backend(device: torch.device) -> Callable[[Tensor, Tensor, Rule], Backend]:
    if device.type == "cpu":
        return native.Native
    from tam.kernels import cuda

    return partial(cuda.Cuda, device=device)


_address = Tensor.data_ptr


def _sort(p: Tensor) -> tuple[torch.dtype, torch.device]:
    return p.dtype, p.device


def _tensors(optimizer: TorqueOptimizer) -> Iterator[Tensor]:
    """All parameters, then all state."""
    groups = (group["params"] for group in optimizer.param_groups)
    return chain(*groups, chain.from_iterable(map(dict.values, optimizer.state.values())))


def _shared(optimizer: TorqueOptimizer) -> list[list[Any]]:
    """The options every group must have alike, of each: where they differ, the making of tables tells."""
    return [[group[name] for name in optimizer.shared_options] for group in optimizer.param_groups]


def _count(optimizer: TorqueOptimizer) -> tuple[int, int]:
    return sum(len(group["params"]) for group in optimizer.param_groups), len(optimizer.state)


def _on_device(lr: Any) -> bool:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def _own_options(group: dict[str, Any]) -> tuple[Any, ...]:
    """What `_options` makes a row of, as it is compared at each step."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = None if _on_device(lr) else float(lr)
    beta = group["betas"] if "betas" in group else group["momentum"]
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
