"""The fused step on a GPU against the reference, and what only a GPU shows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tam
from tam.step.fused import cuda, launcher
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

CHUNK = launcher.SMALL_CHUNK
SHAPES = [(0,), (), (3,), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (3 * CHUNK + 17,), (33, 7)]
SCOPES = ["global", "group", "tensor"]


def on_gpu(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().cuda()) for p in parameters(shapes, dtype)]


def give(params: list[torch.nn.Parameter], step: int) -> list[torch.Tensor]:
    drawn = gradients([p.detach().cpu() for p in params], step)
    for p, g in zip(params, drawn, strict=True):
        p.grad = g.cuda()
    return drawn


@pytest.fixture(params=TORQUE, ids=lambda cls: cls.__name__)
def cls(request: pytest.FixtureRequest) -> type:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def default_sync_mode() -> Iterator[None]:
    """A test that forbids waiting for the device and fails must not forbid it to the next one."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def variants(cls: type) -> list[dict[str, Any]]:
    common: list[dict[str, Any]] = [
        {},
        {"weight_decay": 0.1},
        {"max_grad_norm": 0.5},
        {"maximize": True, "smoothing": 0.5, "floor": 0.25},
    ]
    if cls is tam.TAM:
        return common
    return [*common, {"ema": True}, {"bias_correction": True, "weight_decay": 0.1}]


@pytest.mark.parametrize("scope", SCOPES)
def test_matches_the_reference(cls: type, scope: str) -> None:
    for options in variants(cls):
        params = on_gpu(SHAPES)
        groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.03, "weight_decay": 0.2}]
        optimizer = cls(groups, lr=0.01, scope=scope, fused=True, **options)
        reference, path = reference_of(optimizer), Path()
        for group in reference.groups:
            group.theta = [p.cpu() for p in group.theta]
        reference.__post_init__()
        for step in range(12):
            drawn = [g.double() for g in give(params, step)]
            optimizer.step()
            reference.step([drawn[:4], drawn[4:]])
            path.follow(reference)
            assert float(optimizer.grad_norm) == pytest.approx(reference.grad_norm, rel=1e-5)
        compare_with_reference(_on_cpu(optimizer), reference, path)
        assert optimizer.backend == "triton"


