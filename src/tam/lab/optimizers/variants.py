"""The lab's rules as optimizers of one network, for experiments whose trials train alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from tam.lab.optimizers.rule import Rule, RuleStack


class TAMVariant(Optimizer):
    """TAM with changes of its rule that are studied and not recommended.

    It takes the options of `Rule`, which are fixed from then on. All parameters are in one group. A parameter
    without a gradient counts as one with a gradient of 0. CUDA graphs can capture a step.
    """

    lr_family: ClassVar[str] = "sgd"
    decoupled: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 0.2, *, momentum: float = 0.9, floor: float = 1e-8,
        gain: float = 1.0, capturable: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        own = dict(options, momentum=momentum, floor=floor, gain=gain)
        self._make_rule(own)  # raises if an option is wrong
        super().__init__(params, {"lr": lr, **own})
        params_of_group = self.param_groups[0]["params"]
        self._stack = RuleStack([_flat(p) for p in params_of_group], [self._make_rule(own)])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError(f"{type(self).__name__} takes one group of parameters")
        super().add_param_group(param_group)
        for p in self.param_groups[0]["params"]:
            if torch.empty_like(p).stride() != p.stride():
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is not dense in memory: copy it")

    def _make_rule(self, options: dict[str, Any]) -> Rule:
        unknown = sorted(options.keys() - {field.name for field in fields(Rule)})
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {unknown[0]!r}")
        return Rule(adaptive=self.adaptive, **options)

    @property
    def alignment(self) -> Tensor:
        """s: one value, or one per parameter with `scope="tensor"`."""
        return self._stack.s[0] if self._is_per_tensor else self._stack.s[0, 0]

    @property
    def _is_per_tensor(self) -> bool:
        return self._stack.rules[0].scope == "tensor"

    def alignments(self) -> list[Tensor]:
        """Return the tensors that hold s, one per segment. The next step uses what is written to them."""
        return list(self._stack.s[0].unbind()) if self._is_per_tensor else [self._stack.s[0, 0]]

    @torch.no_grad()
    def hold_momentum_factor(self, s: Tensor) -> None:
        """Replace min(1, 2 d) of a soft restart by its mean over the given steps.

        A control with constant damping needs it: the mean of min(1, 2 d) is not min(1, 2 mean d). Without
        soft restarts nothing changes.

        Args:
            s: s of every step, [steps], or [steps, segments].
        """
        rule = self._stack.rules[0]
        if rule.soft_restart:
            factors = (2 * rule.damping(s.double())).clamp(max=1.0).mean(0)
            self._stack.momentum_factor.copy_(factors.expand_as(self._stack.momentum_factor))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        if not self._is_per_tensor:  # the stack has one s per tensor: `alignments` returns the first
            self._stack.s.copy_(self._stack.s[:, :1].clone())
        lr = torch.as_tensor(group["lr"], device=self._stack.device, dtype=torch.float32).reshape(1)
        self._stack.step([_flat_grad(p) for p in group["params"]], lr)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Parameters are not part of it."""
        stack = self._stack
        tensors = {"m": stack.m, "v": stack.v, "s": stack.s, "steps": stack.steps}
        groups = [{k: v for k, v in self.param_groups[0].items() if k != "params"}]
        return {"state": tensors, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        stack, state = self._stack, state_dict["state"]
        for own, stored in zip((*stack.m, *stack.v), (*state["m"], *state["v"]), strict=True):
            own.copy_(stored)
        stack.s.copy_(state["s"])
        stack.steps.copy_(state["steps"])
        self.param_groups[0] |= state_dict["param_groups"][0]


def _flat(p: Tensor) -> Tensor:
    """Return a view [1, elements] of a dense tensor, in the order of its memory."""
    return p.detach().as_strided((1, p.numel()), (p.numel(), 1), p.storage_offset())


def _flat_grad(p: Tensor) -> Tensor:
    """Return the gradient in the order of the parameter's memory."""
    if p.grad is None:
        return torch.zeros_like(_flat(p))
    if p.grad.stride() == p.stride():
        return _flat(p.grad)
    return _flat(torch.empty_like(p).copy_(p.grad))
