"""GradScaler, Recorder, Warmup and handover where parameters lie in pieces on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tam
from tam.sharding import GradScaler
from tests.helpers import TORQUE
from tests.sharding.harness import FSDP_ON_CPU, on_ranks
from tests.sharding.test_dtensor import apart, groups, net, tensor_parallel, train, whole
from tests.sharding.test_shards import gradients, own_piece, start

TORCHS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.002}),
]
OURS = [(cls, {"lr": 0.05 if cls is tam.TAM else 0.002, "scope": "group"}) for cls in TORQUE]


def recorded(wrap: Callable[[nn.Module], Any]) -> Any:
    """All quantities of every step, of one process and of the ranks."""
    found = []
    for cls, options in (*OURS, *TORCHS, (tam.AngularGrad, {"lr": 0.002})):
        plain, sharded = net(), net()
        wrap(sharded)
        rows = []
        for model in (plain, sharded):
            optimizer = cls(groups(model), **options)
            recorder = tam.Recorder(optimizer)
            train(model, optimizer)
            rows.append([*recorder.rows()])
        found.append((cls.__name__, *rows))
    return found


def exchanged_by_a_recorder(wrap: Callable[[nn.Module], Any]) -> Any:
    """Nothing for what the step knows by itself."""
    found = []
    for quantities in (["alignment", "grad_norm", "effective_lr"], ["momentum_norm"]):
        model = net()
        wrap(model)
        optimizer = tam.TAM(groups(model), lr=0.05)
        tam.Recorder(optimizer, quantities)
        found.append([len(sizes) for sizes in train(model, optimizer, 3)])
    return found


def warmups_on_shards() -> Any:
    """A Warmup's torch optimizer is recorded over all shards, too, whichever of the two was told of them."""
    found = []
    for kind in ("tam first", "sgd first"):
        rows = []
        for cut in (torch.clone, own_piece):
            params: list[Any] = [nn.Parameter(cut(x)) for x in start()]
            group: Any = {} if cut is torch.clone else {"shard_group": dist.group.WORLD}
            if kind == "tam first":
                optimizer = tam.Warmup(tam.TAM(params, lr=0.05, **group), torch.optim.SGD, 3)
            else:
                sgd = torch.optim.SGD(params, lr=0.05, momentum=0.9)
                optimizer = tam.Warmup(sgd, lambda groups, g=group: tam.TAM(groups, lr=0.1, **g), 3)
            recorder = tam.Recorder(optimizer)
            for t in range(6):
                for p, g in zip(params, gradients(t), strict=True):
                    p.grad = cut(g)
                optimizer.step()
            rows.append([*recorder.rows()])
        found.append((kind, *rows))
    return found


def recorded_shards() -> Any:
    """Pieces of one's own."""
    rows = []
    for cut in (torch.clone, own_piece):
        params = [nn.Parameter(cut(x)) for x in start()]
        group = {} if cut is torch.clone else {"shard_group": dist.group.WORLD}
        optimizer = tam.TAM(params, lr=0.05, **group)
        recorder = tam.Recorder(optimizer)
        for t in range(5):
            for p, g in zip(params, gradients(t), strict=True):
                p.grad = cut(g)
            optimizer.step()
        rows.append([*recorder.rows()])
    return "own shards", *rows


