"""The paper's algorithm as a reader meets it, then the same loop with every option.

Nothing here is fast, and nothing here is shared with the optimizers: they are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def paper(
    theta: Tensor,
    gradient: Callable[[Tensor], Tensor],
    steps: int,
    lr: float = 0.2,
    momentum: float = 0.9,
    smoothing: float = 0.9,
    floor: float = 1e-8,
) -> Tensor:
    r"""Return the parameters after some steps of Algorithm 1 of the paper.

    Args:
        theta: the parameters before the first step, one vector
        gradient: returns the gradient at a theta
        steps: the number of steps
        lr: $\eta$
        momentum: $\beta$
        smoothing: $\gamma$
        floor: $\epsilon$

    Examples:
        >>> import torch
        >>> from tam.reference import paper
        >>> paper(torch.ones(1), lambda theta: theta, steps=1, lr=0.2)  # no momentum yet: d = 1/2
        tensor([0.9000])
    """
    m = torch.zeros_like(theta)
    s = 0.0
    for _ in range(steps):
        g = gradient(theta)
        norms = float(m.norm()) * float(g.norm())
        cosine = float(torch.dot(m, g)) / norms if norms > 0 else 0.0  # S_t
        s = smoothing * s + (1 - smoothing) * cosine  # s_t
        d = (1 + s) / 2  # d_t
        m = momentum * m + (floor + d) * g
        theta = theta - lr * m
    return theta


@dataclass
class Group:
    """A parameter group of the reference: tensors and the options that are per group."""

    theta: list[Tensor]
    lr: float = 0.2
    momentum: float = 0.9  # beta, or beta1
    beta2: float = 0.999
    weight_decay: float = 0.0
    eps: float = 1e-8
    floor: float = 1e-8
    maximize: bool = False


@dataclass
class Reference:
    """The same loop for groups of parameters of any shape, with every option.

    `step(gradients)` takes one list per group, with None for a parameter without a gradient, and
    replaces `groups[i].theta[j]`, `m[i][j]`, `v[i][j]`, `s`. Give it float64 tensors: it computes in
    their dtype.

    Examples:
        >>> import torch
        >>> from tam.reference import Group, Reference
        >>> loop = Reference([Group([torch.ones(1)], lr=0.2)])
        >>> for _ in range(2):
        ...     loop.step([[torch.ones(1)]])
        >>> loop.groups[0].theta, round(loop.s[()], 6)  # the second gradient is along the momentum
        ([tensor([0.7000])], 0.1)
    """

    groups: list[Group]
    rule: str = "tam"  # "tam" | "adatam" | "adatamw"
    scope: str = "global"
    smoothing: float = 0.9
    gain: float = 1.0
    max_grad_norm: float | None = None
    ema: bool = False
    bias_correction: bool = False
    m: list[list[Tensor]] = field(init=False)
    v: list[list[Tensor]] = field(init=False)
    t: list[list[int]] = field(init=False)
    s: dict[tuple[int, ...], float] = field(init=False)  # by segment
    grad_norm: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.rule not in ("tam", "adatam", "adatamw"):
            raise ValueError(f"rule={self.rule!r}: must be 'tam', 'adatam' or 'adatamw'")
        self.m = [[torch.zeros_like(p) for p in group.theta] for group in self.groups]
        self.v = [[torch.zeros_like(p) for p in group.theta] for group in self.groups]
        self.t = [[0 for _ in group.theta] for group in self.groups]
        self.s = {}
        for i, group in enumerate(self.groups):
            for j in range(len(group.theta)):
                self.s[self.segment(i, j)] = 0.0

    def segment(self, i: int, j: int) -> tuple[int, ...]:
        """Return the segment that parameter j of group i belongs to."""
        return {"global": (), "group": (i,), "tensor": (i, j)}[self.scope]

    def step(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Take one step.

        Args:
            gradients: one list per group, with None for a parameter without a gradient
        """
        present = [
            (i, j, -g if self.groups[i].maximize else g)
            for i, row in enumerate(gradients)
            for j, g in enumerate(row)
            if g is not None
        ]
        self._settle(present)
        self.grad_norm = math.sqrt(sum(_dot(g, g) for _, _, g in present))
        k = 1.0
        if self.max_grad_norm is not None:
            k = self.max_grad_norm / (self.grad_norm + 1e-6)
            k = 1.0 if k > 1 else k
        for i, j, g in present:
            d = (1 + max(-1.0, min(1.0, self.gain * self.s[self.segment(i, j)]))) / 2
            self._move(i, j, k * g, self.groups[i].floor + d)

    def _settle(self, present: list[tuple[int, int, Tensor]]) -> None:
        """s of every segment that has a gradient."""
        for segment in {self.segment(i, j) for i, j, _ in present}:
            rows = [(i, j, g) for i, j, g in present if self.segment(i, j) == segment]
            mg = sum(_dot(self.m[i][j], g) for i, j, g in rows)
            mm = sum(_dot(self.m[i][j], self.m[i][j]) for i, j, g in rows)
            gg = sum(_dot(g, g) for i, j, g in rows)
            if not (math.isfinite(mg) and math.isfinite(mm) and math.isfinite(gg)):
                continue
            norms = math.sqrt(mm) * math.sqrt(gg)
            cosine = max(-1.0, min(1.0, mg / norms)) if norms > 0 else 0.0
            self.s[segment] = self.smoothing * self.s[segment] + (1 - self.smoothing) * cosine

    def _move(self, i: int, j: int, g: Tensor, w: float) -> None:
        """Parameter j of group i, given its clipped gradient and weight."""
        group = self.groups[i]
        theta, m, v = group.theta[j], self.m[i][j], self.v[i][j]
        if self.rule == "adatamw":
            theta = theta * (1 - group.lr * group.weight_decay)
        elif group.weight_decay != 0:
            g = g.add(theta, alpha=group.weight_decay)
        m = (1 - w) * m + w * g if self.ema else group.momentum * m + w * g
        if self.rule == "tam":
            theta = theta.add(m, alpha=-group.lr)  # like torch's SGD, to the last bit
        else:
            self.t[i][j] += 1
            v = group.beta2 * v + (1 - group.beta2) * _square(g)
            corrected = v / (1 - group.beta2 ** self.t[i][j]) if self.bias_correction else v
            theta = theta - group.lr * _divide(m, _sqrt(corrected) + _real(group.eps, m))
        group.theta[j], self.m[i][j], self.v[i][j] = theta, m, v


