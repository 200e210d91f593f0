"""What all optimizers of the library share: options, state, checkpoints and the frame of `step`."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, _use_grad_for_differentiable

from tam import step as kernels
from tam._load_hooks import hooks_around_load
from tam._warnings import warn_user
from tam.optimizers.checkpoint import adopt
from tam.options import check_options
from tam.sharding import Exchange, is_dtensor, local_gradient, local_tensor
from tam.step.bucket import Bucket, fill, filled
from tam.step.eager import Arithmetic


class Base(Optimizer):
    """An optimizer whose step is a function of buckets of tensors."""

    # Options that have one value for the whole optimizer; every group shows them.
    shared_options: ClassVar[tuple[str, ...]] = ("foreach", "differentiable")
    # The option by which a checkpoint of this family is told from one of torch's optimizers.
    mark: ClassVar[str]
    # The key of m in a parameter's state: one that has it has all of our keys. Users may keep others there.
    momentum_key: ClassVar[str]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        check_options(defaults)
        super().__init__(params, defaults)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The state of a parameter of this group, but for the alignment."""
        raise NotImplementedError

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """A parameter's state at its first gradient."""
        state = {}
        for key in self.state_keys(group):
            if key == "step":
                device = p.device if group["capturable"] else torch.device("cpu")
                state[key] = torch.zeros((), dtype=torch.float32, device=device)
            else:
                state[key] = filled(p, 0.0)
        return state

    def _shared_option(self, name: str) -> Any:
        """Return an option that has one value for the whole optimizer, which may have lost its groups."""
        return (self.param_groups[0] if self.param_groups else self.defaults)[name]

    def has_state(self, p: Tensor) -> bool:
        """Return True if the parameter has had a gradient, and so has state."""
        return self.momentum_key in self.state.get(p, ())

    def run(self, ops: Arithmetic, buckets: list[Bucket], exchange: Exchange | None) -> None:
        """The step itself."""
        raise NotImplementedError

    def name_of(self, i: int, j: int) -> str:
        """How messages call parameter j of group i."""
        group = self.param_groups[i]
        shape = tuple(group["params"][j].shape)
        name = f" {group['param_names'][j]!r}" if "param_names" in group else ""
        return f"parameter {j}{name} of group {i} (shape {shape})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # else torch's own complaint
            merged = {**self.defaults, **param_group}
            check_options(merged)
            self._warn_of_near_misses(param_group)
            for name in self.shared_options:
                if self.param_groups and merged[name] != self.param_groups[0][name]:
                    raise ValueError(
                        f"group {len(self.param_groups)} has {name}={merged[name]!r}, group 0 has "
                        f"{self.param_groups[0][name]!r}: {name} has one value for the whole optimizer"
                    )
        super().add_param_group(param_group)

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
        """One step. `closure`, where given, computes the loss and the gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.param_groups:
            self.take_step()
        return loss

    def wants_fused(self) -> bool:
        """Whether the step is done by a fused kernel."""
        return False

    def exchange_at_hand(self) -> Exchange | None:
        """What the next step exchanges with other ranks, which wait for it whatever this one has to move."""
        return None

    def take_step(self) -> None:
        """The step, in the way that suits."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        inf: Tensor | None = getattr(self, "found_inf", None)
        exchange = self.exchange_at_hand()
        if inf is not None and exchange is None and float(inf) != 0:  # GradScaler waits for this value, too
            return
        self.check_step()
        params, buckets = self.gather(exchange)
        if not buckets and exchange is None:
            return
        if scale is not None:
            for bucket in buckets:
                bucket.grad = [g / scale.to(g.device) for g in bucket.grad]
        group = self.param_groups[0]
        ops = kernels.choose(
            (p for bucket in buckets for p in bucket.theta),
            foreach=group["foreach"],
            differentiable=group["differentiable"],
        )
        if ops.pure:
            for bucket in buckets:  # autograd may keep theta, and `commit` overwrites it
                bucket.theta = [p.clone() for p in bucket.theta]
        self.run(ops, buckets, exchange)
        if ops.pure:
            self.commit(params, buckets)

    def check_step(self) -> None:
        """Refuses what a step cannot do, before anything has changed."""
        for name in self.shared_options:
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
                # `not capturable` comes late: where torch 2.15 traces it, it compiles again at every step.
                if capturing and p.is_cuda and not group["capturable"] and "step" in self.state_keys(group):
                    raise RuntimeError(
                        "a CUDA graph is being captured with capturable=False: the step count "
                        "would stand still; make the optimizer with capturable=True"
                    )
                if group["differentiable"] and is_dtensor(p):
                    raise RuntimeError(f"{self.name_of(i, j)} is sharded: differentiable=True cannot be done")
                if p.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients, but {self.name_of(i, j)} "
                        f"has one ({p.grad.layout})"
                    )

    def gather(self, exchange: Exchange | None) -> tuple[list[list[Tensor]], list[Bucket]]:
        """The parameters that have gradients, by group, and their buckets."""
        params, buckets = [], []
        for i, group in enumerate(self.param_groups):
            keys = self.column_keys(group)
            theta: list[Tensor] = []
            grad: list[Tensor] = []
            columns: list[list[Tensor]] = [[] for _ in keys]
            self._init_group(group, theta, grad, *columns)
            params.append(theta)
            shares = None if exchange is None else [exchange.share_of[p] for p in theta]
            if any(map(is_dtensor, theta)):  # the step works on this rank's pieces
                grad = [local_gradient(p, g) for p, g in zip(theta, grad, strict=True)]
                theta, columns = (
                    [*map(local_tensor, theta)],
                    [[*map(local_tensor, column)] for column in columns],
                )
            buckets += fill(group, i, theta, grad, dict(zip(keys, columns, strict=True)), shares)
        return params, buckets

    def make_state(self) -> bool:
        """Makes the state of parameters at their first gradient. Returns whether any has a gradient."""
        found: list[Tensor] = []
        for group in self.param_groups:
            self._init_group(group, found, [], *[[] for _ in self.column_keys(group)])
        return bool(found)

    def column_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """All state of a parameter of this group."""
        return self.state_keys(group)

    def _init_group(
        self, group: dict[str, Any], theta: list[Tensor], grad: list[Tensor], *columns: list[Tensor]
    ) -> None:
        """Appends the group's parameters that have gradients, with their state, made at need.

        torch.compile runs a method of this name and signature as it is instead of tracing it.
        """
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if self.momentum_key not in state:
                state.update(self.new_state(p, group))
            theta.append(p)
            grad.append(p.grad)
            for key, column in zip(self.column_keys(group), columns, strict=True):
                column.append(state[key])

    def commit(self, params: list[list[Tensor]], buckets: list[Bucket]) -> None:
        """Puts the results of a pure step in their places, autograd history included."""
        for bucket in buckets:
            owners = [params[bucket.index][row] for row in bucket.rows]
            for i, p in enumerate(owners):
                p.copy_(bucket.theta[i])
                for key, column in bucket.state.items():
                    self.state[p][key] = column[i]

    # ------------------------------------------------------------------ checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer, or of the torch optimizer it replaces.

        Checked before anything has changed. The optimizer keeps its own scope, foreach, fused,
        capturable and differentiable. From a checkpoint of torch's SGD (TAM) or Adam and AdamW
        (AdaTAM, AdaTAMW) the buffers and the options both have are taken; lr and the options the
        checkpoint lacks stay as they are, and a warning lists what was kept and what was taken.
        """
        # As the last of the pre-hooks it sees what the users' own hooks have made of the checkpoint.
        seen: list[dict[str, Any]] = []
        remarks: list[str] = []

        def before(_: Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
            adopted, remark = adopt(self, checkpoint)
            self.check_checkpoint(checkpoint)
            seen.append(checkpoint)
            remarks.append(remark)
            return adopted

        def after(_: Optimizer) -> None:
            self.loaded(seen[-1])

        with hooks_around_load(self, before, after):
            super().load_state_dict(state_dict)
        if remarks[-1]:
            warn_user(remarks[-1])

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What a subclass has to check besides."""

    def loaded(self, checkpoint: dict[str, Any]) -> None:
        """Called after torch has loaded the state, with the checkpoint as it came."""
        # A group added later has the options that are now the optimizer's.
        self.defaults |= {name: self.param_groups[0][name] for name in self.shared_options}
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                # It may come from an optimizer that kept it elsewhere.
                if "step" in self.state_keys(group) and "step" in state:
                    home = p.device if group["capturable"] else torch.device("cpu")
                    state["step"] = state["step"].to(home, torch.float32)