def handed_over(wrap: Callable[[nn.Module], Any]) -> Any:
    """A Warmup from SGD to TAM and from TAM to AdaTAM's family; `from_sgd` in mid-run."""
    found = []
    for kind in ("sgd to tam", "tam to sgd", "adam to adatamw", "from_sgd"):
        results = []
        for sharded in (False, True):
            model = net()
            if sharded:
                wrap(model)
            sgd: Any = torch.optim.SGD(groups(model), lr=0.05, momentum=0.9)
            if kind == "sgd to tam":
                optimizer = tam.Warmup(sgd, tam.TAM, 3)
            elif kind == "tam to sgd":
                optimizer = tam.Warmup(tam.TAM(groups(model), lr=0.1), torch.optim.SGD, 3)
            elif kind == "adam to adatamw":
                adam = torch.optim.AdamW(groups(model), lr=0.002)
                optimizer = tam.Warmup(adam, tam.AdaTAMW, 3, buffers="rescale")
            else:
                train(model, sgd, 3)
                optimizer = tam.TAM.from_sgd(sgd)
            train(model, optimizer, 6)
            active = optimizer.optimizer if isinstance(optimizer, tam.Warmup) else optimizer
            s = active.alignment if hasattr(active, "alignment") else torch.zeros(())
            results.append((list(model.parameters()), s))
        (plain, expected), (other, s) = results
        found.append((kind, max(apart(q, p) for p, q in zip(plain, other, strict=True)), s, expected))
    return found


# ---------------------------------------------------------------------- GradScaler


def scaled_steps(
    params: list[Tensor], optimizer: Any, scaler: Any, grads: Callable[[int], list[Tensor]], bad: int
) -> Any:
    """Six steps with scaled gradients; in step `bad` the last rank's first one is not finite."""
    trace = []
    for t in range(6):
        scale = float(scaler.scale(torch.ones(())))
        for p, g in zip(params, grads(t), strict=True):
            p.grad = g * scale
            if t == bad and p is params[0] and dist.get_rank() == dist.get_world_size() - 1:
                piece = p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad
                piece.view(-1)[0] = torch.inf
        before = [whole(p).detach().clone() for p in params]
        s = optimizer.alignment
        scaler.step(optimizer)
        moved = any(not torch.equal(whole(p), x) for p, x in zip(params, before, strict=True))
        trace.append((moved, torch.equal(optimizer.alignment, s)))
        scaler.update()
    steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    return trace, float(scaler.get_scale()), steps


def expected(cls: type, params: list[Tensor], skipped: int, **options: Any) -> Any:
    """The same steps in one process, but for the one that is skipped."""
    optimizer = cls(params, **options)
    for t in range(6):
        if t != skipped:
            for p, g in zip(params, gradients(t), strict=True):
                p.grad = g.clone()
            optimizer.step()
    return optimizer


def scaled() -> Any:
    line = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2))
    makers: dict[str, list[Any]] = {
        "one mesh": [(line, [Shard(0)])] * 4,
        "one mesh, torch's": [(line, [Shard(0)])] * 4,
        "plain too": [(line, [Shard(0)]), None, (line, [Shard(0)]), None],
        "two meshes": [(line, [Shard(0)]), (grid, [Replicate(), Shard(0)]), None, (line, [Replicate()])],
    }

    def spread(x: Tensor, where: Any) -> Tensor:
        return x.clone() if where is None else distribute_tensor(x.clone(), *where)

    found = []
    for cls in TORQUE:
        for way in ({"foreach": False}, {"fused": True}, {}):
            options = {"lr": 0.01, **way}
            for name, places in makers.items():
                params = [nn.Parameter(spread(x, w)) for x, w in zip(start(), places, strict=True)]
                alone = [nn.Parameter(x) for x in start()]
                single = expected(cls, alone, 3, **options)
                optimizer = cls(params, **options)

                def grads(t: int, places: Any = places) -> list[Tensor]:
                    return [spread(g, w) for g, w in zip(gradients(t), places, strict=True)]

                # torch's own scaler knows DTensors of one mesh.
                scaler_of = torch.amp.GradScaler if name.endswith("torch's") else GradScaler
                result = scaled_steps(params, optimizer, scaler_of("cpu", init_scale=4.0), grads, bad=3)
                error = max(apart(q, p) for p, q in zip(alone, params, strict=True))
                found.append((name, cls.__name__, way, result, error, optimizer.alignment, single.alignment))
            for scaler in (GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler("cpu", init_scale=4.0)):
                pieces = [nn.Parameter(own_piece(x)) for x in start()]
                alone = [nn.Parameter(x) for x in start()]
                single = expected(cls, alone, 3, **options)
                optimizer = cls(pieces, **options, shard_group=dist.group.WORLD)
                result = scaled_steps(
                    pieces, optimizer, scaler, lambda t: [own_piece(g) for g in gradients(t)], bad=3
                )
                pairs = [(own_piece(p), q) for p, q in zip(alone, pieces, strict=True) if q.numel()]
                error = max(float((p - q).detach().abs().max()) for p, q in pairs)
                name = f"own shards, {type(scaler).__module__}"
                found.append((name, cls.__name__, way, result, error, optimizer.alignment, single.alignment))
    return found


