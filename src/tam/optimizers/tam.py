"""TAM: SGD with momentum whose new gradient is damped by its agreement with the momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from tam.optimizers.torque import TorqueOptimizer
from tam.options import Scope
from tam.switching import handover, match

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self


class TAM(TorqueOptimizer):
    r"""Torque-aware momentum (Malviya et al. 2024).

    $$\begin{aligned}
    S_t &= \langle m_{t-1}, g_t \rangle / (|m_{t-1}| |g_t|) \\
    s_t &= \gamma s_{t-1} + (1 - \gamma) S_t \\
    d_t &= (1 + \mathrm{clip}(\mathrm{gain}\, s_t, -1, 1)) / 2 \\
    m_t &= \beta m_{t-1} + (\epsilon + d_t) (k g_t + \lambda \theta_{t-1}) \\
    \theta_t &= \theta_{t-1} - \eta m_t
    \end{aligned}$$

    The gain is 1 in the paper. k is the clip factor, 1 without `max_grad_norm`. If you come from SGD with
    momentum, use `matching_sgd`: it takes SGD's hyperparameters and converts them (twice the lr). With
    `smoothing=1, floor=0.5`, TAM is torch's SGD.

    Args:
        params: parameters, named parameters or groups of either
        lr: learning rate $\eta$, a float or a tensor
        momentum: $\beta$
        weight_decay: $\lambda$, coupled (added to the gradient), outside the cosine
        smoothing: $\gamma$, the decay rate of the smoothed cosine s; 1 keeps s at 0. It should not be below
            `momentum`: a much shorter average can make training diverge, and warns
            ([theory](../how-it-works/theory.md))
        floor: $\epsilon$, the smallest weight of a new gradient
        scope: what one cosine is taken over: "global" for all parameters, "group" or "tensor"
        gain: factor of s in the damping; 1 is the paper's rule, 0 keeps the damping at 1/2
        max_grad_norm: clip the gradient to this norm within the step, as `clip_grad_norm_` does
        maximize: ascend instead of descend
        foreach: True steps over lists of tensors, False tensor by tensor; None chooses
        fused: True uses the fused kernel, or raises if it cannot; False never uses it; None uses it if
            possible
        capturable: has no effect, because TAM keeps no step count; accepted as in torch
        differentiable: let autograd go through the step
        shard_group: the ranks over which plain tensors are sharded
            ([distributed training](../guides/distributed.md))
        whole_tensors: each of those tensors is complete on one rank, as with ZeroRedundancyOptimizer

    Examples:
        >>> import torch, tam
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = tam.TAM(model.parameters(), lr=0.2)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.alignment, optimizer.damping
        (tensor(0.), tensor(0.5000))
    """

    lr_family: ClassVar[Literal["sgd", "adam"]] = "sgd"
    _momentum_key: ClassVar[str] = "momentum_buffer"
    _state_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)  # type: ignore[misc]

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 0.2, momentum: float = 0.9, *, weight_decay: float = 0.0,
        smoothing: float = 0.9, floor: float = 1e-8, scope: Scope = "global", gain: float = 1.0,
        max_grad_norm: float | None = None, maximize: bool = False, foreach: bool | None = None,
        fused: bool | None = None, capturable: bool = False, differentiable: bool = False,
        shard_group: ProcessGroup | None = None, whole_tensors: bool = False,
    ) -> None:  # fmt: skip
        options = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "smoothing": smoothing,
            "floor": floor, "scope": scope, "gain": gain, "max_grad_norm": max_grad_norm,
            "maximize": maximize, "foreach": foreach, "fused": fused, "capturable": capturable,
            "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, options, shard_group, whole_tensors)

    @classmethod
    def matching_sgd(
        cls, params: ParamsT, lr: float | Tensor = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
        foreach: bool | None = None, differentiable: bool = False, fused: bool | None = None,
        **options: object,
    ) -> Self:  # fmt: skip
        """Return a TAM whose settled step is that of `torch.optim.SGD` with these hyperparameters.

        The lr is doubled, since a gradient's weight is about 1/2 once s has settled near 0. Schedulers made
        for the new optimizer must use the doubled lr, too (`max_lr` of OneCycleLR, for example). A tensor lr
        is copied. Like SGD's, the default momentum is 0: give one.

        Args:
            params: parameters, named parameters or groups of either; a group's own options are SGD's, too
            lr: SGD's, as are `momentum`, `dampening`, `weight_decay`, `nesterov`, `maximize`, `foreach`,
                `differentiable` and `fused`, in the same order and with the same defaults
            options: TAM's own options, such as `scope` or `max_grad_norm`, and `alignment`: the s
                that you measured, if it is not near 0

        Raises:
            ValueError: if `dampening` or `nesterov` is set, for which there is no rule

        Examples:
            >>> import torch, tam
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = tam.TAM.matching_sgd(model.parameters(), lr=0.1, momentum=0.9)
            >>> optimizer.param_groups[0]["lr"]
            0.2
        """
        # `fused` is ours: torch's fused SGD does not take the same tensors.
        sgd = torch.optim.SGD(
            params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable,
        )  # fmt: skip
        return match(sgd, cls, fused=fused, **options)

    @classmethod
    def from_sgd(cls, optimizer: Optimizer, **options: object) -> Self:
        """Return a TAM in place of a `torch.optim.SGD`: the short form of `tam.handover`.

        Args:
            optimizer: torch's SGD, with or without steps taken
            options: those of `tam.handover`: `buffers`, `lr`, `alignment`, `scheduler`, `verbose`, and
                options of the new optimizer

        Raises:
            TypeError: if `optimizer` is no SGD
            ValueError: if there is no rule for one of its options; the message says what to do

        Examples:
            >>> import torch, tam
            >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1, momentum=0.9)
            >>> tam.TAM.from_sgd(sgd).param_groups[0]["lr"]
            0.2
        """
        if not isinstance(optimizer, torch.optim.SGD):
            if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                instead = "tam.AdaTAM.from_adam, or tam.handover(..., lr=...)"
            else:
                instead = "tam.handover"
            raise TypeError(f"from_sgd takes torch's SGD, not {type(optimizer).__name__}: use {instead}")
        return handover(optimizer, cls, **options)  # type: ignore[arg-type]