def _on_cpu(optimizer: Any) -> Any:
    twin = copy.deepcopy(optimizer)
    for group in twin.param_groups:
        for p in group["params"]:
            state = twin.state.pop(p)
            p.data = p.data.cpu()
            twin.state[p] = {k: v.cpu() for k, v in state.items()}
    return twin


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_float32_rounded_once(cls: type, scope: str, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and cls is not tam.TAM:
        with pytest.raises(ValueError, match="does not support float16"):
            cls(on_gpu(SHAPES, dtype))
        return
    low, high = on_gpu(SHAPES, dtype), [torch.nn.Parameter(p.detach().float()) for p in on_gpu(SHAPES, dtype)]
    a = cls(low, lr=0.01, weight_decay=0.1, scope=scope, fused=True)
    b = cls(high, lr=0.01, weight_decay=0.1, scope=scope, fused=True)
    for step in range(3):
        give(low, step)
        for p, q in zip(low, high, strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
        for p, q in zip(low, high, strict=True):
            assert torch.equal(p, q.to(dtype))
            with torch.no_grad():
                q.copy_(p)
            for key, value in a.state[p].items():
                b.state[q][key].copy_(value)


@pytest.mark.parametrize("scope", SCOPES)
def test_mixed_dtypes_and_many_groups(cls: type, scope: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16 if cls is tam.TAM else torch.bfloat16] * 8
    params = [on_gpu([(CHUNK + 5,)], dtype)[0] for dtype in dtypes]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    groups = [[{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(ps)] for ps in (params, twins)]
    fused, plain = cls(groups[0], scope=scope, fused=True), cls(groups[1], scope=scope, foreach=True)
    for step in range(5):
        give(params, step)
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad.clone()
        fused.step()
        plain.step()
    assert_close(fused.alignment, plain.alignment, 1e-4, scale=1.0)
    for p, q in zip(params, twins, strict=True):
        assert_close(
            p.float(), q.float(), {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[p.dtype]
        )


@pytest.mark.parametrize("scope", SCOPES)
def test_misaligned_views_and_strided_gradients(cls: type, scope: str) -> None:
    storage = torch.randn(4 * CHUNK, device="cuda")
    outside = storage.clone()
    views = [storage[1 : CHUNK + 4], storage[CHUNK + 7 : 2 * CHUNK]]
    strided = torch.randn(8, 16, device="cuda").t()
    params = [*(v.detach().requires_grad_() for v in views), strided.requires_grad_()]
    twins = [torch.nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
    a, b = cls(params, scope=scope, fused=True), cls(twins, scope=scope, fused=True)
    for step in range(4):
        give(twins, step)
        for p, q in zip(params, twins, strict=True):
            p.grad = q.grad.clone()
        a.step()
        b.step()
    for p, q in zip(params, twins, strict=True):
        assert_close(p, q, 1e-6)
    assert storage[0] == outside[0] and torch.equal(storage[2 * CHUNK :], outside[2 * CHUNK :])


def test_ten_million_and_three(cls: type) -> None:
    p = torch.nn.Parameter(torch.zeros(10**7 + 3, device="cuda"))
    optimizer = cls([p], lr=1e-3, smoothing=0.0, fused=True)
    generator = torch.Generator(device="cuda").manual_seed(0)
    p.grad = torch.randn(p.shape, device="cuda", generator=generator)
    optimizer.step()
    for sign in (1.0, -1.0):
        key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
        p.grad = sign * optimizer.state[p][key].clone()
        optimizer.step()
        assert float(optimizer.alignment) == pytest.approx(sign, abs=1e-7)
        assert 0 <= float(optimizer.damping) <= 1


@pytest.mark.parametrize("scope", SCOPES)
def test_two_runs_are_equal_to_the_bit(cls: type, scope: str) -> None:
    runs = []
    for _ in range(2):
        params = on_gpu([(3 * CHUNK + 17,), *[(CHUNK, 5)] * 12])
        optimizer = cls(params, scope=scope, max_grad_norm=None if scope == "tensor" else 1.0, fused=True)
        for step in range(5):
            give(params, step)
            optimizer.step()
        runs.append(optimizer)
    assert_same(*runs)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("fused", [True, False])
def test_a_captured_step_replays_as_eager_does(cls: type, scope: str, fused: bool) -> None:
    options: dict[str, Any] = {"scope": scope, "capturable": not fused, "fused": fused}
    if cls is not tam.TAM:
        options["bias_correction"] = True
    shapes = [(5,), (CHUNK + 3,), (17, 4)]
    eager, captured = (cls(on_gpu(shapes), lr=torch.tensor(0.01, device="cuda"), **options) for _ in range(2))
    static = [torch.zeros_like(p) for p in params_of(captured)]

    def run() -> None:
        for p, g in zip(params_of(captured), static, strict=True):
            p.grad = g * 1.0  # a new address: the graph's own memory
        captured.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(2):
            for g, drawn in zip(static, give(params_of(eager), step), strict=True):
                g.copy_(drawn)
            eager.step()
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for step in range(2, 6):
        for optimizer in (eager, captured):
            optimizer.param_groups[0]["lr"].fill_(0.01 / step)
        for g, drawn in zip(static, give(params_of(eager), step), strict=True):
            g.copy_(drawn)
        eager.step()
        graph.replay()
        assert torch.equal(eager.alignment, captured.alignment)
        assert torch.equal(eager.grad_norm, captured.grad_norm)
    assert_same(eager, captured)


@pytest.mark.parametrize("rebuild", [False, True])
def test_replays_and_eager_steps_in_turn(cls: type, rebuild: bool) -> None:
    # Two graphs and eager steps with gradients of their own share one optimizer.
    shapes = [(5,), (CHUNK + 3,), (17, 4)]
    eager, mixed = (cls(on_gpu(shapes), lr=0.01, fused=True) for _ in range(2))
    static = [torch.zeros_like(p) for p in params_of(mixed)]
    for step in range(2):
        for optimizer in (eager, mixed):
            give(params_of(optimizer), step)
            optimizer.step()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for p, g in zip(params_of(mixed), static, strict=True):
                p.grad = g * 1.0
            mixed.step()
        graphs.append(graph)
    for step in range(2, 10):
        drawn = give(params_of(eager), step)
        eager.step()
        if step % 3 == 2:
            give(params_of(mixed), step)
            mixed.step()
        else:
            for g, d in zip(static, drawn, strict=True):
                g.copy_(d)
            graphs[step % 2].replay()
        if rebuild and step == 5:
            mixed.tables = None
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert_same(eager, mixed)


def test_gradients_are_freed(cls: type) -> None:
    params = on_gpu([(1024, 1024)] * 4)
    optimizer = cls(params)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    state = sum(x.nbytes for s in optimizer.state.values() for x in s.values()) + sum(
        p.nbytes for p in params
    )
    assert kept < state + 2**20


def test_moves_between_devices_after_a_step(cls: type) -> None:
    model, twin = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    twin.load_state_dict(model.state_dict())
    a, b = cls(model.parameters(), lr=0.01), cls(twin.parameters(), lr=0.01)
    for device in ("cpu", "cuda", "cpu"):
        model.to(device)
        for _ in range(2):
            for m, o, where in ((model, a, device), (twin, b, "cpu")):
                o.zero_grad()
                m(torch.ones(2, 5, device=where)).square().sum().backward()
                o.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, q, 2e-5)
    assert a.alignment.device.type == "cpu"


@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_waits_for_the_device(cls: type, scope: str) -> None:
    params = on_gpu(SHAPES)
    optimizer = cls(params, scope=scope, max_grad_norm=1.0)
    for step in range(2):
        give(params, step)
        optimizer.step()
    given = [[g.cuda() for g in gradients([p.detach().cpu() for p in params], 2 + k)] for k in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    for k, row in enumerate(given):
        for p, g in zip(params, row, strict=True):
            p.grad = g
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
        if k == 1:
            optimizer.tables = None  # new ones are made without waiting, too
        optimizer.step()
        readings = optimizer.alignment, optimizer.damping, optimizer.grad_norm
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(x).all() for x in readings)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan, None])
def test_grad_scale_and_found_inf(cls: type, scaled: bool, bad: float | None) -> None:
    params, twins = on_gpu(SHAPES), on_gpu(SHAPES)
    a, b = cls(params, fused=True), cls(twins, fused=True)
    for optimizer in (a, b):
        give(params_of(optimizer), 0)
        optimizer.step()
    for optimizer in (a, b):
        give(params_of(optimizer), 1)
    before = [x.clone() for x in tensors(a)]
    kept = [p.grad.clone() for p in params]
    if scaled:
        for p, g in zip(params, kept, strict=True):
            p.grad = g * 8
        a.grad_scale = torch.tensor(8.0, device="cuda")
    if bad is not None:
        params[3].grad[5] = bad
    a.found_inf = torch.tensor(0.0 if bad is None else 1.0, device="cuda")
    given = [p.grad.clone() for p in params]
    a.step()
    b.step()
    for p, g in zip(params, given, strict=True):
        assert torch.equal(p.grad.nan_to_num(), g.nan_to_num())
    if bad is None:
        assert_same(a, b)
    else:
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), before, strict=True))
    del a.found_inf


