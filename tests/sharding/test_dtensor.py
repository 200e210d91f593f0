"""Sharded parameters: FSDP2, HSDP, tensor parallel and both give the single-process run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tam
from tests.helpers import TORQUE
from tests.sharding.harness import FSDP_ON_CPU, NEEDS_FSDP, counted, on_ranks

STEPS = 8
CASES: list[tuple[type, dict[str, Any]]] = [
    *[(cls, {"scope": scope}) for cls in TORQUE for scope in ("global", "group", "tensor")],
    *[(cls, {"max_grad_norm": 0.05, "weight_decay": 0.1}) for cls in TORQUE],
    (tam.TAM, {"maximize": True, "lr": 0.01}),
    (tam.AdaTAM, {"ema": True}),
    (tam.AdaTAMW, {"bias_correction": True, "max_grad_norm": 0.05, "scope": "tensor"}),
]


class Net(nn.Module):
    """Sizes that no number of ranks divides; the last bias is empty on all ranks but one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.three(torch.relu(self.two(torch.relu(self.one(x))))) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "three" not in n]},
        {"params": [p for n, p in named if "three" in n], "weight_decay": 0.05},
    ]


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[int]:
    """The numbers of collectives of each step."""
    generator = torch.Generator().manual_seed(1)
    sizes = []
    for _ in range(steps):
        x = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
        with counted() as found:
            optimizer.step()
        sizes.append(list(found))
    return sizes


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.detach()


def apart(x: Tensor, y: Tensor) -> float:
    y = y.detach()
    return float((whole(x).detach() - y).abs().max() / y.abs().max())


def compare(wrap: Callable[[nn.Module], Any], way: dict[str, Any]) -> list[dict[str, Any]]:
    """Every case under the wrapper against the same training in one process."""
    found = []
    for cls, options in CASES:
        plain, sharded = net(), net()
        wrap(sharded)
        given = {"lr": 0.05 if cls is tam.TAM else 0.002, **options, **way}
        a, b = cls(groups(plain), **given), cls(groups(sharded), **given)
        train(plain, a)
        sizes = train(sharded, b)
        key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
        pairs = list(zip(plain.parameters(), sharded.parameters(), strict=True))
        errors = [apart(q, p) for p, q in pairs]
        momenta = [apart(b.state[q][key], a.state[p][key]) for p, q in pairs]
        found.append({
            "case": (cls.__name__, options), "error": max(errors), "momenta": max(momenta), "sizes": sizes,
            "alignment": b.alignment, "expected": a.alignment,
            "backend": b.backend, "norm": float(b.grad_norm), "expected_norm": float(a.grad_norm),
            "kinds": {type(b.state[q]["alignment"]).__name__ for q in sharded.parameters()},
            "sharded": sum(isinstance(b.state[q][key], DTensor) for q in sharded.parameters()),
        })  # fmt: skip
    return found


def check(results: list[list[dict[str, Any]]], collectives: int, backend: str = "c") -> None:
    for rank, found in enumerate(results):
        for row, first in zip(found, results[0], strict=True):
            assert row["error"] < 1e-5 and row["momenta"] < 1e-5, row
            torch.testing.assert_close(row["alignment"], row["expected"], rtol=0, atol=2e-6)
            assert torch.equal(row["alignment"], first["alignment"]), (rank, row["case"])  # to the bit
            assert float(row["alignment"].abs().max()) > 1e-3  # damping is at work
            assert abs(row["norm"] - row["expected_norm"]) <= 1e-5 * row["expected_norm"]
            assert row["backend"] == backend
            assert row["kinds"] == {"Tensor"} and row["sharded"] > 0
            assert all(len(step) == collectives for step in row["sizes"]), row["sizes"]
            if row["case"][1].get("scope") in (None, "global"):
                assert max(max(step) for step in row["sizes"]) <= 16  # a few numbers


# ---------------------------------------------------------------------- two ranks


def two_ranks() -> Any:
    mesh = init_device_mesh("cpu", (2,))

    def fsdp(model: nn.Module) -> None:
        for layer in (model.one, model.two):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def ignoring(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh, ignored_params={model.scale, model.one.weight})

    parallel = partial(tensor_parallel, mesh=mesh)
    if not FSDP_ON_CPU:
        fsdp = ignoring = parallel
    return {
        "loop": compare(fsdp, {"foreach": False}),
        "foreach": compare(fsdp, {"foreach": True}),
        "fused": compare(fsdp, {"fused": True}),
        "ignored": compare(ignoring, {}),
        "tensor parallel": compare(parallel, {}),
        "ddp": ddp(),
        "partial": partial_gradients(mesh),
        "differentiable": refused(mesh, partial(tam.TAM, differentiable=True)),
        "vote": refused(mesh, partial(tam.AngularGrad, vote=True)),
        "compiled": compiled(fsdp),
        "lists": [other_lists(mesh, kind) for kind in ("shape", "number")],
        "plain state": plain_state(mesh),
        "whole": whole_beside_dtensors(mesh),
        "on its way": gradients_on_their_way(),
        "experts": [expert_beside_dtensors(mesh, scope) for scope in ("global", "tensor")],
        "new expert": new_expert(mesh),
        "stale replica": stale_replica(mesh),
        "two group objects": two_group_objects(mesh),
        "frozen elsewhere": frozen_elsewhere(mesh),
    }


