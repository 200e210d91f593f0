"""An optimizer that hands over to another one by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, overload

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from tam._load_hooks import hooks_around_load
from tam._wrappers import unwrap
from tam.sharding import set_shards, shards_of
from tam.switching.handover import WARMUP, NoRuleError, Plan, carry, choose_buffers, plan, refuse
from tam.switching.transfer import check_alignment

Factory = Callable[[list[dict[str, Any]]], Optimizer]

STEPS, TAKEN, RATIO = WARMUP
_AMP = ("grad_scale", "found_inf")  # where GradScaler leaves unscaling to the step


class Warmup(Optimizer):
    """`first` for a number of steps, then another optimizer on the same parameters.

    The paper's warm-up: `Warmup(tam.TAM(params, lr=0.2), torch.optim.SGD, steps)`.

    `alignment`, `damping` and `grad_norm` are the readings of the optimizer at work, where it has them.

    There is one list `param_groups`, and `group["lr"]` always belongs to the scheduler: after the switch the
    second optimizer uses it times a fixed ratio, `group["warmup_ratio"]`. All other options in a group are
    those of the optimizer at work. Steps are counted as calls of `step`, one that GradScaler skips inside a
    fused step included, since the host does not know of it.

    Args:
        first: the optimizer to begin with; leave its steps to this one
        then: a class, whose options are carried over as by `handover`; or a function that makes the second
            optimizer, all of its options included, from a list of groups that have parameters and nothing
            else: `lambda groups: torch.optim.Adam(groups, lr=1e-3)`. It is called now, to see that it works,
            and at the switch
        steps: how many steps `first` takes
        buffers: "keep", "rescale" or "fresh", as for `handover`
        alignment: s*, as for `handover`
    """

    def __init__(
        self,
        first: Optimizer,
        then: type[Optimizer] | Factory,
        steps: int,
        *,
        buffers: str | None = None,
        alignment: float = 0.0,
    ) -> None:
        if not isinstance(first, Optimizer) or isinstance(first, Warmup):
            raise TypeError(f"first must be an optimizer and no Warmup, got a {type(first).__name__}")
        if not callable(then):
            raise TypeError(f"then must be an optimizer class or a function that makes one, got {then!r}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps <= 0:
            raise ValueError(f"steps must be a whole number above 0, got {steps!r}")
        if hasattr(first.step, "_wrapped_by_lr_sched"):
            warnings.warn(
                f"a scheduler sets the lr of this {type(first).__name__} and will not set that of the second "
                "optimizer: make the scheduler on the Warmup",
                UserWarning,
                stacklevel=2,
            )
        super().__init__(first.param_groups, first.defaults)
        self.first, self.then, self.buffers = first, then, buffers
        self.settled_alignment = check_alignment(alignment)
        self._second: Optimizer | None = None
        self.param_groups, self.state = first.param_groups, first.state
        # Made once now, so that what cannot be done is known before the training begins.
        second = self._template = self._make_second()
        set_shards(first, shards_of(second))
        if choose_buffers(type(first), type(second), buffers) != "fresh":
            for i, (ours, theirs) in enumerate(_pairs(first, second)):
                refuse(i, type(first), ours, 'set first.{setting}, or give buffers="fresh"')
                refuse(i, type(second), theirs, 'make it with {name}={harmless!r}, or give buffers="fresh"')
        self._kinds = [_kind(first), _kind(second)]
        for group, ratio in zip(first.param_groups, self._ratios(second), strict=True):
            group |= {STEPS: steps, TAKEN: 0, RATIO: ratio}

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that takes the next step."""
        return self.first if self._second is None else self._second

    @property
    def both(self) -> tuple[Optimizer, Optimizer]:
        """The two optimizers; before the switch, the second as it would be made at the start."""
        return self.first, self._second or self._template

    @property
    def switched(self) -> bool:
        """Whether the second optimizer is at work."""
        return self._second is not None

    @property
    def alignment(self) -> Tensor:
        """s of the last step, as the optimizer at work has it."""
        return self._reading("alignment")

    @property
    def damping(self) -> Tensor:
        """d of the last step, as the optimizer at work has it."""
        return self._reading("damping")

    @property
    def grad_norm(self) -> Tensor:
        """|g| of the last step, as the optimizer at work has it."""
        return self._reading("grad_norm")

    def _reading(self, name: str) -> Tensor:
        """Return a reading of the optimizer at work; an AttributeError where it has none, for hasattr."""
        if not hasattr(type(self.optimizer), name):
            raise AttributeError(f"Warmup has no {name} now: {type(self.optimizer).__name__} is at work")
        return getattr(self.optimizer, name)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        group = self.param_groups[0]
        left = max(group[STEPS] - group[TAKEN], 0)
        now = f"{type(unwrap(self)).__name__} at work, {left} of {group[STEPS]} warm-up steps left"
        _, _, groups = super().__repr__().partition("\n")
        return f"{type(self).__name__} ({now}\n{groups}"

    # ------------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # The count is no business of a graph; the optimizers' own steps are.
    # (torch.compiler.disable would import the compiler with this module.)
    @_disable_dynamo(recursive=False)
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of the optimizer at work; after the last one of the first, the hand-over."""
        self._check_cycled()
        active = self.optimizer
        if self._second is not None:
            self._lend(self._second)
        for name in _AMP:
            if hasattr(self, name):
                setattr(active, name, getattr(self, name))
        try:
            loss: float | None = active.step(closure)
        finally:
            for name in _AMP:
                if hasattr(self, name):
                    delattr(active, name)
        # Now and not before the next step: GradScaler asks beforehand what the step can do.
        if self._second is None and self.param_groups[0][TAKEN] + 1 >= self.param_groups[0][STEPS]:
            self._switch()
        for group in self.param_groups:
            group[TAKEN] += 1
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def _lend(self, second: Optimizer) -> None:
        """The options as they stand in our groups, lr times the ratio."""
        for ours, group in zip(self.param_groups, second.param_groups, strict=True):
            group |= {k: ours[k] for k in second.defaults if k != "lr"}
            if isinstance(ours["lr"], Tensor):
                if not isinstance(group["lr"], Tensor) or group["lr"] is ours["lr"]:
                    group["lr"] = ours["lr"].clone()
                group["lr"].copy_(ours["lr"] * ours[RATIO])  # in place: a compiled step knows the tensor
            else:
                group["lr"] = ours["lr"] * ours[RATIO]

    def _check_cycled(self) -> None:
        """Refuses a scheduler that writes a momentum which one of the two optimizers does not have."""
        ours, other = self._kinds if self._second is None else reversed(self._kinds)
        if ours == other:
            return
        for i, group in enumerate(self.param_groups):
            if "max_momentum" in group or (self._second is not None and other in group):
                raise RuntimeError(
                    f"group {i}: a scheduler cycles the momentum, but the first optimizer has "
                    f"{self._kinds[0]!r} and the second {self._kinds[1]!r}: make the scheduler with "
                    "cycle_momentum=False"
                )

    # ------------------------------------------------------------------ the switch

    def switch(self) -> None:
        """Hands over now, as if the first optimizer had taken its last step; nothing where that is done.

        torch.distributed.checkpoint loads into state that is there: a new Warmup that is to take a
        checkpoint from after the switch must have switched before.
        """
        if self._second is None:
            self._switch()
            for group in self.param_groups:
                group[TAKEN] = group[STEPS]

    @_disable_dynamo
    def _switch(self) -> None:
        second = self._make_second()
        buffers = choose_buffers(type(self.first), type(second), self.buffers)
        carry(self.first, second, buffers, alignment=self.settled_alignment, release=True)
        # Our groups stay the same objects, and show the options of the optimizer at work.
        self.first.param_groups = [dict(group) for group in self.param_groups]
        for ours, group in zip(self.param_groups, second.param_groups, strict=True):
            for name in [name for name in self.first.defaults if name not in second.defaults]:
                ours.pop(name, None)
            ours |= {k: group[k] for k in second.defaults if k != "lr"}
        self._work_with(second)

    def _work_with(self, second: Optimizer | None) -> None:
        """Makes the second optimizer (None: the first) the one at work."""
        self._second = second
        self.state = self.optimizer.state
        self.defaults = {**self.optimizer.defaults, "lr": self.first.defaults["lr"]}

    def _make_second(self) -> Optimizer:
        """The second optimizer, without state."""
        if isinstance(self.then, type):
            return self._plan(self.then).build()
        second = self.then([_bare(group) for group in self.first.param_groups])
        if not isinstance(second, Optimizer):
            raise TypeError(f"then must make an optimizer, got a {type(second).__name__}")
        _check_same_parameters(self.first, second)
        set_shards(second, shards_of(self.first))
        return second

    def _plan(self, then: type[Optimizer]) -> Plan:
        try:
            return plan(self.first, then, buffers=self.buffers, alignment=self.settled_alignment, options={})
        except NoRuleError as error:
            remedy = f"give `then` as a function, lambda groups: {then.__name__}(groups, lr=...)"
            if error.setting:
                remedy = f'set first.{error.setting}, or {remedy}, with buffers="fresh"'
            raise ValueError(f"{error.reason}: {remedy}") from None

    def _ratios(self, second: Optimizer) -> list[float]:
        """The second optimizer's lr by the first one's, for each group."""
        if isinstance(self.then, type):
            planned = self._plan(self.then)
            return [planned.factor(i) for i in range(len(planned.groups))]
        rates = [(float(a["lr"]), float(b["lr"])) for a, b in _pairs(self.first, second)]
        for i, (ours, _) in enumerate(rates):
            if ours == 0:
                raise ValueError(
                    f"group {i}: lr is 0, so that the second optimizer's cannot be a multiple of it; "
                    "make the Warmup before the scheduler"
                )
        return [theirs / ours for ours, theirs in rates]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; one added after the switch has the lr ratio of the first group."""
        if not hasattr(self, "first"):  # torch's __init__ takes over the groups of the first optimizer
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        if not isinstance(params, Tensor):
            param_group = {
                **param_group,
                "params": list(params),
            }  # it may be a generator, and is needed twice
        taken = {k: self.param_groups[0][k] for k in (STEPS, TAKEN, RATIO)}
        if self._second is None:
            self.first.add_param_group(param_group)
            self.param_groups[-1].update({**taken, RATIO: self._ratios(self._make_second())[-1]})
            return
        self.first.add_param_group({"params": param_group["params"]})
        try:
            self._second.add_param_group({**self.defaults, **param_group})
        except Exception:
            del self.first.param_groups[-1]
            raise
        self.param_groups.append({**self._second.param_groups[-1], **taken})

    # ------------------------------------------------------------------ checkpoints

    def __getstate__(self) -> dict[str, Any]:
        own = ("first", "then", "buffers", "settled_alignment", "_second", "_template", "_kinds")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "alignment" in state:  # pickled when that was the name of s*
            state = {**state, "settled_alignment": state["alignment"]}
            del state["alignment"]
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of a Warmup, from before or after its switch."""
        inner: list[Optimizer] = []

        def before(_: Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
            saved = checkpoint["param_groups"]
            if not all(key in group for group in saved for key in (STEPS, TAKEN, RATIO)):
                raise ValueError(
                    f"this is no checkpoint of a Warmup: its groups have no {STEPS!r}; load one of "
                    f"{type(self.first).__name__} into the first optimizer before you make the Warmup"
                )
            switched = saved[0][TAKEN] >= saved[0][STEPS]
            inner.append((self._second or self._make_second()) if switched else self.first)
            if any(_kind(inner[-1]) in inner[-1].defaults and _kind(inner[-1]) not in g for g in saved):
                raise ValueError(
                    f"the checkpoint is of another optimizer than {type(inner[-1]).__name__}: its groups "
                    f"have no {_kind(inner[-1])!r}, but {', '.join(sorted(saved[0])[:8])}"
                )
            inner[-1].load_state_dict(checkpoint)
            return {**checkpoint, "state": {}}  # the rest is bookkeeping

        def after(_: Optimizer) -> None:
            second = None if inner[-1] is self.first else inner[-1]
            if second is None:
                self.param_groups = self.first.param_groups
            else:
                self.first.state.clear()
                self.param_groups = [dict(group) for group in second.param_groups]
            self._work_with(second)

        with hooks_around_load(self, before, after):
            super().load_state_dict(state_dict)


def _kind(optimizer: Optimizer) -> str:
    """What a scheduler that cycles momentum would write."""
    return "betas" if "betas" in optimizer.defaults else "momentum"


def _pairs(a: Optimizer, b: Optimizer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(a.param_groups, b.param_groups, strict=True))


def _bare(group: dict[str, Any]) -> dict[str, Any]:
    """A group's parameters without its options."""
    names = group.get("param_names")
    return {"params": list(zip(names, group["params"], strict=True) if names else group["params"])}


def _check_same_parameters(first: Optimizer, second: Optimizer) -> None:
    counts = [[len(group["params"]) for group in o.param_groups] for o in (first, second)]
    if counts[0] != counts[1] or not all(
        p is q for a, b in _pairs(first, second) for p, q in zip(a["params"], b["params"], strict=True)
    ):
        raise ValueError(
            "the second optimizer must have the parameters it is given, in the same groups: the first has "
            f"groups of {counts[0]} parameters, the second of {counts[1]}, or other parameters"
        )
