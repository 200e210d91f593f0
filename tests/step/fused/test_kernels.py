"""The Triton kernels in Triton's interpreter, on CPU tensors; needs TRITON_INTERPRET=1."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tam
from tam.step.fused import cpu, cuda, launcher
from tam.step.rule import Rule
from tests.helpers import (
    TORQUE,
    Path,
    assert_close,
    assert_same,
    compare_with_reference,
    gradients,
    parameters,
    params_of,
    reference_of,
    tensors,
    train,
)
from tests.sharding import test_shards
from tests.sharding.harness import on_ranks

CHUNK = 64  # small: the interpreter is slow
SHAPES = [(0,), (), (3,), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (3 * CHUNK + 7,)]


@pytest.fixture(autouse=True)
def kernels_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_cpu(monkeypatch)


def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(
        rows: torch.Tensor, segments: torch.Tensor, rule: Rule, exchanges: bool
    ) -> cuda.CudaBackend:
        return cuda.CudaBackend(rows, segments, rule, exchanges, torch.device("cpu"))

    monkeypatch.setattr(cpu, "CpuBackend", backend)
    monkeypatch.setattr(launcher, "SMALL_CHUNK", CHUNK)
    monkeypatch.setattr(cuda, "MEASURE", (32, 1))
    monkeypatch.setattr(cuda, "UPDATE", (16, 1))


VARIANTS: list[tuple[type, dict[str, Any]]] = [
    *[(cls, {"scope": scope}) for cls in TORQUE for scope in ("global", "group", "tensor")],
    *[(cls, {"weight_decay": 0.1, "maximize": True, "smoothing": 0.5, "floor": 0.25}) for cls in TORQUE],
    *[(cls, {"max_grad_norm": 0.5, "scope": scope}) for cls in TORQUE for scope in ("global", "tensor")],
    *[(cls, {"gain": 3.0, "smoothing": 0.5}) for cls in TORQUE],
    (tam.AdaTAM, {"ema": True}),
    (tam.AdaTAMW, {"bias_correction": True, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("cls, options", VARIANTS)
def test_matches_the_reference(cls: type, options: dict[str, Any]) -> None:
    params = parameters(SHAPES)
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.03}]
    optimizer = cls(groups, lr=0.01, fused=True, **options)
    reference, path = reference_of(optimizer), Path()
    for step in range(4):
        row = []
        for j, (p, g) in enumerate(zip(params, gradients(params, step), strict=True)):
            p.grad = None if (j + step) % 5 == 0 else g
            row.append(None if p.grad is None else g.double())
        optimizer.step()
        reference.step([row[:4], row[4:]])
        path.follow(reference)
        assert float(optimizer.grad_norm) == pytest.approx(reference.grad_norm, rel=1e-5)
    compare_with_reference(optimizer, reference, path)
    assert optimizer.backend == "triton"


def test_at_fixed_damping_it_is_torchs_sgd() -> None:
    # To the bit on a GPU (tests/gpu): the interpreter rounds an fma twice.
    ours = tam.TAM(parameters(SHAPES), 0.1, smoothing=1.0, floor=0.5, weight_decay=0.01, fused=True)
    theirs = torch.optim.SGD(parameters(SHAPES), 0.1, momentum=0.9, weight_decay=0.01)
    for p, q in zip(params_of(train(ours, 5)), params_of(train(theirs, 5)), strict=True):
        assert_close(p, q, 1e-6)


def test_mixed_dtypes() -> None:
    dtypes = [torch.float32, torch.bfloat16]
    fused_params = [parameters([(CHUNK + 5,)], dtype)[0] for dtype in dtypes]
    plain_params = [torch.nn.Parameter(p.detach().clone()) for p in fused_params]
    a, b = tam.AdaTAMW(fused_params, lr=0.01, fused=True), tam.AdaTAMW(plain_params, lr=0.01, foreach=False)
    train(a, 4)
    train(b, 4)
    assert_close(a.alignment, b.alignment, 1e-4, scale=1.0)
    # The interpreter does not round to bfloat16 but cuts off: a unit in the last place a step.
    for p, q, tol in zip(fused_params, plain_params, (1e-5, 4 * 2**-8), strict=True):
        assert_close(p.float(), q.float(), tol)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_grad_scale_and_found_inf_are_independent(scaled: bool, bad: bool) -> None:
    a, b = (train(tam.AdaTAM(parameters(SHAPES), fused=True), 1) for _ in range(2))
    before = [x.clone() for x in tensors(a)]
    for p, q, g in zip(params_of(a), params_of(b), gradients(params_of(a), 1), strict=True):
        p.grad, q.grad = g * 8 if scaled else g.clone(), g
    # On a CPU the optimizer reads the verdict before the kernels do.
    scale = torch.tensor(8.0) if scaled else None
    assert a.tables.step(a.param_groups, a.segments.grad_norm, scale, torch.tensor(float(bad)), [])
    b.step()
    if bad:
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), before, strict=True))
    else:
        assert_same(a, b)


def test_a_non_finite_gradient_leaves_s_as_it_was() -> None:
    optimizer = train(tam.TAM(parameters(SHAPES), fused=True), 3)
    before = optimizer.alignment
    params_of(optimizer)[4].grad[3] = float("nan")
    optimizer.step()
    assert torch.equal(optimizer.alignment, before)


def test_misaligned_parameters() -> None:
    storage = torch.randn(4 * CHUNK, generator=torch.Generator().manual_seed(0))
    p = storage[1 : 2 * CHUNK].requires_grad_()
    q = torch.nn.Parameter(p.detach().clone())
    a, b = tam.TAM([p], fused=True), tam.TAM([q], fused=True)
    for step in range(3):
        p.grad = gradients([q], step)[0]
        q.grad = p.grad.clone()
        a.step()
        b.step()
    assert torch.equal(p, q)
    assert not a.tables.backend.is_aligned and b.tables.backend.is_aligned


@pytest.mark.parametrize("change", ["layout", "dtype"])
def test_parameters_that_change_between_steps(change: str) -> None:
    a = tam.TAM(parameters([(8, 9), (5,)], torch.float32), lr=0.01, fused=True)
    b = tam.TAM(parameters([(8, 9), (5,)], torch.float32), lr=0.01, foreach=False)
    for optimizer in (a, b):
        train(optimizer, 2)
        for p in params_of(optimizer):
            if change == "layout":
                p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data
            else:
                p.data = p.data.bfloat16()
        train(optimizer, 2, start=2)
    assert_close(a.alignment, b.alignment, 1e-3, scale=1.0)
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert_close(p.float(), q.float(), 1e-5 if change == "layout" else 4 * 2**-8)


def test_a_float64_alignment_becomes_float32_with_its_parameters() -> None:
    optimizer = train(tam.TAM(parameters(SHAPES, torch.float64), foreach=False), 3)
    before = float(optimizer.alignment)
    for p in params_of(optimizer):
        p.data = p.data.float()
    optimizer.param_groups[0]["foreach"] = None
    for p, g in zip(params_of(optimizer), gradients(params_of(optimizer), 3), strict=True):
        p.grad = g * 0
    optimizer.step()
    assert optimizer.alignment.dtype == torch.float32
    assert float(optimizer.alignment) == pytest.approx(0.9 * before, rel=1e-5)


def test_an_lr_on_the_device_replaces_the_one_of_the_options() -> None:
    """Where an lr is read on the device, the options stay as they are; tests/gpu has the whole of it."""
    a, b = (
        tam.AdaTAMW([{"params": ps[:4]}, {"params": ps[4:]}], lr=0.5, weight_decay=0.1, **way)
        for ps, way in ((parameters(SHAPES), {"fused": True}), (parameters(SHAPES), {"foreach": False}))
    )
    train(a, 1)
    train(b, 1)
    for step in range(1, 4):
        rates = [torch.tensor(0.01 / step), torch.tensor([0.02 / step], dtype=torch.float64)]
        for i, rate in enumerate(rates):
            a.tables.backend.set_lr(i, rate)
            b.param_groups[i]["lr"] = float(rate)
        train(a, 1, start=step)
        train(b, 1, start=step)
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert_close(p, q, 2e-5, scale=1e-3)


def test_many_segments_settle_in_one_launch() -> None:
    optimizer = tam.TAM(parameters([(2,)] * 30), scope="tensor", smoothing=0.5, fused=True)
    reference = reference_of(optimizer)
    for step in range(2):
        drawn = gradients(params_of(optimizer), step)
        for p, g in zip(params_of(optimizer), drawn, strict=True):
            p.grad = g
        optimizer.step()
        reference.step([[g.double() for g in drawn]])
    assert_close(optimizer.alignment, torch.tensor(list(reference.s.values())), 1e-5)


# ---------------------------------------------------------------------- many ranks


def shards_of_three() -> Any:
    """The cases of plain shards, with these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        kernels_on_cpu(patch)
        found: dict[str, Any] = {"own": [], "unequal": []}
        for cls in TORQUE:
            for extra in ({}, {"scope": "group"}, test_shards.BOTH):
                options = test_shards.options_of(cls, {"fused": True}, **extra)
                found["own"].append(test_shards.own_sharding(cls, options))
                found["unequal"].append(test_shards.unequal(cls, options))
        return found