def ddp() -> Any:
    plain, inner = net(), net()
    model = DistributedDataParallel(inner)
    a, b = tam.TAM(plain.parameters(), lr=0.05), tam.TAM(model.parameters(), lr=0.05)
    train(plain, a)
    sizes = train(model, b)
    pairs = zip(plain.parameters(), inner.parameters(), strict=True)
    return sizes, max(float((p - q).detach().abs().max()) for p, q in pairs), b.alignment, a.alignment


def partial_gradients(mesh: Any) -> Any:
    """Each rank has a summand of a replicated parameter's gradient, and of a sharded one's."""
    torch.manual_seed(3)
    start, summands = torch.randn(7, 3), torch.randn(4, 2, 7, 3)
    found = []
    for placement in (Replicate(), Shard(0)):
        p = nn.Parameter(start.clone())
        q = nn.Parameter(distribute_tensor(start.clone(), mesh, [placement]))
        a, b = tam.TAM([p], lr=0.1), tam.TAM([q], lr=0.1)
        for parts in summands:
            p.grad = parts.sum(0)
            q.grad = DTensor.from_local(parts[dist.get_rank()].clone(), mesh, [Partial()])
            a.step()
            b.step()
            kept = q.grad.placements == (Partial(),) and torch.equal(
                q.grad.to_local(), parts[dist.get_rank()]
            )
            found.append((kept, float((whole(q) - p.detach()).abs().max()), float(b.alignment - a.alignment)))
    return found


def compiled(wrap: Callable[[nn.Module], Any]) -> Any:
    results = []
    for sharded in (False, True):
        model = net()
        if sharded:
            wrap(model)
        optimizer = tam.AdaTAMW(groups(model), lr=0.002, bias_correction=True)
        if sharded:
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
        train(model, optimizer)
        results.append((list(model.parameters()), optimizer.alignment))
    (plain, expected), (other, s) = results
    return max(apart(q, p) for p, q in zip(plain, other, strict=True)), s, expected


def refused(mesh: Any, make: Callable[..., Any]) -> str:
    q = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    q.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    try:
        make([q]).step()
    except RuntimeError as error:
        return str(error)
    return ""


def other_lists(mesh: Any, kind: str) -> str:
    """Rank 1 has a parameter of another shape, or one more."""
    rank = dist.get_rank()
    sizes = [2, 3 + rank] if kind == "shape" else [2] * (2 + rank)
    params = [nn.Parameter(DTensor.from_local(torch.ones(n, 2), mesh, [Shard(0)])) for n in sizes]
    for p in params:
        p.grad = DTensor.from_local(torch.ones_like(p.to_local()), mesh, [Shard(0)])
    try:
        tam.TAM(params).step()
    except RuntimeError as error:
        return str(error)
    return ""


def plain_state(mesh: Any) -> str:
    """A checkpoint of whole tensors, loaded as it is."""
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    single = tam.TAM([p])
    single.step()
    q = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    try:
        tam.TAM([q]).load_state_dict(single.state_dict())
    except ValueError as error:
        return str(error)
    return ""


def gradients_on_their_way() -> Any:
    """A plain parameter whose gradient comes from a collective that nobody has waited for."""
    found = []
    for way in ({"foreach": False}, {"fused": True}):
        p = nn.Parameter(torch.ones(3))
        optimizer = tam.TAM([p], lr=0.1, **way)
        for _ in range(2):
            p.grad = all_reduce(torch.full((3,), 1.0 + dist.get_rank()), "sum", dist.group.WORLD)
            optimizer.step()
        found.append((p.detach().clone(), float(optimizer.grad_norm)))
    return found


