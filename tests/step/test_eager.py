"""The arithmetic of the steps made of torch operations, and the buckets they work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tam.step.eager import (
    FOREACH,
    LOOP,
    PURE,
    Arithmetic,
    Bucket,
    as_compute_dtype,
    choose_arithmetic,
    full_like_param,
    increment_steps,
    make_buckets,
)
from tests.helpers import parameters

ARITHMETICS = [LOOP, FOREACH, PURE]
SHAPES = [(3, 5), (7,), ()]

# Given x, y, z and a coefficient: the operation, and the same in float64.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "neg": (lambda ops, x, y, z, a: ops.neg(x), lambda x, y, z, a: -x),
    "sqrt": (lambda ops, x, y, z, a: ops.sqrt(z), lambda x, y, z, a: z.sqrt()),
    "mul": (lambda ops, x, y, z, a: ops.mul(x, y), lambda x, y, z, a: x * y),
    "mul_": (lambda ops, x, y, z, a: ops.mul_(x, a), lambda x, y, z, a: x * a),
    "div_": (lambda ops, x, y, z, a: ops.div_(x, a), lambda x, y, z, a: x / a),
    "axpy": (lambda ops, x, y, z, a: ops.axpy(x, y, a), lambda x, y, z, a: x + a * y),
    "axpy_": (lambda ops, x, y, z, a: ops.axpy_(x, y, a), lambda x, y, z, a: x + a * y),
    "addcdiv_": (lambda ops, x, y, z, a: ops.addcdiv_(x, y, z, a), lambda x, y, z, a: x + a * y / z),
}


def operands() -> list[list[Tensor]]:
    """x, y and z, of which the last is positive."""
    x, y, z = ([p.detach() for p in parameters(SHAPES, seed=seed)] for seed in range(3))
    return [x, y, [t.abs() + 0.5 for t in z]]


def apply(
    ops: Arithmetic, operation: Callable[..., Any], columns: list[list[Tensor]], a: Any
) -> list[Tensor]:
    if ops.takes_lists:
        return list(operation(ops, *columns, a))
    return [operation(ops, *row, a) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("a", [0.3, torch.tensor(0.3)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("ops", ARITHMETICS, ids=lambda ops: ops.name)
def test_every_arithmetic_computes_the_same(ops: Arithmetic, name: str, a: Any) -> None:
    operation, exact = OPERATIONS[name]
    columns = operands()
    for result, row in zip(apply(ops, operation, columns, a), zip(*operands(), strict=True), strict=True):
        expected = exact(*(t.double() for t in row), float(a))
        torch.testing.assert_close(result, expected.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("ops", ARITHMETICS, ids=lambda ops: ops.name)
def test_only_an_underscore_may_write_and_only_into_the_first_operand(ops: Arithmetic, name: str) -> None:
    columns = operands()
    results = apply(ops, OPERATIONS[name][0], columns, 0.3)
    writes = name.endswith("_") and not ops.is_pure
    for result, x, before in zip(results, columns[0], operands()[0], strict=True):
        assert (result is x) == writes and torch.equal(x, before) != writes
    for column, untouched in zip(columns[1:], operands()[1:], strict=True):
        assert all(map(torch.equal, column, untouched))


@pytest.mark.parametrize("ops", ARITHMETICS, ids=lambda ops: ops.name)
def test_a_coefficient_per_tensor(ops: Arithmetic) -> None:
    x, y, _ = operands()
    a = [torch.tensor(0.1 * (i + 1)) for i in range(len(x))]
    if ops.takes_lists:
        results = ops.axpy_(ops.mul_(x, a), y, a)
    else:
        results = [ops.axpy_(ops.mul_(t, c), u, c) for t, u, c in zip(x, y, a, strict=True)]
    for result, t, u, c in zip(results, *operands()[:2], a, strict=True):
        torch.testing.assert_close(result, c * t + c * u)


@pytest.mark.parametrize("ops", ARITHMETICS, ids=lambda ops: ops.name)
def test_dot_is_one_sum_per_tensor_in_the_wide_dtype(ops: Arithmetic) -> None:
    x, y, _ = operands()
    sums = ops.dot(x, y, torch.float64)
    assert sums.dtype == torch.float64 and sums.shape == (len(x),)
    expected = torch.stack([(t.double() * u.double()).sum() for t, u in zip(x, y, strict=True)])
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ops", ARITHMETICS, ids=lambda ops: ops.name)
def test_steps_are_counted(ops: Arithmetic) -> None:
    steps = [torch.tensor(0.0), torch.tensor(7.0)]
    assert [float(t) for t in increment_steps(ops, steps)] == [1.0, 8.0]
    assert [float(t) for t in steps] == ([0.0, 7.0] if ops.is_pure else [1.0, 8.0])


class Wrapped(torch.Tensor):
    """A tensor subclass that the foreach operations know nothing of."""


def test_the_choice_is_torchs() -> None:
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    assert choose_arithmetic([here], foreach=None) is LOOP
    assert choose_arithmetic([there], foreach=None) is FOREACH
    assert choose_arithmetic([there, there.as_subclass(Wrapped)], foreach=None) is LOOP
    assert choose_arithmetic([here, there], foreach=None) is LOOP
    assert choose_arithmetic([here], foreach=True) is FOREACH
    assert choose_arithmetic([there], foreach=False) is LOOP
    assert choose_arithmetic([there], foreach=True, differentiable=True) is PURE


# ---------------------------------------------------------------------- buckets


def bucket_of(dtypes: list[torch.dtype], **group: Any) -> list[Bucket]:
    theta = [torch.full((2,), float(i), dtype=dtype) for i, dtype in enumerate(dtypes)]
    state = {
        "exp_avg": [torch.zeros_like(p) for p in theta],
        "step": [torch.tensor(float(i + 1)) for i in range(len(theta))],
    }
    shares = [10 + i for i in range(len(theta))]
    return make_buckets(
        {"capturable": False, **group}, 3, theta, [*map(torch.ones_like, theta)], state, shares
    )


def test_a_bucket_has_one_dtype_and_every_row_is_in_one_bucket() -> None:
    buckets = bucket_of([torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
    assert [bucket.rows for bucket in buckets] == [[0, 2], [1], [3], [4]]
    assert [bucket.shares for bucket in buckets] == [[10, 12], [11], [13], [14]]
    assert [bucket.needs_cast for bucket in buckets] == [False, True, False, True]
    wide = [bucket.compute_dtype == torch.float64 for bucket in buckets]
    assert wide == [False, False, True, True]
    for bucket in buckets:
        assert bucket.index == 3 and len({p.dtype for p in bucket.theta}) == 1
        for i, row in enumerate(bucket.rows):
            assert float(bucket.theta[i][0].real) == row and float(bucket.state["step"][i]) == row + 1


def test_state_of_another_dtype_than_its_parameter_needs_a_cast() -> None:
    theta, grad = [torch.zeros(2)], [torch.zeros(2)]
    for key, needs_cast in (("exp_avg", True), ("alignment", False), ("step", False)):
        (bucket,) = make_buckets({}, 0, theta, grad, {key: [torch.zeros(2, dtype=torch.float64)]})
        assert bucket.needs_cast == needs_cast


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("ops", ARITHMETICS, ids=lambda ops: ops.name)
def test_bias_corrections_are_exact_for_small_counts(ops: Arithmetic, capturable: bool) -> None:
    (bucket,) = bucket_of([torch.float32] * 3, capturable=capturable)
    corrections = bucket.bias_corrections(ops, 0.999)
    assert [isinstance(c, Tensor) for c in corrections] == [capturable or ops.is_pure] * 3
    exact = [1 - 0.999**t for t in (1, 2, 3)]
    assert [float(c) for c in corrections] == pytest.approx(exact, rel=1e-7)


def test_a_tensor_as_coefficient_is_a_scalar_of_the_compute_dtype() -> None:
    (low,), (wide,) = bucket_of([torch.bfloat16]), bucket_of([torch.float64])
    a = torch.tensor([0.25], dtype=torch.float64)
    for bucket in (low, wide):
        scalar = bucket.scalar(LOOP, a)
        assert scalar.shape == () and scalar.dtype == bucket.compute_dtype and float(scalar) == 0.25
        assert bucket.scalar(LOOP, 0.5) == 0.5


def test_the_compute_dtype_of_a_complex_column_is_real() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    (pairs,) = as_compute_dtype([x], torch.float32)
    assert pairs.tolist() == [[1, 2], [3, -4]]
    pairs.mul_(2)
    assert x.tolist() == [2 + 4j, 6 - 8j]  # a view
    (same,) = as_compute_dtype([pairs], torch.float32)
    assert same is pairs


def test_a_new_buffer_is_laid_out_like_its_parameter() -> None:
    p = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    buffer = full_like_param(p, 0.5)
    assert buffer.stride() == p.stride() and bool((buffer == 0.5).all())
    assert full_like_param(torch.zeros(2, dtype=torch.complex64), 0.5).tolist() == [0.5 + 0.5j] * 2