def test_three_ranks(tmp_path: pathlib.Path) -> None:
    results = on_ranks(shards_of_three, 3, tmp_path)
    for kind, cases in results[0].items():
        for i, first in enumerate(cases):
            for rank, result in enumerate(results):
                test_shards.check(kind, rank, result[kind][i], first, fused="triton")


def verdicts() -> Any:
    """Rank 1 finds a gradient that is not finite in the third of four steps."""
    with pytest.MonkeyPatch.context() as patch:
        kernels_on_cpu(patch)
        found = []
        for cls in TORQUE:
            pieces = [torch.nn.Parameter(test_shards.own_piece(x)) for x in test_shards.start()]
            optimizer = cls(pieces, lr=0.01, fused=True, shard_group=dist.group.WORLD)
            for t in range(4):
                for p, g in zip(pieces, test_shards.gradients(t), strict=True):
                    p.grad = test_shards.own_piece(g) * 4
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(float(t == 2 and dist.get_rank() == 1))
                optimizer.step()
                steps = {float(s["step"]) for s in optimizer.state.values() if "step" in s}
                found.append((optimizer.alignment, [x.clone() for x in tensors(optimizer)], steps))
            assert optimizer.backend == "triton"
        return found


def test_ranks_skip_alike(tmp_path: pathlib.Path) -> None:
    results = on_ranks(verdicts, 2, tmp_path)
    for found in results:
        for i in range(0, len(found), 4):
            _, second, third, fourth = found[i : i + 4]
            assert torch.equal(second[0], third[0]) and not torch.equal(third[0], fourth[0])
            assert all(map(torch.equal, second[1], third[1]))
            assert second[2] == third[2] and (not second[2] or (second[2], fourth[2]) == ({2.0}, {3.0}))