def whole_beside_dtensors(mesh: Any) -> Any:
    """A tensor of this rank's alone, and a DTensor over the same ranks."""
    generator, rank = torch.Generator().manual_seed(5), dist.get_rank()
    start, grads = torch.randn(4, generator=generator), torch.randn(5, 3, 4, generator=generator)
    alone = [nn.Parameter(start.clone()) for _ in range(3)]
    own, shared = (
        nn.Parameter(start.clone()),
        nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)])),
    )
    found = []
    for way in ({"foreach": False}, {"fused": True}):
        for norm in (None, 0.5):
            given = {"lr": 0.1, "scope": "tensor", "max_grad_norm": norm, **way}
            single = tam.TAM(alone, **given)
            together = tam.TAM([own, shared], **given, shard_group=dist.group.WORLD, whole_tensors=True)
            for parts in grads:
                for p, g in zip(alone, parts, strict=True):
                    p.grad = g.clone()
                own.grad = parts[rank].clone()
                shared.grad = distribute_tensor(parts[2].clone(), mesh, [Shard(0)])
                single.step()
                together.step()
            expected = single.alignment[[rank, 2]]
            s = float((together.alignment - expected).abs().max())
            size = float(together.grad_norm - single.grad_norm) if norm else 0.0
            found.append((s, size, apart(shared, alone[2]), apart(own, alone[rank])))
    return found


def expert_step(mesh: Any, optimizer: Any, step: int, trains_expert: bool = True) -> None:
    """Take a step of a DTensor over all ranks and a plain expert, whose gradients differ between ranks."""
    dense, expert = optimizer.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(step)
    dense.grad = distribute_tensor(torch.randn(4, generator=generator), mesh, [Shard(0)])
    own = torch.randn(2, 3, generator=generator)[dist.get_rank()]
    expert.grad = own.clone() if trains_expert else None
    optimizer.step()


def dense_and_expert(mesh: Any, scope: str) -> Any:
    dense = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    return tam.TAM([dense, nn.Parameter(torch.ones(3))], lr=0.1, scope=scope)


def expert_beside_dtensors(mesh: Any, scope: str) -> Any:
    """A run with an expert of each rank's own, and its continuations from a checkpoint and from a copy."""
    straight = dense_and_expert(mesh, scope)
    for step in range(4):
        expert_step(mesh, straight, step)
    loaded = dense_and_expert(mesh, scope)
    loaded.load_state_dict(copy.deepcopy(straight.state_dict()))
    for p, q in zip(loaded.param_groups[0]["params"], straight.param_groups[0]["params"], strict=True):
        p.data.copy_(q.data)
    runs = [straight, loaded, copy.deepcopy(straight)]
    for run in runs:
        for step in range(4, 6):
            expert_step(mesh, run, step)
    return [(run.alignment, *(local_part(p).clone() for p in run.param_groups[0]["params"])) for run in runs]


def new_expert(mesh: Any) -> Any:
    """Rank 1's expert has its first gradient after a load. Return its s, and that of an expert alone."""
    rank = dist.get_rank()
    before, after = dense_and_expert(mesh, "tensor"), dense_and_expert(mesh, "tensor")
    for step in range(3):
        expert_step(mesh, before, step, trains_expert=rank == 0)
    after.load_state_dict(before.state_dict())
    alone = tam.TAM([nn.Parameter(torch.ones(3))], lr=0.1)
    for step in range(3, 6):
        expert_step(mesh, after, step)
        alone.param_groups[0]["params"][0].grad = after.param_groups[0]["params"][1].grad.clone()
        alone.step()
    return float(after.alignment[1]), float(alone.alignment)


def stale_replica(mesh: Any) -> str:
    """A replicated DTensor in the segment of a sharded one; rank 1 loads another s."""
    placements = ([Shard(0)], [Replicate()])
    params = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, where)) for where in placements]
    optimizer = tam.TAM(params, lr=0.1)

    def step() -> None:
        for p, where in zip(params, placements, strict=True):
            p.grad = distribute_tensor(torch.arange(4.0), mesh, where)
        optimizer.step()

    step()
    step()
    saved = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:
        for state in saved["state"].values():
            state["alignment"] *= 0.5
    optimizer.load_state_dict(saved)
    try:
        step()
    except RuntimeError as error:
        return str(error)
    return ""


def two_group_objects(mesh: Any) -> Any:
    """Plain shards beside a DTensor: the same ranks, but two group objects. Rank 1 has no state at first."""
    group, s = dist.new_group([0, 1]), []
    for loads in (False, True):
        dense = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        plain = nn.Parameter(torch.ones(3))
        optimizer = tam.TAM([dense, plain], lr=0.1, shard_group=group)
        for step in range(6):
            dense.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)]) if step > 3 else None
            plain.grad = torch.ones(3) if dist.get_rank() == 0 or step > 3 else None
            if loads and step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
        s.append(optimizer.alignment)
    return s


def frozen_elsewhere(mesh: Any) -> Any:
    """A group that is frozen on another device, beside a sharded one."""
    dense = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    frozen = nn.Parameter(torch.ones(3, device="meta"), requires_grad=False)
    optimizer = tam.TAM([{"params": [dense]}, {"params": [frozen]}], lr=0.1, scope="group")
    for _ in range(2):
        dense.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        optimizer.step()
    return optimizer.backend, float(optimizer.alignment[0])


