"""What all optimizers of the library share: options, state, checkpoints and the frame of `step`."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable

from tam._load_hooks import hooks_around_load
from tam._messages import describe_parameter
from tam._warnings import warn_user
from tam.optimizers.checkpoint import prepare_checkpoint
from tam.options import check_options, refuse_half
from tam.segments import Segments
from tam.sharding.dtensor import is_dtensor, local_tensor, redistribute_gradient
from tam.sharding.exchange import Exchange
from tam.step import eager
from tam.step.eager import Arithmetic, Bucket, GroupOptions

BackendName = Literal["triton", "c", "foreach", "loop", "pure"]


class Base(Optimizer):
    """An optimizer whose step works on buckets of tensors."""

    # Options that have one value for the whole optimizer; every group shows them.
    _shared_options: ClassVar[tuple[str, ...]] = ("foreach", "differentiable")
    # An option that only this family has: a checkpoint without it is another optimizer's. None: an option
    # that this class lacks shows that.
    _mark: ClassVar[str | None] = None
    # The state of a parameter, but for the alignment. One that has m has all of it.
    _state_keys: tuple[str, ...]
    _momentum_key: ClassVar[str]

    _takes_half: ClassVar[bool] = True  # False: v underflows in float16

    decoupled: ClassVar[bool] = False  # is the weight decay outside the gradient?

    def __init__(self, params: ParamsT, defaults: GroupOptions) -> None:
        check_options(defaults)
        self.segments: Segments | None = None
        self._last_backend: BackendName | None = None
        super().__init__(params, defaults)

    @property
    def backend(self) -> BackendName | None:
        """What computed the last step: "triton", "c", "foreach", "loop" or "pure"; None before the first.

        A step inside `torch.compile` does not change it.
        """
        return self._last_backend

    def _new_state(self, p: Tensor, group: GroupOptions) -> dict[str, Tensor]:
        """Return a parameter's state at its first gradient."""
        state = {}
        for key in self._state_keys:
            if key == "step":
                device = p.device if group["capturable"] else torch.device("cpu")
                state[key] = torch.zeros((), dtype=torch.float32, device=device)
            else:
                state[key] = eager.full_like_param(p, 0.0)
        if self.segments is not None:
            state["alignment"] = self.segments.alignment_for(p, group)
        return state

    def _state_keys_of(self, group: GroupOptions) -> tuple[str, ...]:
        """Return the state keys of a parameter of a group with these options."""
        return self._state_keys

    def _option(self, name: str) -> Any:
        """Return an option that has one value for the whole optimizer, which may have lost its groups."""
        return (self.param_groups[0] if self.param_groups else self.defaults)[name]

    def _apply_rule(
        self, ops: Arithmetic, buckets: list[Bucket], exchange: Exchange | None, found_inf: Tensor | None
    ) -> None:
        """Take the step itself, in torch operations."""
        raise NotImplementedError

    def add_param_group(self, param_group: GroupOptions) -> None:
        if isinstance(param_group, dict):  # else torch's own complaint
            merged = {**self.defaults, **param_group}
            check_options(merged)
            if not self._takes_half:
                self._refuse_half(param_group)
            self._warn_of_near_misses(param_group)
            for name in self._shared_options:
                if self.param_groups and merged[name] != self.param_groups[0][name]:
                    raise ValueError(
                        f"group {len(self.param_groups)} has {name}={merged[name]!r}, group 0 has "
                        f"{self.param_groups[0][name]!r}: {name} has one value for the whole optimizer"
                    )
        super().add_param_group(param_group)

    def _refuse_half(self, param_group: dict[str, Any]) -> None:
        """Raise if a new group has float16 parameters, before torch adds it."""
        params = param_group.get("params")
        if isinstance(params, set):  # torch's own complaint
            return
        if not isinstance(params, Tensor):
            params = param_group["params"] = list(param_group["params"])  # it may be a generator
        items = [params] if isinstance(params, Tensor) else params
        tensors = [x[1] if isinstance(x, tuple) else x for x in items]
        refuse_half(type(self).__name__, [x for x in tensors if isinstance(x, Tensor)])

    def _warn_of_near_misses(self, param_group: dict[str, Any]) -> None:
        """Warn once of a key that looks like a misspelled option; other keys are the users' own."""
        for key in param_group:
            if key in self.defaults or key in ("params", "param_names") or not isinstance(key, str):
                continue
            similar = get_close_matches(key, self.defaults, n=1, cutoff=0.85)
            if similar and not any(key in group for group in self.param_groups):
                warn_user(
                    f"group {len(self.param_groups)} has a key {key!r}, which {type(self).__name__} ignores: "
                    f"did you mean {similar[0]!r}?"
                )

    # ------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: computes the loss and the gradients, and returns the loss
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.param_groups:
            return loss
        # GradScaler sets these if it leaves unscaling and skipping to the step.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        # Reading the verdict here costs nothing: GradScaler reads it anyway.
        if found_inf is None or self._skips_later(found_inf) or float(found_inf) == 0:
            self._take_step(grad_scale, found_inf)
        return loss

    def _skips_later(self, found_inf: Tensor) -> bool:
        """Return True if the step itself reads GradScaler's verdict."""
        return False

    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Take the step with the backend that suits."""
        self._eager_step(grad_scale, found_inf)

    def _eager_step(
        self, grad_scale: Tensor | None, found_inf: Tensor | None, exchange: Exchange | None = None
    ) -> None:
        """Take the step in torch operations."""
        self._check_step()
        params, buckets = [], []
        keys = self._state_keys if self.segments is None else (*self._state_keys, "alignment")
        for i, group in enumerate(self.param_groups):
            theta: list[Tensor] = []
            grad: list[Tensor] = []
            columns: list[list[Tensor]] = [[] for _ in keys]
            self._init_group(group, theta, grad, *columns)
            params.append(theta)
            shares = None if exchange is None else [exchange.share_of[p] for p in theta]
            if any(type(p) not in (Tensor, Parameter) and is_dtensor(p) for p in theta):  # this rank's shards
                grad = [redistribute_gradient(p, g) for p, g in zip(theta, grad, strict=True)]
                theta = [*map(local_tensor, theta)]
                columns = [[*map(local_tensor, column)] for column in columns]
            state = dict(zip(keys, columns, strict=True))
            buckets += eager.make_buckets(group, i, theta, grad, state, shares)
        if not buckets and exchange is None:
            if self.segments is not None:
                self.segments.clear_grad_norm()
            return
        if grad_scale is not None:
            for bucket in buckets:
                bucket.grad = [g / grad_scale.to(g.device) for g in bucket.grad]
        group = self.param_groups[0]
        options = {name: group[name] for name in ("foreach", "differentiable")}
        ops = eager.choose_arithmetic((p for bucket in buckets for p in bucket.theta), **options)
        if ops.is_pure:
            for bucket in buckets:  # autograd may keep theta, which is overwritten below
                bucket.theta = [p.clone() for p in bucket.theta]
        self._apply_rule(ops, buckets, exchange, found_inf)
        if not torch.compiler.is_compiling():  # torch 2.11 cannot trace that
            self._last_backend = ops.name
        if ops.is_pure:
            self._store_results(params, buckets)

    def _check_step(self) -> None:
        """Raise if the step cannot be taken, before anything has changed."""
        if not self._takes_half:
            params = (p for group in self.param_groups for p in group["params"] if p.grad is not None)
            refuse_half(type(self).__name__, params)
        for name in self._shared_options:
            values = [group[name] for group in self.param_groups]
            if any(value != values[0] for value in values):
                raise ValueError(f"{name} must be the same in all groups, but is {values}")
        # Like torch's optimizers, not while torch.compile traces: in torch 2.6 these calls break the graph.
        cuda = not torch.compiler.is_compiling() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        capturing = cuda and torch.cuda.is_current_stream_capturing()
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                # `not capturable` comes last: where torch 2.15 traces it, it compiles again at every step.
                if capturing and p.is_cuda and "step" in self._state_keys and not group["capturable"]:
                    raise RuntimeError(
                        "a CUDA graph is being captured with capturable=False: the step count "
                        "would stand still; make the optimizer with capturable=True"
                    )
                if group["differentiable"] and is_dtensor(p):
                    raise RuntimeError(
                        f"{describe_parameter(self, i, j)} is sharded: differentiable=True cannot be done"
                    )
                if p.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients, but "
                        f"{describe_parameter(self, i, j)} has one ({p.grad.layout}). For an embedding, "
                        "use sparse=False"
                    )

    def _init_group(
        self, group: GroupOptions, theta: list[Tensor], grad: list[Tensor], *columns: list[Tensor]
    ) -> None:
        """Append the group's parameters that have gradients, with their state, made at need.

        torch.compile runs a method of this name and signature as it is instead of tracing it.
        """
        keys = self._state_keys if self.segments is None else (*self._state_keys, "alignment")
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if self._momentum_key not in state:
                state.update(self._new_state(p, group))
            theta.append(p)
            grad.append(p.grad)
            for key, column in zip(keys, columns, strict=False):  # the fused step needs no columns
                column.append(state[key])
        if self.segments is not None and self.segments.grad_norm is None:
            self.segments.grad_norm = self.segments.new_grad_norm()

    def _store_results(self, params: list[list[Tensor]], buckets: list[Bucket]) -> None:
        """Put the results of a pure step in their places, autograd history included."""
        for bucket in buckets:
            owners = [params[bucket.index][row] for row in bucket.rows]
            for i, p in enumerate(owners):
                p.copy_(bucket.theta[i])
                for key, column in bucket.state.items():
                    self.state[p][key] = column[i]
        if self.segments is not None:
            self.segments.share_after_step()

    # ------------------------------------------------------------------ checkpoints

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" in state:  # a pickle or copy; torch also calls this inside load_state_dict
            state = {"segments": None, "_last_backend": None, **state}
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of the torch optimizer it replaces.

        Everything is checked before anything changes. The optimizer keeps its own scope, foreach, fused,
        capturable and differentiable. A checkpoint of torch's SGD (for TAM) or Adam and AdamW (for AdaTAM
        and AdaTAMW) gives its buffers and the options that both have. lr and the options that the checkpoint
        lacks stay as they are, and a warning lists what was kept and what was taken.

        Args:
            state_dict: what `state_dict()` of such an optimizer returned
        """
        # As the last of the pre-hooks it sees what the users' own hooks have made of the checkpoint.
        checkpoints: list[dict[str, Any]] = []
        remarks: list[str] = []

        def before(_: Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
            prepared, remark = prepare_checkpoint(
                self, checkpoint, self._mark, self._state_keys_of, self._shared_options
            )
            self._check_checkpoint(checkpoint)
            checkpoints.append(checkpoint)
            remarks.append(remark)
            return prepared

        def after(_: Optimizer) -> None:
            self._finish_load(checkpoints[-1])

        with hooks_around_load(self, before, after):
            super().load_state_dict(state_dict)
        if remarks[-1]:
            warn_user(remarks[-1])

    def _check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise if the checkpoint is not for this optimizer, before anything has changed."""

    def _finish_load(self, checkpoint: dict[str, Any]) -> None:
        """Complete a load, given the checkpoint before torch's changes to it."""
        # A group added later has the options that are now the optimizer's.
        self.defaults |= {name: self.param_groups[0][name] for name in self._shared_options}
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                # It may come from an optimizer that kept it elsewhere.
                if "step" in self._state_keys and "step" in state:
                    home = p.device if group["capturable"] else torch.device("cpu")
                    state["step"] = state["step"].to(home, torch.float32)


def make_state(optimizer: Base) -> bool:
    """Make the state of parameters at their first gradient. Return True if any has a gradient."""
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        optimizer._init_group(group, params, [])
    return bool(params)
