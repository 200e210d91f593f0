"""Rules of stacked runs: against torch's optimizers, the library's, and plain loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import tam
from tam.lab import optimizers
from tam.lab.optimizers import rule_of
from tam.lab.optimizers.rule import Rule, RuleStack
from tests.helpers import gradients, parameters

SHAPES = [(7, 5), (3,), (2, 3, 2)]
STEPS = 30
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def make_stack(rules: Sequence[Rule]) -> RuleStack:
    """Return runs that start at the same parameters."""
    return RuleStack([torch.stack([p.detach()] * len(rules)) for p in parameters(SHAPES)], rules)


def grads_at(params: Sequence[Tensor], step: int) -> list[Tensor]:
    """Return noisy gradients of a quadratic whose minimum jumps: s has both signs."""
    jump, grads = 4.0 * (-1) ** (step // 3), []
    for p, noise in zip(params, gradients([p.float() for p in params], step), strict=True):
        scale = torch.linspace(0.05, 2, p.numel(), dtype=p.dtype).view(p.shape)
        grads.append(scale * (0.5 * p.detach() + noise.to(p.dtype) + jump))
    return grads


def take_steps(stack: RuleStack, lrs: Sequence[float], steps: int = STEPS) -> RuleStack:
    """Move every run on its own gradients; the noise is the same for all."""
    for step in range(steps):
        each = [grads_at([p[run] for p in stack.params], step) for run in range(len(lrs))]
        stack.step([torch.stack(column) for column in zip(*each, strict=True)], torch.tensor(lrs))
    return stack


def train_alone(optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> list[Tensor]:
    params = optimizer.param_groups[0]["params"]
    for step in range(STEPS):
        for p, g in zip(params, grads_at(params, step), strict=True):
            p.grad = g
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
    return [p.detach() for p in params]


LIBRARY: list[tuple[str, dict[str, Any], Callable[..., torch.optim.Optimizer]]] = [
    ("adamw", {}, torch.optim.AdamW),
    ("adamw", ADAMW, torch.optim.AdamW),
    ("sgdm", {"weight_decay": 0.1}, lambda params, **own: torch.optim.SGD(params, momentum=0.9, **own)),
    ("sgdm", {"momentum": 0.5}, torch.optim.SGD),
    ("tam", {}, tam.TAM),
    ("tam", {"weight_decay": 0.1, "scope": "tensor", "gain": 2.0, "smoothing": 0.95}, tam.TAM),
    ("tam", {"momentum": 0.8, "max_grad_norm": 0.5}, tam.TAM),
    ("adatamw", {}, tam.AdaTAMW),
    ("adatamw", {**ADAMW, "scope": "tensor", "gain": 2.0}, tam.AdaTAMW),
    ("adatamw", {**ADAMW, "bias_correction": True, "max_grad_norm": 0.5}, tam.AdaTAMW),
    ("adatamw", {**ADAMW, "bias_correction": True, "scope": "tensor", "floor": 0.01}, tam.AdaTAMW),
]


@pytest.mark.parametrize("name, options, make", LIBRARY)
def test_a_run_is_the_optimizer_of_this_name(
    name: str, options: dict[str, Any], make: Callable[..., torch.optim.Optimizer]
) -> None:
    """The defaults are the same, too: a trial's key leaves them out."""
    expected = train_alone(make(parameters(SHAPES), lr=0.01, **options))
    stack = take_steps(make_stack([rule_of(name, options)] * 2), [0.01, 0.003])
    for own, other in zip(stack.params, expected, strict=True):
        # A stack has its options in float32: 1 - beta2 is off by 1e-5 of itself.
        torch.testing.assert_close(own[0], other, atol=1e-5, rtol=2e-5)
        assert not torch.equal(own[1], own[0])