def scaled_others(mesh: Any) -> Any:
    """torch's optimizers, AngularGrad and a Warmup, with a gradient on rank 1 that is not finite."""
    found = []
    makers: list[Any] = [
        lambda params: torch.optim.AdamW(params, lr=0.01),
        lambda params: tam.AngularGrad(params, lr=0.01),
        lambda params: tam.Warmup(tam.TAM(params, lr=0.1), torch.optim.SGD, 2),
    ]
    for make in makers:
        p = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer, scaler = make([p]), GradScaler("cpu", init_scale=4.0)
        trace = []
        for t in range(3):
            scaler.scale(torch.ones(()))
            p.grad = distribute_tensor(torch.full((4,), 4.0), mesh, [Shard(0)])
            if t == 1 and dist.get_rank() == 1:
                p.grad._local_tensor[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            trace.append((whole(p).detach().clone(), float(scaler.get_scale())))
        found.append(trace)
    return found


def two_ranks() -> Any:
    mesh = init_device_mesh("cpu", (2,))

    def fsdp(model: nn.Module) -> None:
        fully_shard(model.one, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.scale})

    if not FSDP_ON_CPU:
        fsdp = partial(tensor_parallel, mesh=mesh)
    return {
        "recorded": [*recorded(fsdp), recorded_shards(), *warmups_on_shards()],
        "exchanged": exchanged_by_a_recorder(fsdp),
        "other scalers": scaled_others(mesh),
        "handed over": handed_over(fsdp),
        "scaled": scaled(),
    }


def test_two_ranks(tmp_path: Path) -> None:
    results = on_ranks(two_ranks, 2, tmp_path)
    for rank, result in enumerate(results):
        for name, alone, together in result["recorded"]:
            assert len(alone) == len(together) > 0
            for a, b in zip(alone, together, strict=True):
                assert a.keys() == b.keys()
                for key in a:
                    x, y = (torch.as_tensor(v, dtype=torch.float64) for v in (a[key], b[key]))
                    torch.testing.assert_close(
                        y, x, rtol=2e-5, atol=2e-6, equal_nan=True, msg=f"{name} {key} {y} {x}"
                    )
        assert result["exchanged"] == [[1, 1, 1], [2, 2, 2]]
        for trace, first in zip(result["other scalers"], results[0]["other scalers"], strict=True):
            (a, _), (b, _), (c, _) = trace
            assert torch.equal(a, b) and not torch.equal(b, c)
            assert [scale for _, scale in trace] == [4.0, 2.0, 2.0]
            assert all(torch.equal(x, y) for (x, _), (y, _) in zip(trace, first, strict=True))
        for kind, error, s, expected in result["handed over"]:
            assert error < 1e-5, (kind, error)
            torch.testing.assert_close(s, expected, rtol=0, atol=2e-6)
        for i, (name, cls, way, (trace, scale, steps), error, s, expected) in enumerate(result["scaled"]):
            case = name, cls, way, rank
            moved, kept = zip(*trace, strict=True)
            assert moved == (True, True, True, False, True, True), case
            assert kept[3] and not kept[4], case
            assert error < 1e-5 and steps in ({5.0}, set()), (case, error)
            torch.testing.assert_close(s, expected, rtol=0, atol=2e-6)
            assert torch.equal(s, results[0]["scaled"][i][5])
            # torch's own scaler lets the scales of the ranks part.
            assert scale == 2.0 or (name.startswith("own shards, torch") and rank == 0), case
