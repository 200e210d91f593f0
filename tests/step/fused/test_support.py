"""Which parameters the fused kernels take, and what is done with the others."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import tam
from tam.step.fused import cpu
from tam.step.fused.support import why_not_fused
from tests.helpers import TORQUE, parameters, params_of, train

SHAPES = [(3, 5), (7,), (2, 2)]


class Wrapped(torch.Tensor):
    """A tensor subclass the kernels know nothing of."""


def test_tensor_subclasses_are_left_to_torch() -> None:
    p = torch.randn(3).as_subclass(Wrapped).requires_grad_()
    optimizer = train(tam.TAM([p]), 2)
    assert optimizer.backend == "loop"


REFUSED: list[tuple[Any, str]] = [
    (
        lambda: [torch.zeros(3, dtype=torch.float8_e5m2, requires_grad=True)],
        "on cpu the kernel takes float32, .*, complex128; leave fused=None to use torch operations",
    ),
    (lambda: [torch.zeros(3, device="meta", requires_grad=True)], "no fused kernel for meta devices"),
    (lambda: [torch.randn(20)[::2].requires_grad_()], "has gaps in memory"),
    (lambda: [torch.randn(3, 1).expand(3, 4).requires_grad_()], "has gaps in memory"),
    (lambda: [torch.randn(3).as_subclass(Wrapped).requires_grad_()], "a parameter is a Wrapped"),
    (
        lambda: [torch.zeros(3, requires_grad=True), torch.zeros(3, device="meta", requires_grad=True)],
        "several devices: cpu, meta",
    ),
]


@pytest.mark.parametrize("make, why", REFUSED)
@pytest.mark.parametrize("cls", TORQUE)
def test_fused_true_where_it_is_not_possible_says_why(cls: type, make: Any, why: str) -> None:
    optimizer = cls(make(), fused=True)
    for p in params_of(optimizer):
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match=f"fused=True is not possible: .*{why}"):
        optimizer.step()
    assert len(optimizer.state) == 0 and optimizer.backend is None


@pytest.mark.parametrize("make, why", REFUSED)
def test_the_reason_is_the_same_without_an_optimizer(make: Any, why: str) -> None:
    assert re.search(why, why_not_fused(make()) or "")


@pytest.mark.parametrize(
    "p",
    [
        *(torch.zeros(3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)),
        *(torch.zeros(3, dtype=dtype) for dtype in (torch.complex64, torch.complex128)),
        torch.zeros(0),
        torch.zeros(()),
        torch.zeros(3, 4).t(),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(9)[1:5],
    ],
    ids=lambda p: f"{p.dtype} {tuple(p.shape)} {p.stride()}",
)
def test_what_the_cpu_kernel_takes(p: torch.Tensor) -> None:
    assert why_not_fused([p]) is None


def test_without_the_kernel_torchs_operations_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: "the CPU kernel was not built")
    assert train(tam.TAM(parameters(SHAPES)), 2).backend == "loop"
    assert tam.available_kernels()["cpu"] == "the CPU kernel was not built"
    with pytest.raises(RuntimeError, match="was not built"):
        train(tam.TAM(parameters(SHAPES), fused=True), 1)


def test_a_frozen_parameter_of_another_dtype_does_not_matter() -> None:
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.float16), requires_grad=False)
    optimizer = tam.TAM([*parameters(SHAPES), frozen])
    for p in params_of(optimizer)[:-1]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.backend == "c" and len(optimizer.state) == 3


WITHOUT_THE_KERNEL = """
import warnings

import torch
import tam
from tam.step.fused import cpu
from tam.step.fused.support import LONG_LIST

cpu.library = lambda: "the CPU kernel was not built"


def step(optimizer, take=None):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    (take or optimizer.step)()


def long_list(size=LONG_LIST, **options):
    return tam.TAM([torch.nn.Parameter(torch.ones(size // 2)) for _ in range(2)], **options)


warnings.simplefilter("error", UserWarning)
for options in ({"foreach": True}, {"foreach": False}, {"fused": False}, {"capturable": True}):
    step(long_list(**options))
step(tam.TAM([torch.ones(LONG_LIST)], differentiable=True))
step(long_list(LONG_LIST - 2))
step(tam.TAM([torch.nn.Parameter(torch.ones(LONG_LIST, dtype=torch.float16))]))
optimizer = long_list()
step(optimizer, torch.compile(optimizer.step, backend="eager"))

warnings.simplefilter("always")
first, second = long_list(), long_list()
with warnings.catch_warnings(record=True) as caught:
    step(first)
    step(first)
    step(second)
for warning in caught:
    print(warning.filename, warning.message)
"""


def test_a_long_step_without_the_kernel_warns_once_per_process() -> None:
    """And not where the user or torch.compile chose torch's operations, or the kernel would not serve."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_KERNEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (warning,) = done.stdout.splitlines()
    assert re.search(r"^<string> .*1,000,000 numbers .*was not built.*pip install .*fused=False", warning)