@pytest.mark.parametrize("name, make", [("adamw", torch.optim.AdamW), ("sgdm", torch.optim.SGD)])
def test_clipping_is_torchs(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    momentum = {"momentum": 0.9} if name == "sgdm" else {"weight_decay": 0.01}
    expected = train_alone(make(parameters(SHAPES), lr=0.01, **momentum), max_norm=0.5)
    stack = take_steps(make_stack([rule_of(name, {"max_grad_norm": 0.5})]), [0.01])
    for own, other in zip(stack.params, expected, strict=True):
        torch.testing.assert_close(own[0], other, atol=2e-6, rtol=2e-5)


def test_s_and_the_gradient_norm_can_be_read() -> None:
    optimizer = tam.AdaTAMW(parameters(SHAPES), lr=0.01, scope="tensor", bias_correction=True)
    train_alone(optimizer)
    stack = take_steps(make_stack([rule_of("adatamw", {"scope": "tensor", "bias_correction": True})]), [0.01])
    torch.testing.assert_close(stack.s[0], optimizer.alignment, atol=1e-6, rtol=1e-5)
    assert stack.grad_norm[0] == pytest.approx(float(optimizer.grad_norm), rel=1e-5)


# ---------------------------------------------------------------------- plain loops


@dataclass
class PlainLoop:
    """One run in float64, written from the formulas with one change of the rule at a time.

    m <- beta min(1, 2 d) m + d g with a soft restart; d between `low` and `high`; the cosine in the metric of
    1 / (sqrt(v) + eps) of the step before; the mask of C-AdamW (Liang et al. 2024,
    whose code bounds the mean of the mask by 0.001); lr *= 1 + h cos(g, last step).
    """

    lr: float
    torque: bool = True
    adaptive: bool = True
    decay: float = 0.1
    low: float = 0.0
    high: float = 1.0
    is_restarted: bool = False
    is_preconditioned: bool = False
    is_cautious: bool = False
    hyper: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    dampings: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)

    def run(self, steps: int = STEPS) -> list[Tensor]:
        params = [p.detach().double() for p in parameters(SHAPES)]
        m, v, last = ([torch.zeros_like(p) for p in params] for _ in range(3))
        s = [0.0] * len(params)
        for t in range(1, steps + 1):
            grads = grads_at(params, t - 1)
            self.lr *= 1 + self.hyper * cosine(grads, last)
            self.lrs.append(self.lr)
            for k, (p, g) in enumerate(zip(params, grads, strict=True)):
                root = torch.ones_like(p)
                if self.is_preconditioned and t > 1:
                    root = ((v[k] / (1 - self.beta2 ** (t - 1))).sqrt() + self.eps).sqrt()
                s[k] = 0.9 * s[k] + 0.1 * cosine([g / root], [m[k] / root])
                d = min(max((1 + s[k]) / 2, self.low), self.high)
                self.dampings.append(d)
                keep = self.beta1 * (min(1.0, 2 * d) if self.is_restarted else 1.0)
                weight = d + 1e-8 if self.torque else 1 - self.beta1
                if not self.adaptive:
                    m[k] = keep * m[k] + weight * (g + self.decay * p)
                    params[k] = p - self.lr * m[k]
                    continue
                m[k] = keep * m[k] + weight * g
                v[k] = self.beta2 * v[k] + (1 - self.beta2) * g * g
                last[k] = m[k] / ((v[k] / (1 - self.beta2**t)).sqrt() + self.eps)
                last[k] = last[k] if self.torque else last[k] / (1 - self.beta1**t)
                move = last[k]
                if self.is_cautious:
                    mask = (m[k] * g > 0).double()
                    move = move * mask / max(float(mask.mean()), 1e-3)
                params[k] = p * (1 - self.lr * self.decay) - self.lr * move
        return params


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    x, y = (torch.cat([tensor.flatten() for tensor in column]) for column in (a, b))
    norms = float(x.norm() * y.norm())
    return float(x @ y) / norms if norms else 0.0