def test_grad_scaler_end_to_end(cls: type) -> None:
    model = torch.nn.Linear(16, 4).cuda()
    optimizer = cls(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16, growth_interval=1000)
    x, moved = torch.randn(8, 16, device="cuda"), []
    for step in range(4):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        with torch.autocast("cuda", torch.float16):
            loss = (model(x) * (1e30 if step == 1 else 1.0)).square().mean()
        scaler.scale(loss).backward()
        if step == 3:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, model.weight))
    assert moved == [True, False, True, True]
    assert torch.isfinite(optimizer.alignment)


@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler_leaves_unscaling_to_the_step_if_fused_was_asked_for(
    cls: type, fused: bool | None
) -> None:
    # Like torch's optimizers: Lightning refuses to clip the gradients of those that unscale by themselves.
    (p,) = params = on_gpu([(5,)])
    optimizer = cls(params, fused=fused)
    left_to_the_step: list[bool] = []
    optimizer.register_step_pre_hook(lambda o, *_: left_to_the_step.append(hasattr(o, "found_inf")))
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert left_to_the_step == [fused is True]


def test_gradients_may_come_and_go(cls: type) -> None:
    for scope in SCOPES:
        params, twins = on_gpu(SHAPES), on_gpu(SHAPES)
        a, b = cls(params, scope=scope, fused=True), cls(twins, scope=scope, foreach=True)
        for step in range(8):
            for optimizer in (a, b):
                give(params_of(optimizer), step)
                for j, p in enumerate(params_of(optimizer)):
                    if (j + step) % 3 == 0 or (step < 2 and j > 4):
                        p.grad = None
                optimizer.step()
        assert_close(a.alignment, b.alignment, 1e-5, scale=1.0)
        for p, q in zip(params, twins, strict=True):
            assert_close(p, q, 2e-5)
            assert p not in a.state or set(a.state[p]) == set(b.state[q])


def test_reallocated_and_reassigned_tensors_are_noticed(cls: type) -> None:
    params, twins = on_gpu(SHAPES), on_gpu(SHAPES)
    a, b = cls(params, fused=True), cls(twins, foreach=True)
    key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
    for step in range(8):
        for optimizer in (a, b):
            give(params_of(optimizer), step)
            if step == 2:
                for p in params_of(optimizer):
                    optimizer.state[p][key] = optimizer.state[p][key] * 0.5
            if step == 3:
                for p in params_of(optimizer):
                    p.data = p.data.clone()
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 5:
                optimizer.add_param_group({"params": on_gpu([(9,)])})
                give(params_of(optimizer), step)
            optimizer.step()
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert_close(p, q, 2e-5)


