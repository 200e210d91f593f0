"""AngularGrad (Roy et al. 2021), the paper's adaptive baseline."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from tam._messages import describe_parameter
from tam.optimizers.base import Base
from tam.options import Method
from tam.sharding.dtensor import shard_groups
from tam.sharding.exchange import Exchange
from tam.step import angular
from tam.step.eager import Arithmetic, Bucket, GroupOptions, full_like_param


class AngularGrad(Base):
    r"""Adam scaled, per coordinate, by the angle between consecutive gradients (Roy et al. 2021).

    $$\begin{aligned}
    \tan A_t &= |(g_{t-1} - g_t) / (1 + g_{t-1} g_t)| \\
    A_{\min} &= \min(A_{t-1}, A_t) \\
    \phi_t &= \tanh(|\cos A_{\min}|) / 2 + 1 / 2 \\
    \theta_t &= \theta_{t-1} - \eta \phi_t \hat m_t / (\sqrt{\hat v_t} + \epsilon)
    \end{aligned}$$

    with Adam's bias-corrected moments. With `method="tan"`, the tangent takes the place of the cosine.

    Args:
        params: parameters, named parameters or groups of either
        lr: $\eta$, a float or a tensor
        betas: decay rates of the two moments
        eps: $\epsilon$, added to the denominator
        weight_decay: coupled: added to the gradient before anything else, as in Adam
        method: "cos" or "tan" of the angle
        vote: do what the authors' public code does. The stored angle and coefficient start at 0. Those of a
            tensor are replaced only if most of its coordinates do not exceed the stored angle. In practice
            that never happens: $\phi$ stays 1/2, and the step is Adam's at half the lr
        maximize: ascend instead of descend
        foreach: True steps over lists of tensors, False tensor by tensor; None chooses
        capturable: keep the step count on the device, as CUDA graphs need it
        differentiable: let autograd go through the step

    Examples:
        >>> import torch, tam
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = tam.AngularGrad(model.parameters(), lr=1e-3)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.backend
        'loop'
    """

    _shared_options: ClassVar[tuple[str, ...]] = (*Base._shared_options, "method", "vote")
    _mark: ClassVar[str] = "method"
    _takes_half: ClassVar[bool] = False
    _momentum_key: ClassVar[str] = "exp_avg"

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, method: Method = "cos", vote: bool = False,
        maximize: bool = False, foreach: bool | None = None, capturable: bool = False,
        differentiable: bool = False,
    ) -> None:  # fmt: skip
        options = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "method": method,
            "vote": vote, "maximize": maximize, "foreach": foreach, "capturable": capturable,
            "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, options)

    @property
    def _state_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._state_keys_of(self.param_groups[0])

    def _state_keys_of(self, group: GroupOptions) -> tuple[str, ...]:
        keys = ("step", "exp_avg", "exp_avg_sq", "previous_grad", "angle")
        return (*keys, "coefficient") if group["vote"] else keys

    def _new_state(self, p: Tensor, group: GroupOptions) -> dict[str, Tensor]:
        state = super()._new_state(p, group)
        if not group["vote"]:
            # No angle exceeds pi / 2, so at the first step the smaller one is the current one.
            state["angle"] = full_like_param(p, math.pi / 2)
        return state

    def _check_step(self) -> None:
        super()._check_step()
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if group["vote"] and p.grad is not None and shard_groups(p):
                    raise RuntimeError(
                        f"{describe_parameter(self, i, j)} is sharded: vote=True is one decision for a whole "
                        "tensor, which no rank has"
                    )

    def _apply_rule(
        self, ops: Arithmetic, buckets: list[Bucket], exchange: Exchange | None, found_inf: Tensor | None
    ) -> None:
        group = self.param_groups[0]
        angular.take_step(ops, group["method"], group["vote"], buckets)