def angular_grad(
    theta: Tensor,
    gradients: Sequence[Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    method: str = "cos",
    vote: bool = False,
) -> Tensor:
    """Return one real tensor after the steps of AngularGrad with these gradients.

    Args:
        theta: the tensor before the first step
        gradients: one gradient per step
        lr: as for `tam.AngularGrad`, like all that follow
    """
    m, v, previous = (torch.zeros_like(theta) for _ in range(3))
    angle = coefficient = torch.zeros_like(theta)
    of = torch.cos if method == "cos" else torch.tan
    for t, g in enumerate(gradients, start=1):
        g = g + weight_decay * theta
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        current = torch.atan(abs((previous - g) / (1 + previous * g)))
        if vote:
            if int((current > angle).sum()) < int((current <= angle).sum()):
                angle, coefficient = current, of(current)
        else:
            coefficient = of(current if t == 1 else torch.minimum(angle, current))
            angle = current
        phi = torch.tanh(abs(coefficient)) / 2 + 1 / 2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        theta = theta - lr * phi * m_hat / (torch.sqrt(v_hat) + eps)
        previous = g
    return theta


# A complex tensor is a pair of reals: these act on the parts, not on the complex number.


def _parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _whole(x: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(x) if like.is_complex() else x


def _dot(x: Tensor, y: Tensor) -> float:
    return float((_parts(x) * _parts(y)).sum())


def _square(x: Tensor) -> Tensor:
    return _whole(_parts(x) ** 2, x)


def _sqrt(x: Tensor) -> Tensor:
    return _whole(_parts(x).sqrt(), x)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    return _whole(_parts(x) / _parts(y), x)


def _real(c: float, like: Tensor) -> Tensor:
    return _whole(torch.full_like(_parts(like), c), like)
