"""Replace an optimizer in the middle of a run; training continues from the same state."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from tam.switching.carry import Buffers, carry_buffers
from tam.switching.plan import T
from tam.switching.rules import NoRuleError, explain_handover
from tam.switching.schedulers import Schedulers, reattach, warn_if_scheduled


def handover(
    optimizer: Optimizer, to: type[T], *, buffers: Buffers | None = None, lr: float | Tensor | None = None,
    alignment: float | Tensor = 0.0, scheduler: Schedulers | None = None, verbose: bool = False,
    **options: object,
) -> T:  # fmt: skip
    r"""Make an optimizer of another class on the same parameters, with the first one's groups and buffers.

    The lr, and with it decoupled weight decay, is transferred so the effective learning rate stays:

    | optimizer | effective learning rate |
    |---|---|
    | SGD | $\eta / (1 - \beta)$ |
    | TAM | $\eta d^* / (1 - \beta)$ |
    | Adam, AdamW | $\eta$ |
    | AdaTAM, AdaTAMW | $\eta d^* / (1 - \beta_1)$, or $\eta$ with `ema=True` |

    Here $d^* = (1 + \mathrm{clip}(k s^*, -1, 1)) / 2$ with the gain $k$. The first optimizer stays as it is;
    drop it to free its buffers. Where Adam has not taken a step yet, or its buffers are left behind, there is
    no correction to fold in, and AdaTAM(W) gets `bias_correction=True` unless you give it.

    Args:
        optimizer: torch's SGD, Adam or AdamW, or TAM, AdaTAM, AdaTAMW. Others have no rule: give `lr`
        to: the class to change to
        buffers: "keep" takes the momentum as it is (the paper's warm-up, and the default between SGD and TAM;
            the first steps after SGD are larger, those after TAM smaller). "rescale" lets the step continue
            (the default between Adam(W) and AdaTAM(W), with Adam's bias corrections folded in). "fresh"
            leaves the buffers behind (the default, and all there is, between optimizers that share nothing)
        lr: the lr of all groups, instead of the transferred one. Decoupled weight decay goes with it: lr
            times weight_decay stays
        alignment: $s^*$, the alignment that TAM or AdaTAM is taken to have, or starts with: a number, or a
            CPU tensor with one
        scheduler: the first optimizer's scheduler (one of torch's, or a list of them) to re-attach in place.
            Every lr to come is what it would have been, times the factor by which lr changes. Without it, a
            scheduler is left behind with a warning; an empty list says that you make a new one
        verbose: print the plan that `explain_handover` returns
        options: options of the new optimizer, in place of those carried over. If AdaTAM keeps
            its step count on a GPU, Adam gets `fused=True` (`capturable=True` for complex parameters), and
            the count stays there

    Returns:
        The new optimizer.

    Raises:
        TypeError: if `optimizer` is none or wraps another one, `to` is no optimizer class, or has no such
            option
        ValueError: if there is no rule for the pair or an option; the message says what to give

    Examples:
        >>> import torch, tam
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = tam.handover(sgd, tam.TAM, scope="tensor")
        >>> type(optimizer).__name__, optimizer.param_groups[0]["lr"]
        ('TAM', 0.2)
    """
    plan = explain_handover(
        optimizer, to, buffers=buffers, lr=lr, alignment=alignment, scheduler=scheduler, **options
    )
    if verbose:
        print(plan)
    new = plan.build()
    carry_buffers(optimizer, new, plan.buffers, alignment=plan.alignment)
    reattach(plan.schedulers, optimizer, new)
    if scheduler is None:
        warn_if_scheduled(optimizer, to)
    return new


def match(optimizer: Optimizer, to: type[T], **options: object) -> T:
    """Hand over from an optimizer that was made for its hyperparameters alone."""
    try:
        return handover(optimizer, to, **options)  # type: ignore[arg-type]
    except NoRuleError as error:
        # Its remedies are for an optimizer that the user has.
        remedy = f": leave {error.option} out" if error.option else ""
        raise ValueError(
            f"{to.__name__} cannot match this {type(optimizer).__name__}: {error.reason}{remedy}"
        ) from None
