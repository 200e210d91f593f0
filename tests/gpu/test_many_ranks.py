"""The fused step of shards on a GPU: ranks that share one, and NCCL with a rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tam
from tam.sharding import exchange
from tests.helpers import TORQUE
from tests.sharding import test_shards
from tests.sharding.harness import on_ranks


def three_ranks() -> Any:
    test_shards.DEVICE = "cuda"
    found: dict[str, Any] = {"own": [], "unequal": []}
    for way in test_shards.WAYS:
        for cls in TORQUE:
            for extra in ({}, {"scope": "group"}, test_shards.BOTH):
                options = test_shards.options_of(cls, way, **extra)
                found["own"].append(test_shards.own_sharding(cls, options))
                found["unequal"].append(test_shards.unequal(cls, options))
    return found


def test_three_ranks_on_one_gpu(tmp_path: Path) -> None:
    results = on_ranks(three_ranks, 3, tmp_path)
    for kind, cases in results[0].items():
        for i, first in enumerate(cases):
            for rank, result in enumerate(results):
                test_shards.check(kind, rank, result[kind][i], first, fused="triton")


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


def drawn(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape, device="cuda") for shape in ((1000, 33), (17,), (4097,))]


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}])
def test_torchs_operations_do_not_wait(
    nccl: None, monkeypatch: pytest.MonkeyPatch, way: dict[str, bool]
) -> None:
    monkeypatch.setattr(exchange, "has_other_ranks", lambda group: True)
    params = [nn.Parameter(x) for x in drawn(0)]
    optimizer = tam.TAM([{"params": params[:2]}, {"params": params[2:]}], scope="group",
                        shard_group=dist.group.WORLD, **way)  # fmt: skip
    for t in range(3):
        for p, g in zip(params, drawn(t), strict=True):
            p.grad = g
        torch.cuda.set_sync_debug_mode("error" if t == 2 else "default")
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    assert float(optimizer.alignment.abs().max()) > 0


@pytest.mark.parametrize("scope", ["global", "group"])
@pytest.mark.parametrize("cls", TORQUE)
def test_an_exchange_never_waits_and_can_be_captured(
    nccl: None, monkeypatch: pytest.MonkeyPatch, cls: type, scope: str
) -> None:
    """A rank alone exchanges nothing; made to, it finds what it has brought."""
    monkeypatch.setattr(exchange, "has_other_ranks", lambda group: True)
    options = {"lr": 0.01, "scope": scope, "max_grad_norm": 1.0, "fused": True, "capturable": True}
    found = []
    for shards in ({}, {"shard_group": dist.group.WORLD}):
        params = [nn.Parameter(x) for x in drawn(0)]
        optimizer = cls([{"params": params[:2]}, {"params": params[2:]}], **options, **shards)
        for p in params:
            p.grad = torch.zeros_like(p)

        def fill(seed: int, params: Any = params) -> None:
            for p, g in zip(params, drawn(seed), strict=True):
                p.grad.copy_(g)

        for t in range(3):
            fill(t)
            if t == 2:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        fill(3)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            optimizer.step()
        for t in range(3, 6):
            fill(t)
            graph.replay()
        found.append((params, optimizer.alignment, optimizer.grad_norm))
        assert (optimizer.tables.exchange is not None) == bool(shards)
    (alone, s, norm), (together, t, other) = found
    for p, q in zip(alone, together, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(s, t, rtol=0, atol=1e-6)
    torch.testing.assert_close(norm, other)
    assert float(s.abs().max()) > 0


def test_fsdp2_takes_the_fused_step(nccl: None) -> None:
    mesh = init_device_mesh("cuda", (1,))
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 1)).cuda()
        if sharded:
            fully_shard(model, mesh=mesh)
        optimizer = tam.AdaTAMW(model.parameters(), lr=1e-3)
        for _ in range(5):
            x = torch.randn(32, 64, device="cuda")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert optimizer.backend == "triton"
        params = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
        results.append((params, optimizer.alignment))
    for p, q in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-6)