TORQUE = {**ADAMW, "scope": "tensor", "bias_correction": True}
ADDED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("adatamw-variant", {**TORQUE, "max_damping": 0.5}, {"high": 0.5}),
    ("adatamw-variant", {**TORQUE, "min_damping": 0.45, "max_damping": 0.5}, {"low": 0.45, "high": 0.5}),
    ("adatamw-variant", {**TORQUE, "soft_restart": True}, {"is_restarted": True}),
    ("adatamw-variant", {**TORQUE, "preconditioned": True}, {"is_preconditioned": True}),
    ("c-adamw", ADAMW, {"torque": False, "is_cautious": True}),
    ("hypergradient-adamw", ADAMW, {"torque": False, "hyper": 0.02}),
    ("hypergradient-adamw", {**ADAMW, "hyper_lr": 0.2}, {"torque": False, "hyper": 0.2}),
    ("tam-variant", {"scope": "tensor", "soft_restart": True, "weight_decay": 0.1},
     {"adaptive": False, "is_restarted": True}),
    ("tam-variant", {"scope": "tensor", "min_damping": 0.48, "max_damping": 0.5, "weight_decay": 0.1},
     {"adaptive": False, "low": 0.48, "high": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize("name, options, changes", ADDED)
def test_a_changed_rule_is_its_formula(name: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    loop = PlainLoop(lr=0.01, **changes)
    expected = loop.run()
    stack = take_steps(make_stack([rule_of(name, options)]), [0.01])
    for own, other in zip(stack.params, expected, strict=True):
        torch.testing.assert_close(own[0].double(), other, atol=2e-5, rtol=1e-4)
    plain = PlainLoop(lr=0.01, torque=loop.torque, adaptive=loop.adaptive)
    differences = [float((a - b).abs().max()) for a, b in zip(plain.run(), expected, strict=True)]
    assert max(differences) > 2e-3  # the change matters here
    for bound in (loop.low, loop.high):
        assert bound in (0, 1) or bound in loop.dampings
    if loop.hyper:
        assert loop.lrs[0] == 0.01 and 0.01 * float(stack.lr_factor[0]) == pytest.approx(loop.lr, rel=1e-4)


def test_a_control_sets_the_momentum_factor() -> None:
    """A factor of 1 undoes soft restarts; NaN leaves the rule's own."""
    soft, plain = (
        rule_of("adatamw-variant", {**TORQUE, "soft_restart": restart}) for restart in (True, False)
    )
    stack = make_stack([soft, soft, plain])
    stack.momentum_factor[0] = 1.0
    take_steps(stack, [0.01] * 3)
    assert all(torch.equal(p[0], p[2]) and not torch.equal(p[1], p[2]) for p in stack.params)


def test_d_at_the_mean() -> None:
    """A constant s gives the mean of d, also where the bounds and the gain bend it."""
    s = torch.rand(50, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert torch.equal(Rule().alignment_at_mean_damping(s), s.mean(0))
    bent: tuple[dict[str, Any], ...] = (
        {"max_damping": 0.5},
        {"gain": 2.0, "min_damping": 0.05},
        {"gain": 0.0},
    )
    for options in bent:
        rule = Rule(**options)
        held = rule.damping(rule.alignment_at_mean_damping(s))
        torch.testing.assert_close(held, rule.damping(s).mean(0))


# ---------------------------------------------------------------------- a stack

EVERY = [
    Rule(adaptive=True, torque=False, bias_correction=True, beta2=0.95),
    Rule(adaptive=True, torque=False, bias_correction=True, cautious=True),
    Rule(adaptive=True, torque=False, bias_correction=True, hypergradient=0.1),
    Rule(adaptive=True, scope="tensor", max_damping=0.5, weight_decay=0.1),
    Rule(adaptive=True, soft_restart=True, momentum=0.8, max_grad_norm=0.5),
    Rule(adaptive=True, preconditioned=True, gain=2.0, min_damping=0.05, bias_correction=True),
]
LRS = [0.01, 0.02, 0.003, 0.005, 0.01, 0.002]


def test_the_order_and_the_company_do_not_matter() -> None:
    whole = take_steps(make_stack(EVERY), LRS)
    order = [4, 1, 5, 0, 3, 2]
    mixed = take_steps(make_stack([EVERY[i] for i in order]), [LRS[i] for i in order])
    for run, rule in enumerate(EVERY):
        alone = take_steps(make_stack([rule]), [LRS[run]])
        expected = whole.tensors(run)
        for others in (mixed.tensors(order.index(run)), alone.tensors(0)):
            assert all(torch.equal(a, b) for a, b in zip(expected, others, strict=True))


def test_a_compiled_step_is_the_eager_one() -> None:
    """As one graph, which other stacks of the same shape share."""
    step = torch.compile(RuleStack.step, dynamic=False, fullgraph=True, backend="aot_eager")
    expected, lrs = take_steps(make_stack(EVERY), LRS), torch.tensor(LRS)
    for rules in (EVERY, EVERY[::-1]):
        stack = make_stack(rules)
        lr_factor = stack.lr_factor
        for number in range(STEPS):
            each = [grads_at([p[run] for p in stack.params], number) for run in range(len(rules))]
            grads = [torch.stack(column) for column in zip(*each, strict=True)]
            step(stack, grads, lrs if rules is EVERY else lrs.flip(0))
        assert stack.lr_factor is lr_factor  # a CUDA graph reads it
        order = slice(None) if rules is EVERY else slice(None, None, -1)
        for run, other in enumerate(range(len(rules))[order]):
            for a, b in zip(stack.tensors(run), expected.tensors(other), strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_run_that_breaks_is_alone_in_it(value: float) -> None:
    whole, broken = make_stack(EVERY), make_stack(EVERY)
    for step in range(10):
        grads = [torch.stack([g] * len(EVERY)) for g in gradients(parameters(SHAPES), step)]
        whole.step(grads, torch.tensor(LRS))
        if step == 4:
            grads[1][2] = value
        broken.step([g.clone() for g in grads], torch.tensor(LRS))
    for run in range(len(EVERY)):
        pairs = list(zip(whole.tensors(run), broken.tensors(run), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs) == (run != 2)


def test_decay_can_be_left_out_for_some_parameters() -> None:
    rule = Rule(adaptive=True, weight_decay=0.5)
    params = [torch.ones(1, 3), torch.ones(1, 3)]
    stack = RuleStack(params, [rule], decays=[True, False])
    stack.step([torch.zeros(1, 3)] * 2, torch.tensor([0.1]))
    assert params[0].tolist() == [[pytest.approx(0.95)] * 3] and params[1].tolist() == [[1.0] * 3]


# ---------------------------------------------------------------------- names and options


def test_every_name_has_a_rule_or_says_that_it_has_none() -> None:
    adaptive = {
        "adamw",
        "adatamw",
        "adatamw-variant",
        "c-adamw",
        "hypergradient-adamw",
        "schedule-free-adamw",
    }
    known = adaptive | {"sgdm", "tam", "tam-variant"}
    for name in [*tam.registry.OPTIMIZERS, *optimizers.STUDIED]:
        if name in known:
            rule = rule_of(name, {})
            assert rule.adaptive == (name in adaptive) and rule.torque == ("tam" in name)
            assert rule_of(name.upper(), {}) == rule
        else:
            with pytest.raises(ValueError, match=f"no rule for the optimizer '{name}'"):
                rule_of(name, {})
    assert rule_of("c-adamw", {}).cautious and rule_of("hypergradient-adamw", {}).hypergradient == 0.02
    assert rule_of("adamw", {"betas": [0.8, 0.9]}).momentum == 0.8
    with pytest.raises(ValueError, match=r"'nadam': must be one of sgd, .*tam-variant"):
        rule_of("nadam", {})


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("tam", {"scope": "group"}, 'scope must be "global" or "tensor", got "group"'),
        ("tam", {"scope": "layer"}, "scope must be"),
        ("adatamw", {"betas": (0.9, 1.0)}, r"betas\[1\] must be a number in \[0, 1\), got 1.0"),
        ("adatamw", {"betas": 0.9}, "betas must be a pair"),
        ("tam", {"momentum": 1.5}, "momentum must be"),
        ("tam", {"smoothing": -0.1}, "smoothing must be"),
        ("tam", {"gain": math.inf}, "gain must be"),
        ("tam", {"max_grad_norm": -1.0}, "max_grad_norm must be"),
        ("adamw", {"weight_decay": -0.1}, "weight_decay must be"),
        ("adamw", {"eps": math.nan}, "eps must be"),
        ("tam-variant", {"min_damping": 0.6, "max_damping": 0.5}, "got 0.6 and 0.5"),
        ("tam-variant", {"max_damping": 1.1}, "0 <= min_damping <= max_damping <= 1 must hold"),
        ("tam-variant", {"preconditioned": True}, "need an adaptive rule"),
        ("hypergradient-adamw", {"hyper_lr": math.nan}, "hypergradient must be a finite number"),
    ],
)
def test_wrong_values(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule_of(name, options)


@pytest.mark.parametrize(
    "name, options",
    [("adamw", {"hyper_lr": 0.1}), ("adamw", {"nesterov": True}), ("adamw", {"torque": True}),
     ("tam", {"betas": (0.9, 0.99)})],
)  # fmt: skip
def test_options_of_another_rule(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        rule_of(name, options)


def test_a_stack_is_adaptive_or_not() -> None:
    with pytest.raises(ValueError, match="cannot mix adaptive rules"):
        make_stack([Rule(), Rule(adaptive=True)])
