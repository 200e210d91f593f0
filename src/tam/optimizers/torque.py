"""What TAM, AdaTAM and AdaTAMW share: segments and their alignment, and the readings of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from tam.optimizers.base import Base
from tam.optimizers.checkpoint import LATER, is_dense_real
from tam.sharding import Exchange, SegmentInfo, ShardGroup, agree_across_ranks, is_dtensor, local_tensor
from tam.step import rule as torque
from tam.step.bucket import Bucket
from tam.step.eager import Arithmetic
from tam.step.fused.tables import Fused, obstacle


class TorqueOptimizer(Base):
    """An optimizer whose gradients are damped by their agreement with the momentum."""

    shared_options: ClassVar[tuple[str, ...]] = (
        *Base.shared_options, "fused", "scope", "smoothing", "gain", "max_grad_norm",
    )  # fmt: skip
    mark: ClassVar[str] = "smoothing"

    # What `tam.switching` needs to know about a class.
    lr_family: ClassVar[Literal["sgd", "adam"]]  # optimizers whose lr and buffers mean the same
    adaptive: ClassVar[bool] = False  # is the step divided by the root of v?
    decoupled: ClassVar[bool] = False  # is the weight decay outside the gradient?

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], shard_group: Any, whole_tensors: bool
    ) -> None:
        super().__init__(params, defaults)
        self.shards = ShardGroup.from_options(shard_group, whole_tensors, defaults["scope"])
        # No class attributes: a wrapper that passes for this class (Lightning's) would find them there.
        self._grad_norm: Tensor | None = None  # |g| of the last step; the step writes it in place
        self._fused: Fused | None = None  # the tables of the fused step
        self._exchange: Exchange | None = None  # with other ranks; it may have nothing to exchange
        self._kept: dict[int, Tensor] = {}  # s of segments of which this rank has no state, but others have
        self._wide: dict[
            int, bool
        ] = {}  # whether s is float64 by all ranks' parameters, where they have agreed
        self._captured: list[Any] = []  # what CUDA graphs that captured a step will read

    @property
    def rule(self) -> torque.Rule:
        """The options that are one value for the whole optimizer, as they stand now."""
        raise NotImplementedError

    def column_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (*self.state_keys(group), "alignment")

    def run(self, ops: Arithmetic, buckets: list[Bucket], exchange: Exchange | None) -> None:
        if exchange is None:
            norm = torque.step(ops, self.rule, buckets)
        else:
            inf = getattr(self, "found_inf", None)
            norm = torque.step_together(ops, self.rule, buckets, exchange, self.alignments(), inf)
        if norm is not None and self._grad_norm is not None:
            self._grad_norm.copy_(norm.detach())

    # ------------------------------------------------------------------ many ranks

    @property
    def shard_group(self) -> Any:
        """The ranks over which plain tensors are sharded; neither groups nor checkpoints have it."""
        return None if self.shards is None else self.shards.group

    @shard_group.setter
    def shard_group(self, group: Any) -> None:
        whole = group is not None and self.shards is not None and self.shards.whole_tensors
        self.shards = ShardGroup.from_options(group, whole, self._shared_option("scope"))

    @property
    def exchange(self) -> Exchange:
        """What this optimizer adds up with other ranks, as parameters and options stand now."""
        now = self.segments(), self._shared_option("scope"), self.shards
        if self._exchange is None or not self._exchange.fits(*now):
            self._exchange = Exchange(*now)
        return self._exchange

    def _in_pieces(self) -> bool:
        """Whether other ranks may have to be asked for sums; most optimizers have nobody to ask."""
        return self.shards is not None or any(is_dtensor(p) for g in self.param_groups for p in g["params"])

    def exchange_at_hand(self) -> Exchange | None:
        if not self._in_pieces():
            return None
        exchange, inf = self.exchange, getattr(self, "found_inf", None)
        return exchange if exchange.is_needed(self._shared_option("max_grad_norm"), inf) else None

    def alignments(self) -> list[Tensor]:
        """Each segment's s, in tensors that stay; before the first step the ranks agree on them."""
        if not self.exchange.has_agreed:
            self._agree()
        return self.segment_alignments()

    def _agree(self) -> None:
        exchange, segments, s = self.exchange, self.segments(), self.segment_alignments()
        known = [
            SegmentInfo(
                float(x) if any(map(self.has_state, segment)) else None,
                _scalar_dtype(segment) == torch.float64 if segment else None,
            )
            for x, segment in zip(s, segments, strict=True)
        ]
        apart = ("foreach", "fused", "differentiable")  # ranks may do the step in different ways
        options = {name: self.param_groups[0][name] for name in self.shared_options if name not in apart}
        options |= {"the optimizer": type(self).__name__, "the number of groups": len(self.param_groups)}
        agreed = agree_across_ranks(exchange, known, options)
        self._wide = {k: bool(x.is_float64) for k, x in enumerate(agreed)}
        for k, (segment, mine, now) in enumerate(zip(segments, known, agreed, strict=True)):
            if mine.alignment is None:
                home = exchange.device if not segment else local_tensor(segment[0]).device
                self._kept[k] = torch.zeros((), dtype=self._dtype_of(k, segment), device=home).fill_(
                    now.alignment or 0.0
                )
        self._follow_parameters()
        for x, now in zip(self.segment_alignments(), agreed, strict=True):
            if now.alignment is not None:
                x.fill_(now.alignment)  # to the bit

    def _dtype_of(self, k: int, segment: list[Tensor]) -> torch.dtype:
        """Of s of segment k: float64 where all parameters are, other ranks' too."""
        here = _scalar_dtype(segment)
        if k not in self._wide or (segment and here == torch.float32):
            return here
        return torch.float64 if self._wide[k] else torch.float32

    # ------------------------------------------------------------------ the fused way

    @_disable_dynamo
    def _take_step_apart(self) -> None:
        self.take_step()

    def take_step(self) -> None:
        if torch.compiler.is_compiling() and self._in_pieces():
            self._take_step_apart()  # who adds up with whom is no business of a graph
            return
        if not self._may_fuse():
            self._take_torchs_step()
            return
        if self._fused is not None and self._fused.fits(self) and self._fused.step(self, self._norm()):
            return
        self._fused = None
        if not self.wants_fused():
            self._take_torchs_step()
            return
        self.check_step()
        if self.make_state():
            self._follow_parameters()
            self._fused = Fused(self)
            if not self._fused.step(self, self._norm()):
                self._fused = None
                if self._shared_option("fused"):
                    raise RuntimeError("fused=True is not possible: a gradient has no memory of its own")
                self._take_torchs_step()
        elif self.exchange_at_hand() is not None:
            self._take_torchs_step()

    def _take_torchs_step(self) -> None:
        if not torch.compiler.is_compiling():
            self._follow_parameters()
        super().take_step()

    def _norm(self) -> Tensor:
        assert self._grad_norm is not None  # made with the first state
        return self._grad_norm

    def _follow_parameters(self) -> None:
        """Brings state to the devices of parameters that were moved, and s to their dtype."""
        moved = False
        for k, segment in enumerate(self.segments()):
            members = [*filter(self.has_state, segment)]
            for p in members:
                state = self.state[p]
                for key in self.state_keys(self.param_groups[0]):
                    if key != "step" and state[key].device != p.device:
                        state[key] = state[key].to(p.device)
                        moved = True
            if members:
                s = self.state[members[0]]["alignment"]
                # ZeroRedundancyOptimizer loads state by itself: each parameter then has a copy of s.
                moved |= any(self.state[p]["alignment"] is not s for p in members)
                moved |= s.device.type != members[0].device.type or s.dtype != self._dtype_of(k, segment)
        if moved:
            params = [p for group in self.param_groups for p in group["params"]]
            self._share({p: self.state[p]["alignment"] for p in params if self.has_state(p)})
            self._grad_norm = None if self._grad_norm is None else self._new_grad_norm()

    def _may_fuse(self) -> bool:
        """Whether the options allow the fused step."""
        group = self.param_groups[0]
        if torch.compiler.is_compiling() or group["differentiable"] or group["fused"] is False:
            return False
        return group["fused"] is True or group["foreach"] is None

    def wants_fused(self) -> bool:
        """Whether the step is the fused one; an error where it must be and cannot."""
        if not self._may_fuse():
            return False
        if self._fused is not None:
            return True
        params = [p for group in self.param_groups for p in group["params"]]
        trained = [p for p in params if p.requires_grad or p.grad is not None]
        if not trained and self.shards is not None:  # others may have some
            return False
        reason = obstacle(trained)
        if reason is None or not self._shared_option("fused"):
            return reason is None
        # Only the parameters that the step moves must allow it, as with torch's optimizers.
        moved = [p for p in trained if p.grad is not None]
        reason = obstacle(moved) if moved else None
        if reason is not None:
            raise RuntimeError(f"fused=True is not possible: {reason}")
        return True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave unscaling and skipping to the step.

        As torch's optimizers say it: where the fused step was asked for. Lightning refuses to clip gradients
        for optimizers that unscale them by themselves. And where GradScaler's verdicts may differ from rank
        to rank: then the ranks exchange them in the step, and skip alike.
        """
        if self._shared_option("fused") is True and self.wants_fused():
            return True
        return self._in_pieces() and self.exchange.verdicts_differ and bool(self.exchange.groups)

    # ------------------------------------------------------------------ readings

    @property
    def alignment(self) -> Tensor:
        """s after the last step: 0-dim for scope "global", else one entry per segment."""
        s = self.segment_alignments()
        if self._shared_option("scope") == "global":
            return s[0].clone()
        if not s:  # a rank without tensors, beside others that have some
            return torch.zeros(0)
        return torch.stack([x.to(s[0].device) for x in s])

    @property
    def damping(self) -> Tensor:
        """d of the last step, of the shape of `alignment`: (1 + s) / 2 where `gain` is 1."""
        return torque.damping_of(self.alignment, self._shared_option("gain"))

    @property
    def grad_norm(self) -> Tensor:
        """|g| of the last step over all parameters, before clipping: 0-dim."""
        self._check_one_kind_of_device("grad_norm", self.param_groups)
        if not self.knows_grad_norm:
            raise RuntimeError(
                "whole_tensors=True with scope='tensor' exchanges nothing, so that |g| is not known: give "
                "max_grad_norm (math.inf clips nothing), and the ranks add it up"
            )
        if self._grad_norm is None:
            return self._new_grad_norm()
        return self._grad_norm.clone()

    @property
    def knows_grad_norm(self) -> bool:
        """Whether |g| is known: not where ranks with tensors of their own exchange nothing."""
        if self.shards is None or self._shared_option("max_grad_norm") is not None:
            return True
        return not self.exchange.has_whole_tensors

    # ------------------------------------------------------------------ segments

    def segments(self) -> list[list[Tensor]]:
        """The parameters of each segment, with or without gradients."""
        scope = self._shared_option("scope")
        groups = [group["params"] for group in self.param_groups]
        if scope == "group":
            return groups
        everything = list(chain(*groups))
        return [everything] if scope == "global" else [[p] for p in everything]

    def segment_alignments(self) -> list[Tensor]:
        """Each segment's s: the tensor its parameters share."""
        return [self._alignment_of(k, segment) for k, segment in enumerate(self.segments())]

    def _alignment_of(self, k: int, segment: Iterable[Tensor]) -> Tensor:
        """The tensor the parameters of segment k share; a new 0 before the segment's first gradient."""
        params = []
        for p in segment:
            state = self.state.get(p, {})
            if "alignment" in state:
                return state["alignment"]  # type: ignore[no-any-return]
            params.append(p)
        return self._kept[k] if k in self._kept else _zero(params)

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        everything: Iterable[Tensor] = chain.from_iterable(g["params"] for g in self.param_groups)
        k, segment = 0, everything  # no list is made: this is done for each parameter
        if group["scope"] == "group":
            k, segment = next(i for i, g in enumerate(self.param_groups) if g is group), group["params"]
        elif group["scope"] == "tensor":
            k, segment = next(i for i, q in enumerate(everything) if q is p) if self._kept else 0, [p]
        return {**super().new_state(p, group), "alignment": self._alignment_of(k, segment)}

    def _share(self, alignment: dict[Tensor, Tensor]) -> None:
        """Gives the parameters of each segment that have state one tensor, with the given s."""
        for k, segment in enumerate(self.segments()):
            members = [*filter(self.has_state, segment)]
            if not members:
                continue
            shared = torch.zeros((), dtype=self._dtype_of(k, segment), device=members[0].device)
            known = next((alignment[p] for p in members if p in alignment), None)
            if known is not None:
                shared.copy_(known.detach().reshape(()))
            for p in members:  # last: who is interrupted before that keeps the old ones
                self.state[p]["alignment"] = shared

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._fused = None
        params = [p for group in self.param_groups for p in group["params"]]
        known = {p: self.state[p]["alignment"] for p in params if "alignment" in self.state.get(p, {})}
        if known:  # the dtype of a segment's s depends on its parameters' dtypes
            self._share(known)

    def _new_grad_norm(self) -> Tensor:
        return _zero([p for group in self.param_groups for p in group["params"]])

    def commit(self, params: list[list[Tensor]], buckets: list[Bucket]) -> None:
        super().commit(params, buckets)
        for segment in self.segments():  # those without a gradient this time share s all the same
            moved = [p for p in segment if p.grad is not None]
            for p in segment:
                if moved and "alignment" in self.state.get(p, {}):
                    self.state[p]["alignment"] = self.state[moved[0]]["alignment"]

    # ------------------------------------------------------------------ the frame

    def _init_group(
        self, group: dict[str, Any], theta: list[Tensor], grad: list[Tensor], *columns: list[Tensor]
    ) -> None:
        super()._init_group(group, theta, grad, *columns)
        if self._grad_norm is None:
            self._grad_norm = self._new_grad_norm()

    def check_step(self) -> None:
        super().check_step()
        first = self.param_groups[0]
        if first["differentiable"] and self.shards is not None:
            raise RuntimeError("with shard_group differentiable=True cannot be done")
        if first["max_grad_norm"] is not None:
            self._check_one_kind_of_device("max_grad_norm", self.param_groups)
        if first["scope"] == "global":
            self._check_one_kind_of_device('scope="global"', self.param_groups)
        elif first["scope"] == "group":
            for group in self.param_groups:
                self._check_one_kind_of_device('scope="group"', [group])

    def _check_one_kind_of_device(self, what: str, groups: list[dict[str, Any]]) -> None:
        """One sum over the CPU and an accelerator would make the host wait for the device."""
        kinds = {p.device.type for group in groups for p in group["params"] if p.grad is not None}
        if "cpu" in kinds and len(kinds) > 1:
            raise RuntimeError(
                f"{what} needs one sum over all these parameters, but their devices are "
                f"{sorted(kinds)}: put them on one kind of device, or use scope='tensor' "
                "without max_grad_norm"
            )

    # ------------------------------------------------------------------ checkpoints

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"_fused": None, "_captured": [], "_exchange": None}
        kept = {name: self.__dict__[name] for name in ("_grad_norm", "shards", "_kept", "_wide")}
        return {**super().__getstate__(), **kept, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A pickle may be older than some options.
        for options in (self.defaults, *self.param_groups):
            for name, value in LATER.items():
                options.setdefault(name, value)

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = self._saved_alignment(checkpoint)
        ours = "smoothing" in checkpoint["param_groups"][0]
        for p, key in self._saved_keys(checkpoint):
            state = checkpoint["state"].get(key) or {}
            if ours and self.momentum_key in state and p not in saved:
                raise ValueError(f"the checkpoint has state but no alignment for parameter {key}")
            plain = [
                name for name, x in state.items() if isinstance(x, Tensor) and x.ndim and not is_dtensor(x)
            ]
            if is_dtensor(p) and plain:
                raise ValueError(
                    f"parameter {key} is sharded (a DTensor), but its {plain[0]} in the checkpoint is not: "
                    "load it with torch.distributed.checkpoint's set_optimizer_state_dict"
                )
        for segment in self.segments():
            values = {float(saved[p]) for p in segment if p in saved}
            if len(values) > 1:
                scope = checkpoint["param_groups"][0].get("scope", "another scope")
                raise ValueError(
                    f"the checkpoint has {len(values)} different alignments where "
                    f"scope={self.param_groups[0]['scope']!r} has one: it was written with "
                    f"scope={scope!r}, so load it into an optimizer with that scope"
                )

    def loaded(self, checkpoint: dict[str, Any]) -> None:
        super().loaded(checkpoint)
        self._fused = self._exchange = None  # all ranks load: they agree on s anew
        self._kept.clear()
        self._share(self._saved_alignment(checkpoint))

    def _saved_alignment(self, checkpoint: dict[str, Any]) -> dict[Tensor, Tensor]:
        """Each parameter's alignment as the checkpoint has it, not cast to the parameter's dtype."""
        found = {}
        for p, key in self._saved_keys(checkpoint):
            s = (checkpoint["state"].get(key) or {}).get("alignment")
            if s is None:
                continue
            if not is_dense_real(s) or s.numel() != 1 or not -1 <= float(s) <= 1:
                raise ValueError(
                    f"alignment={s!r} in the checkpoint: must be a tensor of one number in [-1, 1]"
                )
            found[p] = s
        return found

    def _saved_keys(self, checkpoint: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
        for own, saved in zip(self.param_groups, checkpoint["param_groups"], strict=True):
            yield from zip(own["params"], saved["params"], strict=True)


def _zero(params: list[Tensor]) -> Tensor:
    """A scalar for these parameters, on the device of the first that has a gradient."""
    home = next((p for p in params if p.grad is not None), params[0] if params else None)
    return torch.zeros((), dtype=_scalar_dtype(params), device=None if home is None else home.device)


def _scalar_dtype(params: list[Tensor]) -> torch.dtype:
    """float64 where all parameters are (complex128 counts as float64), else float32."""
    double = bool(params) and all(p.dtype in (torch.float64, torch.complex128) for p in params)
    return torch.float64 if double else torch.float32