def local_part(x: Tensor) -> Tensor:
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def test_two_ranks(tmp_path: Path) -> None:
    results = on_ranks(two_ranks, 2, tmp_path)
    for name in ("loop", "foreach", "fused", "ignored", "tensor parallel"):
        backend = name if name in ("loop", "foreach") else "c"
        check([result[name] for result in results], collectives=1, backend=backend)
    for result in results:
        sizes, error, s, expected = result["ddp"]
        assert sizes == [[]] * STEPS and error < 1e-6  # nothing to do, and nothing done
        assert float(s) == float(expected) != 0
        assert all(kept and error < 1e-6 and abs(s) < 1e-6 for kept, error, s in result["partial"])
        assert "is sharded: differentiable=True cannot be done" in result["differentiable"]
        assert "is sharded: vote=True is one decision for a whole tensor" in result["vote"]
        error, s, expected = result["compiled"]
        assert error < 1e-5 and abs(float(s - expected)) < 2e-6 and float(s) != 0
        shape, number = result["lists"]
        assert "parameter 1 is (8, 2)" in shape and "on rank 1, but parameter 1 is (6, 2)" in shape, shape
        assert number == "rank 1 has 3 parameters and rank 0 has 2"
        assert "load it with torch.distributed.checkpoint's set_optimizer_state_dict" in result["plain state"]
        assert all(max(map(abs, errors)) < 1e-5 for errors in result["whole"]), result["whole"]
        (loop, norm), (fused, same) = result["on its way"]
        torch.testing.assert_close(loop, fused)
        assert norm == same and abs(norm - 3 * 3**0.5) < 1e-5
        assert "the alignment of segment 0 is" in result["stale replica"]
        straight, loaded = result["two group objects"]
        assert torch.equal(straight, loaded) and float(straight) > 0.1
        assert result["frozen elsewhere"] == ("c", pytest.approx(0.1))
        for straight, *others in result["experts"]:
            assert all(all(map(torch.equal, other, straight)) for other in others)
    for first, second in zip(*(result["experts"] for result in results), strict=True):
        s, other = first[0][0].reshape(-1), second[0][0].reshape(-1)
        assert s[-1] != other[-1]  # each rank has an s of its own
        assert len(s) == 1 or s[0] == other[0]
    s, expected = results[1]["new expert"]
    assert s == pytest.approx(expected, abs=1e-6) and abs(s) > 1e-3


# ---------------------------------------------------------------------- four ranks


def four_ranks() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    line = init_device_mesh("cpu", (4,))

    def hybrid(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh)  # replicated over the outer dimension, sharded over the inner one

    def both(model: nn.Module) -> None:
        tensor_parallel(model, mesh["inner"])
        fully_shard(model, mesh=mesh["outer"])

    def two_meshes(model: nn.Module) -> None:
        fully_shard(model.one, mesh=line)
        fully_shard(model.two, mesh=mesh)
        fully_shard(model.three, mesh=mesh["outer"])

    return {
        "lists": one_more(mesh),
        "outside": outside_of_a_mesh(),
        "hybrid": compare(hybrid, {}),
        "both": compare(both, {}),
        "two meshes": compare(two_meshes, {}),
    }


def one_more(mesh: Any) -> str:
    """Rank 1 has a parameter more; ranks that share no group with it must hear of it, too."""
    count = 2 + (dist.get_rank() == 1)
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])) for _ in range(2)]
    if count == 3:
        params.append(nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])))
    for p in params:
        p.grad = DTensor.from_local(torch.ones_like(p.to_local()), mesh, p.placements)
    try:
        tam.TAM(params).step()
    except RuntimeError as error:
        return str(error)
    return ""


def outside_of_a_mesh() -> Any:
    """Ranks 2 and 3 have nothing of the DTensor, but a replicated parameter beside it."""
    mesh = DeviceMesh("cpu", [0, 1])
    p = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    q = nn.Parameter(torch.ones(2))
    q.grad = torch.ones(2)
    if mesh.get_coordinate() is not None:
        p.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    optimizer = tam.TAM([p, q], scope="tensor")
    optimizer.step()
    return q.detach().clone()


@NEEDS_FSDP
def test_four_ranks(tmp_path: Path) -> None:
    results = on_ranks(four_ranks, 4, tmp_path)
    for result in results:
        assert "rank 1 has 3" in result["lists"], result["lists"]
        assert torch.equal(result["outside"], results[0]["outside"])
    check([result["hybrid"] for result in results], collectives=1)  # none over replicas
    check([result["both"] for result in results], collectives=2)  # one for each dimension of the mesh
    check([result["two meshes"] for result in results], collectives=3)
