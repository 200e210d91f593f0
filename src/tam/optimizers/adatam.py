"""AdaTAM and AdaTAMW: Adam and AdamW whose momentum is TAM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from tam._warnings import warn_user
from tam.optimizers.torque import TorqueOptimizer
from tam.options import Scope
from tam.switching import handover, match

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

ADAMS_LR = 1e-3  # Adam's scale: the paper's AdaTAM has 1e-4


class AdaTAM(TorqueOptimizer):
    r"""Adam with torque-aware momentum (Malviya et al. 2024).

    $$\begin{aligned}
    m_t &= \beta_1 m_{t-1} + (\epsilon + d_t) g_t \\
    v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
    \theta_t &= \theta_{t-1} - \eta m_t / (\sqrt{v_t} + c)
    \end{aligned}$$

    with d as in `TAM`. m is a sum, not an average: at the same lr the settled step is about 5 times Adam's,
    and without bias correction the early steps are larger still (16 times at step 1, 33 at 10, 6 at 1000).
    If you come from Adam, use `matching_adam`: it takes Adam's hyperparameters and converts them (a fifth of
    the lr, `bias_correction=True`). Parameters must not be float16: v would underflow.

    Args:
        params: parameters, named parameters or groups of either
        lr: $\eta$, a float or a tensor
        betas: $(\beta_1, \beta_2)$
        eps: c, added to the denominator
        weight_decay: $\lambda$, coupled (added to the gradient), outside the cosine; decoupled in `AdaTAMW`
        smoothing: $\gamma$, the decay rate of the smoothed cosine s; 1 keeps s at 0. It should not be below
            $\beta_1$: a much shorter average can make training diverge, and warns
            ([theory](../how-it-works/theory.md))
        floor: $\epsilon$, the smallest weight of a new gradient
        scope: what one cosine is taken over: "global" for all parameters, "group" or "tensor"
        gain: factor of s in the damping; 1 is the paper's rule, 0 keeps the damping at 1/2
        ema: $m \leftarrow (1 - w) m + w g$ with $w = \epsilon + d$, the paper's AdaTAM2; $\beta_1$ is unused
        bias_correction: divide v by $1 - \beta_2^t$, as Adam does; the paper does not. None is False, with
            a warning if lr is on Adam's scale (1e-3 or more) and not on AdaTAM's
        max_grad_norm: clip the gradient to this norm within the step, as `clip_grad_norm_` does
        maximize: ascend instead of descend
        foreach: True steps over lists of tensors, False tensor by tensor; None chooses
        fused: True uses the fused kernel, or raises if it cannot; False never uses it; None uses it if
            possible
        capturable: keep the step count on the device, as CUDA graphs need it
        differentiable: let autograd go through the step
        shard_group: the ranks over which plain tensors are sharded
            ([distributed training](../guides/distributed.md))
        whole_tensors: each of those tensors is complete on one rank, as with ZeroRedundancyOptimizer

    Examples:
        >>> import torch, tam
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = tam.AdaTAM(model.parameters(), lr=1e-4)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.damping, optimizer.grad_norm
        (tensor(0.5000), tensor(2.))
    """

    lr_family: ClassVar[Literal["sgd", "adam"]] = "adam"
    adaptive: ClassVar[bool] = True
    _takes_half: ClassVar[bool] = False
    _momentum_key: ClassVar[str] = "exp_avg"
    _state_keys: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")  # type: ignore[misc]
    _shared_options: ClassVar[tuple[str, ...]] = (
        *TorqueOptimizer._shared_options, "ema", "bias_correction",
    )  # fmt: skip

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, *, smoothing: float = 0.9, floor: float = 1e-8,
        scope: Scope = "global", gain: float = 1.0, ema: bool = False, bias_correction: bool | None = None,
        max_grad_norm: float | None = None, maximize: bool = False, foreach: bool | None = None,
        fused: bool | None = None, capturable: bool = False, differentiable: bool = False,
        shard_group: ProcessGroup | None = None, whole_tensors: bool = False,
    ) -> None:  # fmt: skip
        options = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "smoothing": smoothing,
            "floor": floor, "scope": scope, "gain": gain, "ema": ema,
            "bias_correction": False if bias_correction is None else bias_correction,
            "max_grad_norm": max_grad_norm, "maximize": maximize, "foreach": foreach, "fused": fused,
            "capturable": capturable, "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, options, shard_group, whole_tensors)
        if bias_correction is None:
            self._warn_of_adams_lr()

    def _warn_of_adams_lr(self) -> None:
        """Warn if the lr looks like Adam's: by name alone the two are not interchangeable."""
        rates = [group["lr"] for group in self.param_groups]
        known = [float(lr) for lr in rates if not isinstance(lr, Tensor) or lr.device.type == "cpu"]
        if not known or max(known) < ADAMS_LR:
            return
        own, theirs = type(self).__name__, "AdamW" if self.decoupled else "Adam"
        warn_user(
            f"{own} with lr={max(known):g} takes much larger steps than {theirs} at that lr: about 5 times "
            f"once settled, 16 to 33 times at first. {own}.matching_{theirs.lower()}(...) takes {theirs}'s "
            "hyperparameters and converts them. If you mean this lr, pass bias_correction=False, the paper's "
            "rule (True shortens the first steps only)"
        )

    @classmethod
    def matching_adam(
        cls, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, *, foreach: bool | None = None,
        maximize: bool = False, capturable: bool = False, differentiable: bool = False,
        fused: bool | None = None, **options: object,
    ) -> Self:  # fmt: skip
        """Return an AdaTAM whose settled step is that of `torch.optim.Adam` with these hyperparameters.

        The lr is divided by 5 (for beta1 = 0.9 and s near 0), and `bias_correction` is True. Schedulers
        made for the new optimizer must use the converted lr, too. A tensor lr is copied.

        Args:
            params: parameters, named parameters or groups of either; a group's own options are Adam's, too
            lr: Adam's, as are `betas`, `eps`, `weight_decay`, `amsgrad`, `foreach`, `maximize`,
                `capturable`, `differentiable` and `fused`, in the same order and with the same defaults
            options: AdaTAM's own options, such as `scope` or `max_grad_norm`, and `alignment`: the s
                that you measured, if it is not near 0

        Raises:
            ValueError: if `amsgrad` is set, for which there is no rule

        Examples:
            >>> import torch, tam
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = tam.AdaTAM.matching_adam(model.parameters(), lr=1e-3)
            >>> round(optimizer.param_groups[0]["lr"], 6)
            0.0002
        """
        adam = torch.optim.Adam(
            params, lr, betas, eps, weight_decay, amsgrad,
            foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable,
        )  # fmt: skip
        return match(adam, cls, fused=fused, **options)

    @classmethod
    def from_adam(cls, optimizer: Optimizer, **options: object) -> Self:
        """Return this optimizer in place of torch's Adam or AdamW: the short form of `tam.handover`.

        Args:
            optimizer: torch's Adam or AdamW, with or without steps taken
            options: those of `tam.handover`: `buffers`, `lr`, `alignment`, `scheduler`, `verbose`, and
                options of the new optimizer

        Raises:
            TypeError: if `optimizer` is neither of the two
            ValueError: if there is no rule for one of its options; the message says what to do

        Examples:
            >>> import torch, tam
            >>> adam = torch.optim.Adam(torch.nn.Linear(3, 1).parameters(), lr=1e-3)
            >>> round(tam.AdaTAM.from_adam(adam).param_groups[0]["lr"], 6)
            0.0002
        """
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            if isinstance(optimizer, torch.optim.SGD):
                instead = "tam.TAM.from_sgd, or tam.handover(..., lr=...)"
            else:
                instead = "tam.handover"
            name = type(optimizer).__name__
            raise TypeError(f"from_adam takes torch's Adam or AdamW, not {name}: use {instead}")
        return handover(optimizer, cls, **options)  # type: ignore[arg-type]


