"""AdaTAM and AdaTAMW: Adam and AdamW whose momentum is TAM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from tam.kernels import torque
from tam.optimizers.torque import TorqueOptimizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self


class AdaTAM(TorqueOptimizer):
    r"""Adam with torque-aware momentum (Malviya et al. 2024).

    .. math::
        m_t &= \beta_1 m_{t-1} + (\epsilon + d_t) g_t, \qquad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        \theta_t &= \theta_{t-1} - \eta m_t / (\sqrt{v_t} + c)

    with d as in :class:`TAM`. m is a sum, not an average: at the same lr the settled step is about 5
    times Adam's, and without bias correction the early steps are larger still (16 times at step 1,
    33 at 10, 6 at 1000). Coming from Adam: `bias_correction=True` and a fifth of Adam's lr.

    Args:
        params: parameters, named parameters or groups of either
        lr: learning rate, a float or a tensor
        betas: (beta1, beta2)
        smoothing: gamma, of the smoothed cosine s; 1 keeps s at 0
        eps: c, added to the denominator
        floor: epsilon, the least weight of a new gradient
        weight_decay: lambda, coupled (added to the gradient), outside the cosine; decoupled in AdaTAMW
        scope: what one cosine is taken over: "global" all parameters, "group" a group, "tensor" one
        ema: m <- (1 - w) m + w g with w = epsilon + d, the paper's AdaTAM2; beta1 is then unused
        bias_correction: divide v by 1 - beta2^t, as Adam does; the paper does not
        max_grad_norm: clip the gradient to this norm, as clip_grad_norm_ does, within the step
        maximize: ascend
        foreach: the step over lists of tensors (True), one by one (False), or as fits best (None)
        fused: the step in one kernel (True), not so (False), or where it can be (None)
        capturable: keep the step count on the device, as CUDA graphs need it
        differentiable: let autograd go through the step
        shard_group: the ranks over which plain tensors are sharded; docs/distributed.md tells more
        whole_tensors: each of those tensors lies on one rank whole, as with ZeroRedundancyOptimizer
    """

    momentum_key: ClassVar[str] = "exp_avg"
    decoupled: ClassVar[bool] = False  # is the weight decay outside the gradient?
    shared_options: ClassVar[tuple[str, ...]] = (
        *TorqueOptimizer.shared_options, "ema", "bias_correction",
    )  # fmt: skip

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        smoothing: float = 0.9,
        eps: float = 1e-8,
        floor: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        scope: str = "global",
        ema: bool = False,
        bias_correction: bool = False,
        max_grad_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        shard_group: ProcessGroup | None = None,
        whole_tensors: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "smoothing": smoothing,
            "eps": eps,
            "floor": floor,
            "weight_decay": weight_decay,
            "scope": scope,
            "ema": ema,
            "bias_correction": bias_correction,
            "max_grad_norm": max_grad_norm,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        super().__init__(params, options, shard_group, whole_tensors)

    @classmethod
    def from_adam(cls, optimizer: Optimizer, **options: Any) -> Self:
        """This optimizer in place of torch's Adam or AdamW; `tam.handover` says how."""
        from tam.hand_over import handover  # it knows all the optimizers, so it cannot be imported above

        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            raise TypeError(
                f"from_adam takes torch's Adam or AdamW, not {type(optimizer).__name__}: use tam.handover"
            )
        return cast("Self", handover(optimizer, cls, **options))

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq")

    @property
    def rule(self) -> torque.Rule:
        group = self.param_groups[0]
        return torque.Rule(
            scope=group["scope"],
            smoothing=group["smoothing"],
            max_grad_norm=group["max_grad_norm"],
            adaptive=True,
            decoupled=self.decoupled,
            ema=group["ema"],
            bias_correction=group["bias_correction"],
        )


class AdaTAMW(AdaTAM):
    r"""AdaTAM with decoupled weight decay.

    :math:`\theta \leftarrow \theta (1 - \eta \lambda)`, then :class:`AdaTAM` without decay. Coming
    from AdamW: `bias_correction=True`, a fifth of the lr and 5 times the weight decay, since the
    decay of a step is lr times lambda. The options are AdaTAM's.
    """

    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        smoothing: float = 0.9,
        eps: float = 1e-8,
        floor: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        scope: str = "global",
        ema: bool = False,
        bias_correction: bool = False,
        max_grad_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        shard_group: ProcessGroup | None = None,
        whole_tensors: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            smoothing,
            eps,
            floor,
            weight_decay,
            scope=scope,
            ema=ema,
            bias_correction=bias_correction,
            max_grad_norm=max_grad_norm,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
            shard_group=shard_group,
            whole_tensors=whole_tensors,
        )