def test_parameters_moved_after_construction(cls: type) -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = cls(model.parameters(), lr=0.01)
    model.cuda()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 5, device="cuda")).sum().backward()
        optimizer.step()
    assert all(x.is_cuda for s in optimizer.state.values() for x in s.values())


def test_fused_and_compiled_agree(cls: type) -> None:
    torch._dynamo.reset()
    params, twins = on_gpu(SHAPES[1:]), on_gpu(SHAPES[1:])
    a, b = cls(params, lr=0.01), cls(twins, lr=0.01)
    step = torch.compile(b.step)
    for k in range(3):
        for optimizer in (a, b):
            give(params_of(optimizer), k)
        a.step()
        step()
    for p, q in zip(params, twins, strict=True):
        assert_close(p, q, 2e-5)


def test_memory_of_a_step(cls: type) -> None:
    params = on_gpu([(1024, 1024)] * 8)
    optimizer = cls(params)
    train_once = [torch.randn_like(p) for p in params]
    for _ in range(2):
        for p, g in zip(params, train_once, strict=True):
            p.grad = g
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**20


@pytest.mark.parametrize("way", [{"foreach": True}, {"foreach": False}])
def test_the_other_backends_on_a_gpu(cls: type, way: dict[str, Any]) -> None:
    params, twins = on_gpu(SHAPES), on_gpu(SHAPES)
    a, b = cls(params, max_grad_norm=1.0, **way), cls(twins, max_grad_norm=1.0, fused=True)
    for step in range(6):
        for optimizer in (a, b):
            give(params_of(optimizer), step)
            optimizer.step()
    assert a.backend == ("foreach" if way["foreach"] else "loop") and b.backend == "triton"
    for x, y in zip(tensors(a), tensors(b), strict=True):
        assert_close(x.cpu(), y.cpu(), 2e-5, scale=1e-3)


def test_without_options_it_is_triton(cls: type) -> None:
    optimizer = cls(on_gpu([(5,)]))
    assert optimizer.backend is None
    give(params_of(optimizer), 0)
    optimizer.step()
    assert optimizer.backend == "triton"
    wide = cls(on_gpu([(5,)], torch.float64))  # no kernel for float64
    give(params_of(wide), 0)
    wide.step()
    assert wide.backend == "foreach"


def test_an_lr_on_the_device_is_read_at_each_step(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[list[list[float]]] = []
    set_options = cuda.CudaBackend.set_options

    def counting(self: cuda.CudaBackend, options: list[list[float]]) -> None:
        uploads.append(options)
        set_options(self, options)

    monkeypatch.setattr(cuda.CudaBackend, "set_options", counting)
    params, twins = on_gpu(SHAPES), on_gpu(SHAPES)
    rates = [
        torch.tensor(0.01, device="cuda"),
        torch.tensor([0.02], dtype=torch.float64, device="cuda"),
    ]
    groups = [{"params": params[:4], "lr": rates[0]}, {"params": params[4:], "lr": rates[1]}]
    a = cls(groups, weight_decay=0.1, fused=True)
    b = cls([{"params": twins[:4]}, {"params": twins[4:]}], weight_decay=0.1, foreach=False)
    for step in range(4):
        for group, rate in zip(b.param_groups, rates, strict=True):
            rate.mul_(0.5)
            group["lr"] = float(rate)
        for optimizer in (a, b):
            give(params_of(optimizer), step)
            optimizer.step()
    for p, q in zip(params, twins, strict=True):
        assert_close(p, q, 2e-5, scale=1e-3)
    assert len(uploads) == 1


@pytest.mark.parametrize("way", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_tam_at_fixed_damping_is_sgd_on_a_gpu(way: dict[str, Any], weight_decay: float) -> None:
    params, twins = on_gpu(SHAPES), on_gpu(SHAPES)
    ours = tam.TAM(params, 0.1, smoothing=1.0, floor=0.5, weight_decay=weight_decay, **way)
    theirs = torch.optim.SGD(twins, 0.1, momentum=0.9, weight_decay=weight_decay, foreach=True)
    for optimizer in (ours, theirs):
        for step in range(10):
            give(params_of(optimizer), step)
            optimizer.step()
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(p, q)


def test_training_on_cpu_and_gpu_agrees(cls: type) -> None:
    here = cls(parameters([(300, 20), (5,)]), lr=0.01)
    there = cls(on_gpu([(300, 20), (5,)]), lr=0.01)
    train(here, 10)
    for step in range(10):
        give(params_of(there), step)
        there.step()
    for p, q in zip(params_of(here), params_of(there), strict=True):
        assert_close(q.cpu(), p, 2e-5)