class AdaTAMW(AdaTAM):
    r"""AdaTAM with decoupled weight decay.

    $\theta \leftarrow \theta (1 - \eta \lambda)$, then the step of `AdaTAM` without decay. If you come from
    AdamW, use `matching_adamw`: it takes AdamW's hyperparameters and converts them (a fifth of the lr, 5
    times the weight decay, `bias_correction=True`).

    Args:
        params: parameters, named parameters or groups of either
        lr: $\eta$, a float or a tensor
        betas: $(\beta_1, \beta_2)$
        eps: c, added to the denominator
        weight_decay: $\lambda$, decoupled: the weights are multiplied by $1 - \eta \lambda$ before the step
        smoothing: $\gamma$, the decay rate of the smoothed cosine s; 1 keeps s at 0. It should not be below
            $\beta_1$: a much shorter average can make training diverge, and warns
            ([theory](../how-it-works/theory.md))
        floor: $\epsilon$, the smallest weight of a new gradient
        scope: what one cosine is taken over: "global" for all parameters, "group" or "tensor"
        gain: factor of s in the damping; 1 is the paper's rule, 0 keeps the damping at 1/2
        ema: $m \leftarrow (1 - w) m + w g$ with $w = \epsilon + d$, the paper's AdaTAM2; $\beta_1$ is unused
        bias_correction: divide v by $1 - \beta_2^t$, as Adam does; the paper does not. None is False, with
            a warning if lr is on Adam's scale (1e-3 or more) and not on AdaTAM's
        max_grad_norm: clip the gradient to this norm within the step, as `clip_grad_norm_` does
        maximize: ascend instead of descend
        foreach: True steps over lists of tensors, False tensor by tensor; None chooses
        fused: True uses the fused kernel, or raises if it cannot; False never uses it; None uses it if
            possible
        capturable: keep the step count on the device, as CUDA graphs need it
        differentiable: let autograd go through the step
        shard_group: the ranks over which plain tensors are sharded
            ([distributed training](../guides/distributed.md))
        whole_tensors: each of those tensors is complete on one rank, as with ZeroRedundancyOptimizer

    Examples:
        >>> import torch, tam
        >>> optimizer = tam.AdaTAMW(torch.nn.Linear(3, 1).parameters(), lr=1e-4, weight_decay=0.1)
        >>> optimizer.param_groups[0]["betas"]
        (0.9, 0.999)
    """

    decoupled: ClassVar[bool] = True

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, *, smoothing: float = 0.9, floor: float = 1e-8,
        scope: Scope = "global", gain: float = 1.0, ema: bool = False, bias_correction: bool | None = None,
        max_grad_norm: float | None = None, maximize: bool = False, foreach: bool | None = None,
        fused: bool | None = None, capturable: bool = False, differentiable: bool = False,
        shard_group: ProcessGroup | None = None, whole_tensors: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay, smoothing=smoothing, floor=floor, scope=scope, gain=gain,
            ema=ema, bias_correction=bias_correction, max_grad_norm=max_grad_norm, maximize=maximize,
            foreach=foreach, fused=fused, capturable=capturable, differentiable=differentiable,
            shard_group=shard_group, whole_tensors=whole_tensors,
        )  # fmt: skip

    @classmethod
    def matching_adamw(
        cls, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
        foreach: bool | None = None, capturable: bool = False, differentiable: bool = False,
        fused: bool | None = None, **options: object,
    ) -> Self:  # fmt: skip
        """Return an AdaTAMW whose settled step is that of `torch.optim.AdamW` with these hyperparameters.

        The lr is divided by 5 and the weight decay multiplied by 5 (for beta1 = 0.9 and s near 0), since a
        step decays by lr times weight_decay. `bias_correction` is True. Schedulers made for the new
        optimizer must use the converted lr, too. A tensor lr is copied.

        Args:
            params: parameters, named parameters or groups of either; a group's own options are AdamW's, too
            lr: AdamW's, as are `betas`, `eps`, `weight_decay`, `amsgrad`, `maximize`, `foreach`,
                `capturable`, `differentiable` and `fused`, in the same order and with the same defaults
            options: AdaTAMW's own options, such as `scope` or `max_grad_norm`, and `alignment`: the s
                that you measured, if it is not near 0

        Raises:
            ValueError: if `amsgrad` is set, for which there is no rule

        Examples:
            >>> import torch, tam
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = tam.AdaTAMW.matching_adamw(model.parameters(), lr=1e-3, weight_decay=0.1)
            >>> round(optimizer.param_groups[0]["lr"], 6), round(optimizer.param_groups[0]["weight_decay"], 6)
            (0.0002, 0.5)
        """
        adamw = torch.optim.AdamW(
            params, lr, betas, eps, weight_decay, amsgrad,
            foreach=foreach, maximize=maximize, capturable=capturable, differentiable=differentiable,
        )  # fmt: skip
        return match(adamw, cls, fused=fused, **options)
