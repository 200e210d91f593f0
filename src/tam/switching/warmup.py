"""An optimizer that hands over to another one by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from tam._load_hooks import hooks_around_load
from tam._warnings import warn_user
from tam._wrappers import unwrap
from tam.options import REFUSED, turn_off
from tam.sharding.shard_group import set_shards, shards_of
from tam.switching.carry import Buffers, carry_buffers
from tam.switching.plan import Plan
from tam.switching.rules import (
    WARMUP_KEYS,
    NoRuleError,
    choose_buffers,
    explain_handover,
    refuse_options,
    refuse_sparse_buffers,
)
from tam.switching.schedulers import GROUP_RATES
from tam.switching.transfer import ParamGroup, check_alignment

Factory = Callable[[list[ParamGroup]], Optimizer]

STEPS, STEP, RATIO = WARMUP_KEYS
_AMP = ("grad_scale", "found_inf")  # where GradScaler leaves unscaling to the step


class Warmup(Optimizer):
    """Use one optimizer for a number of steps, then another one on the same parameters.

    The paper's warm-up: `Warmup(tam.TAM(params, lr=0.2), torch.optim.SGD, steps)`.

    There is one list `param_groups`, and `group["lr"]` always belongs to the scheduler: after the switch the
    second optimizer uses it times `group["warmup_ratio"]`. If `then` is a class, the options at the switch
    decide the ratio. All other options in a group are those of the active optimizer. Steps are counted as
    calls of `step`. A step that GradScaler skips inside a fused step counts, too, since the host does not
    know of it.

    Args:
        first: The optimizer to begin with; leave its steps to this one.
        then: A class, whose options are carried over as by `handover`; or a function that makes the second
            optimizer, all of its options included, from a list of groups that have parameters and nothing
            else: `lambda groups: torch.optim.Adam(groups, lr=1e-3)`. The function is called now, to see that
            it works, and at the switch.
        steps: How many steps `first` takes.
        buffers: "keep", "rescale" or "fresh", as for `handover`.
        alignment: $s^*$, as for `handover`.

    Raises:
        TypeError: If `first` is no optimizer or a Warmup, or `then` is neither a class nor a function that
            makes an optimizer.
        ValueError: If `steps` is not a whole number above 0, or there is no rule for the pair or an option.

    Examples:
        >>> import torch, tam
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = tam.Warmup(tam.TAM([p], lr=0.2), torch.optim.SGD, steps=2)
        >>> for _ in range(2):
        ...     p.square().sum().backward()
        ...     optimizer.step()
        >>> type(optimizer.optimizer).__name__, optimizer.param_groups[0]["warmup_ratio"]
        ('SGD', 0.5)
    """

    def __init__(
        self, first: Optimizer, then: type[Optimizer] | Factory, steps: int, *,
        buffers: Buffers | None = None, alignment: float | Tensor = 0.0,
    ) -> None:  # fmt: skip
        if not isinstance(first, Optimizer) or isinstance(first, Warmup):
            raise TypeError(f"first must be an optimizer and no Warmup, got a {type(first).__name__}")
        if not callable(then):
            raise TypeError(f"then must be an optimizer class or a function that makes one, got {then!r}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps <= 0:
            raise ValueError(f"steps must be a whole number above 0, got {steps!r}")
        if hasattr(first.step, "_wrapped_by_lr_sched"):
            warn_user(
                f"a scheduler sets the lr of this {type(first).__name__} and will not set that of the second "
                "optimizer: make the scheduler on the Warmup"
            )
        super().__init__(first.param_groups, first.defaults)
        self.first, self.then, self.buffers = first, then, buffers
        self.settled_alignment = check_alignment(alignment)
        self._second: Optimizer | None = None
        self.param_groups, self.state = first.param_groups, first.state
        # Made once now: what cannot be done is known before the training begins.
        second, plan = self._make_second()
        self._template = second
        set_shards(first, shards_of(second))
        if choose_buffers(type(first), type(second), buffers) != "fresh":
            _refuse_options(first, lambda name: turn_off("first.param_groups", name))
            _refuse_options(second, lambda name: f"make it with {name}={REFUSED[name]!r}")
        self._kinds = [_momentum_option(first), _momentum_option(second)]
        for group, ratio in zip(first.param_groups, self._lr_ratios(second, plan), strict=True):
            group |= {STEPS: steps, STEP: 0, RATIO: ratio}

    @property
    def optimizer(self) -> Optimizer:
        """The active optimizer: the one that takes the next step, with the options it would use now."""
        self._lend()
        return self._active

    @property
    def _active(self) -> Optimizer:
        return self.first if self._second is None else self._second

    @property
    def both(self) -> tuple[Optimizer, Optimizer]:
        """The two optimizers; before the switch, the second as it would be made at the start."""
        return self.first, self._second or self._template

    @property
    def switched(self) -> bool:
        """True if the second optimizer is the active one."""
        return self._second is not None

    @property
    def alignment(self) -> Tensor:
        """s of the last step; AttributeError if the active optimizer has none."""
        return self._reading("alignment")  # type: ignore[no-any-return]

    @property
    def damping(self) -> Tensor:
        """d of the last step; AttributeError if the active optimizer has none."""
        return self._reading("damping")  # type: ignore[no-any-return]

    @property
    def grad_norm(self) -> Tensor:
        """|g| of the last step; AttributeError if the active optimizer has none."""
        return self._reading("grad_norm")  # type: ignore[no-any-return]

    @property
    def backend(self) -> str | None:
        """What computed the last step; AttributeError if the active optimizer does not say."""
        return self._reading("backend")  # type: ignore[no-any-return]

    def _reading(self, name: str) -> Any:
        """Return a reading of the active optimizer; raise AttributeError, for hasattr, if it has none."""
        if not hasattr(type(self._active), name):
            raise AttributeError(f"Warmup has no {name} now: {type(self._active).__name__} is at work")
        return getattr(self._active, name)

    def __repr__(self) -> str:
        group = self.param_groups[0]
        left = max(group[STEPS] - group[STEP], 0)
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
        """Take one step of the active optimizer; after the last one of the first, hand over.

        Args:
            closure: A function that computes the loss and its gradients again.

        Returns:
            What the closure returns, or None without one.
        """
        self._check_cycled_momentum()
        self._lend()
        active = self._active
        amp_inputs = [name for name in _AMP if hasattr(self, name)]
        for name in amp_inputs:
            setattr(active, name, getattr(self, name))
        try:
            loss: float | None = active.step(closure)
        finally:
            for name in amp_inputs:
                delattr(active, name)
        # Now and not before the next step: GradScaler asks beforehand what the step can do.
        if self._second is None and self.param_groups[0][STEP] + 1 >= self.param_groups[0][STEPS]:
            self._switch()
        for group in self.param_groups:
            group[STEP] += 1
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self._active, "_step_supports_amp_scaling", False))

    def _lend(self) -> None:
        """Write the options as they stand in our groups, lr times the ratio, to the second optimizer."""
        second = self._second
        if second is None:  # the first has our groups
            return
        for ours, group in zip(self.param_groups, second.param_groups, strict=True):
            group |= {k: ours[k] for k in second.defaults if k != "lr"}
            if isinstance(ours["lr"], Tensor):
                if not isinstance(group["lr"], Tensor) or group["lr"] is ours["lr"]:
                    group["lr"] = ours["lr"].clone()
                group["lr"].copy_(ours["lr"] * ours[RATIO])  # in place: a compiled step knows the tensor
            else:
                group["lr"] = ours["lr"] * ours[RATIO]

    def _check_cycled_momentum(self) -> None:
        """Refuse a scheduler that writes a momentum which one of the two optimizers does not have."""
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
        """Hand over now, as if the first optimizer had taken its last step; do nothing if that is done.

        torch.distributed.checkpoint loads into state that is there: a new Warmup that is to take a
        checkpoint from after the switch must have switched before.
        """
        if self._second is None:
            self._switch()
            for group in self.param_groups:
                group[STEP] = group[STEPS]

    @_disable_dynamo
    def _switch(self) -> None:
        second, plan = self._make_second()
        buffers = choose_buffers(type(self.first), type(second), self.buffers)
        carry_buffers(self.first, second, buffers, alignment=self.settled_alignment, release=True)
        # Our groups stay the same objects, and show the options of the active optimizer.
        self.first.param_groups = [dict(group) for group in self.param_groups]
        for ours, group in zip(self.param_groups, second.param_groups, strict=True):
            for name in [name for name in self.first.defaults if name not in second.defaults]:
                ours.pop(name, None)
            ours |= {k: group[k] for k in second.defaults if k != "lr"}
        if plan is not None:  # a scheduler may have cycled beta1, by which buffers and weight decay go, too
            for ours, factor in zip(self.param_groups, plan.factors, strict=True):
                ours[RATIO] = factor
        self._activate(second)

    def _activate(self, second: Optimizer | None) -> None:
        """Make the second optimizer (None: the first) the active one."""
        self._second = second
        self.state = self._active.state
        self.defaults = {**self._active.defaults, "lr": self.first.defaults["lr"]}

    def _make_second(self) -> tuple[Optimizer, Plan[Optimizer] | None]:
        """Return the second optimizer, without state, and the plan of it where there is one."""
        if isinstance(self.then, type):
            then: type[Optimizer] = self.then
            try:
                plan = explain_handover(
                    self.first, then, buffers=self.buffers, alignment=self.settled_alignment
                )
            except NoRuleError as error:
                remedy = f"give `then` as a function, lambda groups: {then.__name__}(groups, lr=...)"
                if error.option in REFUSED:
                    remedy = (
                        f'{turn_off("first.param_groups", error.option)}, or {remedy}, with buffers="fresh"'
                    )
                raise ValueError(f"{error.reason}: {remedy}") from None
            return plan.build(), plan
        second = self.then([_without_options(group) for group in self.first.param_groups])
        if not isinstance(second, Optimizer):
            raise TypeError(f"then must make an optimizer, got a {type(second).__name__}")
        _check_same_parameters(self.first, second)
        if choose_buffers(type(self.first), type(second), self.buffers) != "fresh":
            refuse_sparse_buffers(self.first, type(second))
        set_shards(second, shards_of(self.first))
        return second, None

    def _lr_ratios(self, second: Optimizer, plan: Plan[Optimizer] | None) -> Sequence[float]:
        """Return the second optimizer's lr divided by the first one's, for each group."""
        if plan is not None:
            return plan.factors
        first_lrs = [float(group["lr"]) for group in self.first.param_groups]
        second_lrs = [float(group["lr"]) for group in second.param_groups]
        if 0 in first_lrs:
            raise ValueError(
                f"group {first_lrs.index(0)}: lr is 0, so the second optimizer's cannot be a multiple of it; "
                "make the Warmup before the scheduler"
            )
        return [b / a for a, b in zip(first_lrs, second_lrs, strict=True)]

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; one added after the switch has the lr ratio of the first group.

        Args:
            param_group: The group, with parameters and options as for the active optimizer.
        """
        if not hasattr(self, "first"):  # torch's __init__ takes over the groups of the first optimizer
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        if not isinstance(params, Tensor):
            # It may be a generator, and is needed twice.
            param_group = {**param_group, "params": list(params)}
        progress = {key: self.param_groups[0][key] for key in WARMUP_KEYS}
        if self._second is None:
            with _unchanged_by_errors(self.first):
                self.first.add_param_group(param_group)
                self.param_groups[-1] |= {**progress, RATIO: self._lr_ratios(*self._make_second())[-1]}
            return
        with _unchanged_by_errors(self.first), _unchanged_by_errors(self._second):
            self.first.add_param_group({"params": param_group["params"]})
            self._second.add_param_group({**self.defaults, **param_group})
        self.param_groups.append({**self._second.param_groups[-1], **progress})

    # ------------------------------------------------------------------ checkpoints

    def __getstate__(self) -> dict[str, Any]:
        names = ("first", "then", "buffers", "settled_alignment", "_second", "_template", "_kinds")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "alignment" in state:  # pickled when that was the name of s*
            state = {**state, "settled_alignment": state["alignment"]}
            del state["alignment"]
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of a Warmup, from before or after its switch.

        Args:
            state_dict: What `state_dict()` of a Warmup returned.

        Raises:
            ValueError: If it is no checkpoint of a Warmup, or one of other optimizers.
        """
        active: list[Optimizer] = []

        def before(_: Optimizer, checkpoint: dict[str, Any]) -> dict[str, Any]:
            groups = checkpoint["param_groups"]
            if not all(key in group for group in groups for key in WARMUP_KEYS):
                raise ValueError(
                    f"this is no checkpoint of a Warmup: its groups have no {STEPS!r}; load one of "
                    f"{type(self.first).__name__} into the first optimizer before you make the Warmup"
                )
            has_switched = groups[0][STEP] >= groups[0][STEPS]
            optimizer = (self._second or self._make_second()[0]) if has_switched else self.first
            name = _momentum_option(optimizer)
            if name in optimizer.defaults and any(name not in group for group in groups):
                raise ValueError(
                    f"the checkpoint is of another optimizer than {type(optimizer).__name__}: its groups "
                    f"have no {name!r}, but {', '.join(sorted(groups[0])[:8])}"
                )
            optimizer.load_state_dict(checkpoint)
            active.append(optimizer)
            return {**checkpoint, "state": {}}  # the rest is bookkeeping

        def after(_: Optimizer) -> None:
            second = None if active[-1] is self.first else active[-1]
            if second is None:
                self.param_groups = self.first.param_groups
            else:
                self.first.state.clear()
                self.param_groups = [dict(group) for group in second.param_groups]
                for group in second.param_groups:  # a checkpoint has them as our groups do
                    rates = [key for key in ("lr", *GROUP_RATES) if key in group]
                    group |= {key: group[key] * group[RATIO] for key in rates}
            self._activate(second)

        with hooks_around_load(self, before, after):
            super().load_state_dict(state_dict)


@contextmanager
def _unchanged_by_errors(optimizer: Optimizer) -> Iterator[None]:
    """Inside, an error takes back the group that was added, and what that has changed in the state."""
    group_count = len(optimizer.param_groups)
    params = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    state_by_param = {p: dict(optimizer.state[p]) for p in params}
    try:
        yield
    except BaseException:
        del optimizer.param_groups[group_count:]
        for p, state in state_by_param.items():
            optimizer.state[p].update(state)
        raise


def _refuse_options(optimizer: Optimizer, remedy: Callable[[str], str]) -> None:
    """Raise if an option of a group leaves its buffers without a rule."""
    for i, group in enumerate(optimizer.param_groups):
        refuse_options(i, type(optimizer), group, lambda name: f'{remedy(name)}, or give buffers="fresh"')


def _momentum_option(optimizer: Optimizer) -> str:
    """Return the option that a scheduler which cycles the momentum would write."""
    return "betas" if "betas" in optimizer.defaults else "momentum"


def _without_options(group: ParamGroup) -> ParamGroup:
    """Return a group's parameters without its options."""
    names = group.get("param_names")
    return {"params": list(zip(names, group["params"], strict=True) if names else group["params"])}


def _check_same_parameters(first: Optimizer, second: Optimizer) -> None:
    """Raise unless both have the same parameters in the same groups."""
    ids = [[[id(p) for p in group["params"]] for group in o.param_groups] for o in (first, second)]
    if ids[0] != ids[1]:
        counts = [[len(group) for group in groups] for groups in ids]
        raise ValueError(
            "the second optimizer must have the parameters it is given, in the same groups: the first has "
            f"groups of {counts[0]} parameters, the second of {counts[1]}, or other parameters"
        )
