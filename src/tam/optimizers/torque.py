"""What TAM, AdaTAM and AdaTAMW share: their options, the choice of a backend, readings and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter
from torch.optim.optimizer import ParamsT

from tam._warnings import warn_user
from tam.optimizers.base import Base, make_state
from tam.optimizers.checkpoint import LATER, is_dense_real
from tam.options import warning_of_short_average
from tam.segments import Segments
from tam.sharding.dtensor import is_dtensor
from tam.sharding.exchange import Exchange, verdicts_differ
from tam.sharding.shard_group import ShardGroup
from tam.step import run_step
from tam.step.eager import Arithmetic, Bucket, GroupOptions
from tam.step.fused.support import missing_kernel, warn_if_slow, why_not_fused
from tam.step.fused.tables import FusedTables, TableInputs
from tam.step.rule import EagerBackend, Rule, damping_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_PLAIN = (Tensor, Parameter)
_IDLE = "this rank has no parameters to train"


class TorqueOptimizer(Base):
    """An optimizer that damps each gradient by its agreement with the momentum."""

    _shared_options: ClassVar[tuple[str, ...]] = (
        *Base._shared_options, "fused", "scope", "smoothing", "gain", "max_grad_norm",
    )  # fmt: skip
    _mark: ClassVar[str] = "smoothing"

    # What `tam.switching` needs to know about a class.
    lr_family: ClassVar[Literal["sgd", "adam"]]  # optimizers whose lr and buffers mean the same
    adaptive: ClassVar[bool] = False  # is the step divided by the root of v?

    segments: Segments

    def __init__(
        self, params: ParamsT, defaults: GroupOptions, shard_group: ProcessGroup | None, whole_tensors: bool
    ) -> None:
        # Not defaults of the class: Lightning's wrapper is a subclass of ours, and would find those first.
        super().__init__(params, defaults)
        self.segments = Segments(self, self._momentum_key)
        self.shards = ShardGroup.from_options(shard_group, whole_tensors, defaults["scope"])
        self.tables: FusedTables | None = None  # of the fused step
        self._exchange: Exchange | None = None  # with other ranks; it may have nothing to exchange
        self._captured: list[object] = []  # what CUDA graphs that captured a step will read
        self._warn_of_short_average(self.param_groups)

    def _rule(self) -> Rule:
        """Return the options that have one value for the whole optimizer, as they are now."""
        group = self.param_groups[0]
        return Rule(
            group["scope"], group["smoothing"], group["gain"], group["max_grad_norm"], self.adaptive,
            self.decoupled, group.get("ema", False), group.get("bias_correction", False), self._momentum_key,
        )  # fmt: skip

    def add_param_group(self, param_group: GroupOptions) -> None:
        is_complete = self.segments is not None  # not in torch's __init__
        if is_complete and self.param_groups:  # their shared options may have changed since
            self.defaults |= {name: self._option(name) for name in self._shared_options}
        super().add_param_group(param_group)
        if is_complete:
            self.tables = None
            # A rank whose new group is empty sees no change, and would not compare again as the others do.
            self._exchange = None
            self.segments.share_again()  # the dtype of a segment's s depends on its parameters' dtypes
            *others, added = self.param_groups
            if not any(map(self._short_average, others)):
                self._warn_of_short_average([added])

    def _short_average(self, group: GroupOptions) -> str | None:
        """Return a warning if a group's momentum remembers for much longer than the smoothed cosine."""
        if group.get("ema", False):
            return None
        beta, option = (group["betas"][0], "betas[0]") if self.adaptive else (group["momentum"], "momentum")
        return warning_of_short_average(type(self).__name__, beta, group["smoothing"], group["gain"], option)

    def _warn_of_short_average(self, groups: list[GroupOptions]) -> None:
        """Warn once. Values that change later do not warn: schedulers move momentum at every step."""
        for message in map(self._short_average, groups):
            if message is not None:
                warn_user(message)
                return

    # ------------------------------------------------------------------ the step

    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        group, is_compiling = self.param_groups[0], torch.compiler.is_compiling()
        may_fuse = group["fused"] or (group["fused"] is None and group["foreach"] is None)
        may_fuse = may_fuse and not group["differentiable"] and not is_compiling
        if may_fuse and self._fused_step(grad_scale, found_inf):
            return
        if not is_compiling:
            self.tables = None  # a Recorder trusts tables as those of the last step
        exchange = None
        if self._is_sharded():
            if is_compiling:
                self._take_step_outside_graph(grad_scale, found_inf)  # a graph cannot exchange sums
                return
            exchange = self._current_exchange(found_inf)
        if not is_compiling:
            self.segments.move_state_to_params(self._state_keys)
        self._eager_step(grad_scale, found_inf, exchange)

    @_disable_dynamo
    def _take_step_outside_graph(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self._take_step(grad_scale, found_inf)

    def _apply_rule(
        self, ops: Arithmetic, buckets: list[Bucket], exchange: Exchange | None, found_inf: Tensor | None
    ) -> None:
        rule, on_cpu = self._rule(), [bucket for bucket in buckets if bucket.device.type == "cpu"]
        if exchange is None and on_cpu and len(on_cpu) < len(buckets):
            # No segment is on both kinds of devices; |g| is, so it is not known.
            elsewhere = [bucket for bucket in buckets if bucket.device.type != "cpu"]
            moved = [run_step(EagerBackend(ops, rule, part), None, found_inf) for part in (on_cpu, elsewhere)]
            if all(moved) and self.segments.grad_norm is not None:
                self.segments.grad_norm.fill_(math.nan)
            return
        alignments = [] if exchange is None else self._agree_on_alignments(exchange)
        backend = EagerBackend(ops, rule, buckets, exchange, alignments)
        if run_step(backend, exchange, found_inf) and self.segments.grad_norm is not None:
            self.segments.grad_norm.copy_(backend.norm.detach())

    def _check_step(self) -> None:
        super()._check_step()
        first = self.param_groups[0]
        if first["differentiable"] and self.shards is not None:
            raise RuntimeError("differentiable=True is not possible with shard_group")
        parts, what = [self.param_groups], "max_grad_norm"  # of which there must be one sum each
        if first["max_grad_norm"] is None:
            what = f'scope="{first["scope"]}"'
            if first["scope"] != "global":
                parts = [[group] for group in self.param_groups if first["scope"] == "group"]
        for groups in parts:
            kinds = {p.device.type for group in groups for p in group["params"] if p.grad is not None}
            # One sum over the CPU and an accelerator would make the host wait for the device.
            if "cpu" in kinds and len(kinds) > 1:
                raise RuntimeError(
                    f"{what} needs one sum over all these parameters, but their devices are "
                    f"{sorted(kinds)}: put them on one kind of device, or use scope='tensor' "
                    "without max_grad_norm"
                )

    def _skips_later(self, found_inf: Tensor) -> bool:
        """Return True if the step reads GradScaler's verdict: on the device, or after the exchange."""
        if self._is_sharded() and self._current_exchange(found_inf) is not None:
            return True
        return any(not p.is_cpu for group in self.param_groups for p in group["params"])

    # ------------------------------------------------------------------ the fused step

    def _fused_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Take the step in one kernel call. Return False if that is not possible, and not demanded."""
        tables, norm = self.tables, self.segments.grad_norm
        if (
            tables is not None
            and norm is not None
            and tables.fits(self.param_groups, self.state, self.shards, self._exchange, found_inf)
            and tables.step(self.param_groups, norm, grad_scale, found_inf, self._captured)
        ):
            self._last_backend = tables.backend.name
            return True
        must_fuse, reason = self._option("fused"), self._why_not_fused()
        if reason is not None:
            if must_fuse and reason != _IDLE:
                raise RuntimeError(f"fused=True is not possible: {reason}")
            if self._last_backend is None and not self._option("capturable"):  # the first step: no later cost
                warn_if_slow([p for g in self.param_groups for p in g["params"] if p.grad is not None])
            return False
        self._check_step()
        has_gradients = make_state(self)
        exchange = self._current_exchange(found_inf) if self._is_sharded() else None
        if not has_gradients and exchange is None:
            self.segments.clear_grad_norm()
            return True
        if not has_gradients:
            return False  # the other ranks wait for this one
        self.segments.move_state_to_params(self._state_keys)
        self.tables = FusedTables(self._table_inputs(exchange))
        norm = self.segments.grad_norm
        assert norm is not None  # made with the first state
        if self.tables.step(self.param_groups, norm, grad_scale, found_inf, self._captured):
            self._last_backend = self.tables.backend.name
            return True
        self.tables = None
        if must_fuse:
            raise RuntimeError("fused=True is not possible: a gradient has no memory of its own")
        return False

    def _table_inputs(self, exchange: Exchange | None) -> TableInputs:
        alignments = [] if exchange is None else self._agree_on_alignments(exchange)
        possible_exchange = self._exchange if self._is_sharded() else None
        return TableInputs(
            self.param_groups, self.state, self._state_keys, self._shared_options, self._rule(),
            self.segments.members(), alignments, self.shards, possible_exchange, exchange,
        )  # fmt: skip

    def _why_not_fused(self) -> str | None:
        """Return why the next step cannot be the fused one; None if it can."""
        params = [p for group in self.param_groups for p in group["params"]]
        if params and not self._option("fused") and (missing := missing_kernel(params[0].device)):
            return missing  # the same at every step, so it must be found quickly
        trained = [p for p in params if p.requires_grad or p.grad is not None]
        if not trained and self.shards is not None:
            return _IDLE
        reason = why_not_fused(trained)
        if reason is None or not self._option("fused"):
            return reason
        # Only the parameters that the step moves must allow it, as with torch's optimizers.
        moved = [p for p in trained if p.grad is not None]
        return why_not_fused(moved) if moved else None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave unscaling and skipping to the step.

        Like torch's optimizers: if the fused step was asked for. Lightning refuses to clip gradients for
        optimizers that unscale them by themselves. And if GradScaler's verdicts may differ between ranks:
        then the ranks exchange them in the step, and all of them skip or none.
        """
        if self._option("fused") is True and not torch.compiler.is_compiling():
            return True
        params = [p for group in self.param_groups for p in group["params"]]
        return verdicts_differ(params, self.shards)

    # ------------------------------------------------------------------ other ranks

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The ranks over which plain tensors are sharded; neither groups nor checkpoints contain it."""
        return None if self.shards is None else self.shards.group

    @shard_group.setter
    def shard_group(self, group: ProcessGroup | None) -> None:
        whole_tensors = group is not None and self.shards is not None and self.shards.whole_tensors
        self.shards = ShardGroup.from_options(group, whole_tensors, self._option("scope"))

    def _is_sharded(self) -> bool:
        """Return True if other ranks may have to be asked for sums; most optimizers have nobody to ask."""
        params = (p for group in self.param_groups for p in group["params"])
        return self.shards is not None or any(type(p) not in _PLAIN and is_dtensor(p) for p in params)

    def _current_exchange(self, found_inf: Tensor | None) -> Exchange | None:
        """Return what the next step exchanges with other ranks; None for nothing."""
        segments, options = self.segments.members(), self.param_groups[0]
        exchange = self._exchange
        if exchange is None or not exchange.fits(segments, options["scope"], self.shards):
            exchange = self._exchange = Exchange(segments, options["scope"], self.shards)
        # The first needs no call, and is nearly always true.
        if exchange.adds_cosines or exchange.is_needed(options["max_grad_norm"], found_inf):
            return exchange
        return None

    def _agree_on_alignments(self, exchange: Exchange) -> list[Tensor]:
        """Return s of each segment. Before the first step all ranks communicate to agree on them."""
        if not exchange.has_agreed:
            apart = ("foreach", "fused", "differentiable")  # ranks may do the step with different backends
            options = {name: self._option(name) for name in self._shared_options if name not in apart}
            options |= {"the optimizer": type(self).__name__, "the number of groups": len(self.param_groups)}
            self.segments.agree_across_ranks(exchange, options)
        return self.segments.alignments()

    # ------------------------------------------------------------------ readings

    @property
    def alignment(self) -> Tensor:
        """s after the last step: 0-dim with `scope="global"`, else one value per segment, in group order."""
        s = self.segments.alignments()
        if self._option("scope") == "global":
            return s[0].clone()
        if not s:  # a rank without tensors, while others have some
            return torch.zeros(0, device="cpu")
        return torch.stack([x.to(s[0].device) for x in s])

    @property
    def damping(self) -> Tensor:
        """d of the last step, in the shape of `alignment`: (1 + s) / 2 if `gain` is 1."""
        return damping_of(self.alignment, self._option("gain"))

    @property
    def grad_norm(self) -> Tensor:
        """|g| of the last step over all parameters, before clipping: 0-dim, and 0 without gradients.

        NaN if |g| is not known: with parameters on a CPU and a GPU, or if `whole_tensors=True` with
        `scope="tensor"` exchanges nothing. `max_grad_norm=math.inf` clips nothing and makes the ranks add
        it up.
        """
        norm = self.segments.grad_norm
        if norm is None:
            norm = self.segments.new_grad_norm()
        return norm.clone() if self.segments.knows_grad_norm() else torch.full_like(norm, math.nan)

    # ------------------------------------------------------------------ checkpoints

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"tables": None, "_captured": [], "_exchange": None, "_last_backend": None}
        return {**super().__getstate__(), "segments": self.segments, "shards": self.shards, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_shards" in state:  # a pickle of 0.1.0
            segments = Segments(self, self._momentum_key)
            segments.grad_norm = state["_grad_norm"]
            groups = {name: state[name] for name in ("defaults", "state", "param_groups")}
            fresh: dict[str, Any] = {"tables": None, "_captured": [], "_exchange": None}
            state = {**groups, **fresh, "segments": segments, "shards": state["_shards"]}
        super().__setstate__(state)
        if "segments" in state:  # copied once more: `copy.copy` would share it with the original
            self.segments = copy(self.segments)
            self.segments.attach(self)
        # A pickle may be older than some options.
        for options in (self.defaults, *self.param_groups):
            for name, value in LATER.items():
                options.setdefault(name, value)

    def _check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = self._saved_alignments(checkpoint)
        is_ours = self._mark in checkpoint["param_groups"][0]
        for p, key in self._saved_keys(checkpoint):
            state = checkpoint["state"].get(key) or {}
            if is_ours and self._momentum_key in state and p not in saved:
                raise ValueError(f"the checkpoint has state but no alignment for parameter {key}")
            plain = [
                name for name, x in state.items() if isinstance(x, Tensor) and x.ndim and not is_dtensor(x)
            ]
            if is_dtensor(p) and plain:
                raise ValueError(
                    f"parameter {key} is sharded (a DTensor), but its {plain[0]} in the checkpoint is not: "
                    "load it with torch.distributed.checkpoint's set_optimizer_state_dict"
                )
        self._check_saved_scope(saved, checkpoint["param_groups"][0].get("scope", "another scope"))

    def _check_saved_scope(self, saved: dict[Tensor, Tensor], saved_scope: str) -> None:
        """Raise if one of our segments had several alignments in the checkpoint."""
        scope = self._option("scope")
        groups_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        for segment in self.segments.members():
            members = [p for p in segment if p in saved]
            values = {float(saved[p]) for p in members}
            count, lost = len(values), ""
            # `torch.distributed.checkpoint.load` writes into the state: here all values into one tensor.
            live = {id(self.state[p]["alignment"]) for p in members if "alignment" in self.state.get(p, ())}
            if values and values != {0.0} and len(live) == 1 and {id(saved[p]) for p in members} == live:
                group_count = len({groups_of[p] for p in members})
                count = {"tensor": len(members), "group": group_count}.get(saved_scope, 1)
                lost = ", and was loaded into the state in place, where only one of them is left"
            if count > 1:
                raise ValueError(
                    f"the checkpoint has {count} different alignments where scope={scope!r} has one: it was "
                    f"written with scope={saved_scope!r}{lost}. Load it into an optimizer with that scope"
                )

    def _finish_load(self, checkpoint: dict[str, Any]) -> None:
        super()._finish_load(checkpoint)
        self.tables = self._exchange = None  # all ranks load: they agree on s again
        self.segments.forget_other_ranks()
        self.segments.share_alignments(self._saved_alignments(checkpoint))

    def _saved_alignments(self, checkpoint: dict[str, Any]) -> dict[Tensor, Tensor]:
        """Return each parameter's alignment in the checkpoint, not cast to the parameter's dtype."""
        alignments = {}
        for p, key in self._saved_keys(checkpoint):
            s = (checkpoint["state"].get(key) or {}).get("alignment")
            if s is None:
                continue
            if not is_dense_real(s) or s.numel() != 1 or not -1 <= float(s) <= 1:
                raise ValueError(
                    f"alignment in the checkpoint must be a tensor of one number in [-1, 1], got {s!r}"
                )
            alignments[p] = s
        return alignments

    def _saved_keys(self, checkpoint: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
        for own, saved in zip(self.param_groups, checkpoint["param_groups"], strict=True):
            yield from zip(own["params"], saved["params"], strict=True)
