"""Plain tensors that are shards: `shard_group`, `whole_tensors`, ZeroRedundancyOptimizer."""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import tam
from tam.sharding import GradScaler
from tests.helpers import TORQUE
from tests.sharding.harness import counted, on_ranks
from tests.sharding.test_dtensor import apart, groups, net, train

DEVICE = "cpu"  # tests/gpu has another
STEPS = 6
WAYS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
SHAPES = [(5, 3), (7,), (2, 2), (1,)]  # tensors of one or two groups
BOTH = {"max_grad_norm": 0.5, "weight_decay": 0.1}


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


def in_two_groups(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.05}]


def own_piece(x: Tensor) -> Tensor:
    """This rank's elements: every n-th."""
    return x.reshape(-1)[dist.get_rank() :: dist.get_world_size()].clone()


def options_of(cls: type, way: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"lr": 0.05 if cls is tam.TAM else 0.002, **way, **options}


def alone(cls: type, options: dict[str, Any], steps: int = STEPS) -> tuple[list[Tensor], Any]:
    params = [nn.Parameter(x) for x in start()]
    optimizer = cls(in_two_groups(params), **options)
    for t in range(steps):
        for p, g in zip(params, gradients(t), strict=True):
            p.grad = g
        optimizer.step()
    return params, optimizer


def own_sharding(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Every rank has some elements of every tensor; some pieces are empty."""
    params, single = alone(cls, options)
    pieces = [nn.Parameter(own_piece(x)) for x in start()]
    optimizer = cls(in_two_groups(pieces), **options, shard_group=dist.group.WORLD)
    sizes = []
    for t in range(STEPS):
        for p, g in zip(pieces, gradients(t), strict=True):
            p.grad = own_piece(g)
        with counted() as found:
            optimizer.step()
        sizes.append(found)
    errors = [(q - own_piece(p)).abs().max().item() for p, q in zip(params, pieces, strict=True) if q.numel()]
    return compared(max(errors), optimizer, single, sizes, options)


def compared(error: float, optimizer: Any, single: Any, sizes: list[Any], options: Any) -> dict[str, Any]:
    return {
        "case": (type(single).__name__, options), "error": error, "sizes": sizes,
        "backend": optimizer.backend, "alignment": optimizer.alignment.cpu(),
        "expected": single.alignment.cpu(),
        "norm": float(optimizer.grad_norm), "expected_norm": float(single.grad_norm),
        "groups": [sorted(group) for group in optimizer.state_dict()["param_groups"]],
    }  # fmt: skip


def unequal(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """The last rank has no tensor of its own, and the first has no gradient in every other step."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    params = [nn.Parameter(x) for x in start()]
    single = cls(in_two_groups(params), **options)
    owner = [0, last - 1, 0, last - 1]
    mine = [nn.Parameter(x) if r == rank else None for x, r in zip(start(), owner, strict=True)]
    some = [[p for p in part if p is not None] for part in (mine[:2], mine[2:])]
    optimizer = cls([{"params": some[0]}, {"params": some[1], "weight_decay": 0.05}], **options,
                    shard_group=dist.group.WORLD, whole_tensors=True)  # fmt: skip
    alignments = []
    for t in range(STEPS):
        for i, g in enumerate(gradients(t)):
            absent = t % 2 == 1 and owner[i] == 0
            params[i].grad = None if absent else g
            if mine[i] is not None:
                mine[i].grad = None if absent else g.clone()
        single.step()
        optimizer.step()
        alignments.append((optimizer.alignment.cpu(), single.alignment.cpu()))
    pairs = [(p, q) for p, q in zip(params, mine, strict=True) if q is not None]
    error = max([(p - q).abs().max().item() for p, q in pairs], default=0.0)
    return {**compared(error, optimizer, single, [], options), "alignments": alignments, "own": len(pairs)}


# ---------------------------------------------------------------------- ZeroRedundancyOptimizer


def zero(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    plain, inner = net(), net()
    single = cls(groups(plain), **options)
    model = DistributedDataParallel(inner)
    sharded = partial(cls, shard_group=dist.group.WORLD, whole_tensors=True)
    optimizer = ZeroRedundancyOptimizer(groups(inner), optimizer_class=sharded, **options)
    train(plain, single)
    sizes = train(model, optimizer)
    error = max(apart(q, p) for p, q in zip(plain.parameters(), inner.parameters(), strict=True))
    local = optimizer.optim
    found = {"case": (cls.__name__, options), "error": error, "sizes": sizes, "backend": local.backend}
    if options.get("scope") == "tensor":
        every = dict(zip(inner.parameters(), single.alignment, strict=True))
        own = [p for group in local.param_groups for p in group["params"]]
        # Two groups: the order of the optimizer's tensors is the model's here.
        found |= {"alignment": local.alignment, "expected": torch.stack([every[p] for p in own])}
    else:
        found |= {"alignment": local.alignment, "expected": single.alignment}
    return {**found, "norm": float(local.grad_norm), "expected_norm": float(single.grad_norm)}


def zero_checkpoint() -> Any:
    """Consolidated on rank 0, loaded into new optimizers, and the run goes on; rank 2 of 3 may own little."""
    found = []
    for cls in (tam.TAM, tam.AdaTAMW):
        options = options_of(cls, {})
        sharded = partial(cls, shard_group=dist.group.WORLD, whole_tensors=True)
        models = [nn.Linear(6, 1), nn.Linear(6, 1)]  # two tensors
        for model in models:
            torch.manual_seed(0)
            model.reset_parameters()
        first, second = (
            ZeroRedundancyOptimizer(m.parameters(), optimizer_class=sharded, **options) for m in models
        )
        train(models[0], first, 4)
        first.consolidate_state_dict(to=0)
        # A copy: the load keeps the tensors it is given.
        box = [copy.deepcopy(first.state_dict()) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box)
        second.load_state_dict(box[0])
        models[1].load_state_dict(models[0].state_dict())
        before = [second.optim.alignment]
        for model, optimizer in zip(models, (first, second), strict=True):
            train(model, optimizer, 4)
        errors = [apart(q, p) for p, q in zip(*(m.parameters() for m in models), strict=True)]
        second.consolidate_state_dict(to=0)
        saved = None
        if dist.get_rank() == 0:
            saved = [float(s["alignment"]) for s in second.state_dict()["state"].values()]
        own = sum(len(group["params"]) for group in second.optim.param_groups)
        found.append((max(errors), first.optim.alignment, second.optim.alignment, saved, own, before))
    return found


# ---------------------------------------------------------------------- what runs on the ranks


def on_three() -> Any:
    found: dict[str, Any] = {"own": [], "unequal": [], "zero": [], "checkpoint": zero_checkpoint()}
    for way in WAYS:
        for cls in TORQUE:
            for extra in ({}, {"scope": "group"}, BOTH):
                found["own"].append(own_sharding(cls, options_of(cls, way, **extra)))
                found["unequal"].append(unequal(cls, options_of(cls, way, **extra)))
            for extra in ({}, {"scope": "group"}, BOTH, {"scope": "tensor"},
                          {"scope": "tensor", "max_grad_norm": 0.05}):  # fmt: skip
                found["zero"].append(zero(cls, options_of(cls, way, **extra)))
    found["lists"] = other_options()
    found["copies"] = copies()
    found["newcomers"] = [newcomers(options) for options in ({"foreach": False}, {"fused": True})]
    found["few"] = [fewer_tensors_than_ranks(norm) for norm in (None, 1.0)]
    found["dtypes"] = other_dtypes()
    found["refused"] = refused_late()
    found["scaler"] = scaler_without_gradients()
    found["fsdp1"] = [fsdp1(cls) for cls in TORQUE]
    return found


def fsdp1(cls: type) -> Any:
    """torch's first FSDP has plain shards."""
    plain, inner = net(), net()
    options = options_of(cls, {})
    single = cls(plain.parameters(), **options)
    model = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = cls(model.parameters(), **options, shard_group=dist.group.WORLD)
    train(plain, single)
    train(model, optimizer)
    with FullyShardedDataParallel.summon_full_params(model):
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        error = max(apart(q.detach(), p) for p, q in pairs)
    return error, optimizer.alignment, single.alignment


def fewer_tensors_than_ranks(max_grad_norm: float | None) -> Any:
    """Of two tensors rank 2 owns none, and its alignment is empty."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    sharded = partial(tam.TAM, shard_group=dist.group.WORLD, whole_tensors=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=sharded, lr=0.1, scope="tensor", max_grad_norm=max_grad_norm
    )
    recorder = tam.Recorder(optimizer.optim, ["alignment", "update_norm"])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
    return optimizer.optim.alignment, recorder["update_norm"]


def other_dtypes() -> Any:
    """s is one number of one dtype, whatever a rank's own parameters are; the last rank has none."""
    found = []
    for dtypes in ((torch.float64, torch.float32), (torch.float64, torch.float64)):
        rank = dist.get_rank()
        params = [nn.Parameter(torch.ones(3, dtype=dtypes[rank]))] if rank < 2 else []
        optimizer = tam.TAM([{"params": params}], lr=0.1, shard_group=dist.group.WORLD)
        for t in range(4):
            for p in params:
                p.grad = torch.arange(3, dtype=p.dtype) - t * (rank + 0.3)
            optimizer.step()
        found.append(optimizer.alignment)
    return found


def refused_late() -> list[str]:
    """scope='tensor' by the groups, afterwards, and differentiable=True."""
    group, found = dist.group.WORLD, []

    def late() -> None:
        optimizer = tam.TAM([p], shard_group=group)
        optimizer.param_groups[0]["scope"] = "tensor"
        optimizer.step()

    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    tries: list[Any] = [
        lambda: tam.TAM([{"params": [p], "scope": "tensor"}], shard_group=group).step(),
        late,
        lambda: tam.TAM([p], shard_group=group, differentiable=True).step(),
    ]
    for attempt in tries:
        try:
            attempt()
            found.append("")
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    return found


def scaler_without_gradients() -> Any:
    """Rank 1 has none; rank 2 finds one that is not finite in the second step."""
    p = nn.Parameter(torch.ones(2))
    optimizer = tam.TAM([p], lr=0.1, shard_group=dist.group.WORLD)
    scaler = GradScaler("cpu", init_scale=4.0)
    trace = []
    for t in range(3):
        scaler.scale(torch.ones(()))
        if dist.get_rank() != 1:
            p.grad = torch.full((2,), math.inf if t == 1 and dist.get_rank() == 2 else 4.0)
        scaler.step(optimizer)
        scaler.update()
        trace.append((float(p.detach()[0]), float(scaler.get_scale()), float(optimizer.alignment)))
    return trace


def other_options() -> str:
    """Rank 1 has another smoothing."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    smoothing = 0.5 if dist.get_rank() == 1 else 0.9
    try:
        tam.TAM([p], smoothing=smoothing, shard_group=dist.group.WORLD).step()
    except RuntimeError as error:
        return str(error)
    return ""


def copies() -> Any:
    """A deep copy goes on with the others; a pickle has to be given the group again."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), 1.0 + dist.get_rank())
    optimizer = tam.TAM([p], shard_group=dist.group.WORLD)
    optimizer.step()
    deep = copy.deepcopy(optimizer)
    thawed = pickle.loads(pickle.dumps(optimizer))
    for other in (deep, thawed):
        other.param_groups[0]["params"][0].grad = p.grad.clone()
    complaint = ""
    try:
        thawed.step()
    except RuntimeError as error:
        complaint = str(error)
    thawed.shard_group = dist.group.WORLD
    for other in (optimizer, deep, thawed):
        other.step()
    stored = "group" in str(optimizer.state_dict()["param_groups"])
    return (
        complaint,
        stored,
        optimizer.alignment,
        deep.alignment,
        thawed.alignment,
        float(optimizer.grad_norm),
    )


def newcomers(options: dict[str, Any]) -> Any:
    """A new group that only rank 0 has a tensor of, as ZeroRedundancyOptimizer would make it."""
    rank = dist.get_rank()
    params = [nn.Parameter(torch.ones(3)) for _ in range(dist.get_world_size())]
    late = nn.Parameter(torch.ones(2))
    mine, mine_late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    single = tam.TAM(params, lr=0.1, **options)
    optimizer = tam.TAM([mine], lr=0.1, **options, shard_group=dist.group.WORLD, whole_tensors=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        if step == 2:
            single.add_param_group({"params": [late]})
            optimizer.add_param_group({"params": [mine_late] if rank == 0 else []})
        for i, p in enumerate(params):
            p.grad = torch.randn(3, generator=generator)
            mine.grad = p.grad.clone() if i == rank else mine.grad
        late.grad = torch.randn(2, generator=generator)
        mine_late.grad = late.grad.clone()
        single.step()
        optimizer.step()
    return optimizer.alignment, single.alignment, mine.detach(), params[rank].detach()


def test_three_ranks(tmp_path: Path) -> None:
    results = on_ranks(on_three, 3, tmp_path)
    for kind in ("own", "unequal", "zero"):
        for i, first in enumerate(results[0][kind]):
            for rank, result in enumerate(results):
                check(kind, rank, result[kind][i], first)
    for rank, result in enumerate(results):
        for (error, first, second, saved, own, before), (_, s, *_) in zip(
            result["checkpoint"], results[0]["checkpoint"], strict=True
        ):
            assert error < 1e-6 and own == (rank < 2)
            assert torch.equal(first, s) and torch.equal(second, s) and float(s) != 0
            assert saved is None or len(set(saved)) == 1
            assert rank == 2 or float(before[0]) != 0
        assert result["lists"] == "smoothing is 0.5 on rank 1 and 0.9 on rank 0"
        for (s, update), (_, expected) in zip(result["few"], results[0]["few"], strict=True):
            assert s.shape == ((1,) if rank < 2 else (0,))
            assert bool((update > 0).all()) and torch.equal(update, expected)
        for s, expected in zip(result["dtypes"], results[0]["dtypes"], strict=True):
            assert s.dtype == expected.dtype and torch.equal(s, expected) and float(s) != 0
        assert [s.dtype for s in result["dtypes"]] == [torch.float32, torch.float64]
        assert all("needs whole_tensors=True" in text for text in result["refused"][:2]), result["refused"]
        assert "differentiable=True is not possible with shard_group" in result["refused"][2]
        for (p, scale, s), (_, expected_scale, expected) in zip(
            result["scaler"], results[0]["scaler"], strict=True
        ):
            assert (scale, s) == (expected_scale, expected) and (rank != 1 or p == 1.0)
        moved = [p for p, _, _ in result["scaler"]]
        assert rank == 1 or (moved[0] == moved[1] > moved[2]), moved
        for error, s, expected in result["fsdp1"]:
            assert error < 1e-5 and abs(float(s - expected)) < 2e-6 and abs(float(s)) > 1e-3
        complaint, stored, *s, norm = result["copies"]
        assert "a pickle does not contain one: set its shard_group again" in complaint and not stored
        assert float(s[0]) != 0 and torch.equal(s[0], s[1]) and torch.equal(s[0], s[2])
        assert norm == pytest.approx(math.sqrt(2 * (1 + 4 + 9)))
        for s, expected, p, q in result["newcomers"]:
            torch.testing.assert_close(s, expected, rtol=0, atol=2e-6)
            torch.testing.assert_close(p, q, rtol=0, atol=2e-6)


def check(kind: str, rank: int, row: dict[str, Any], first: dict[str, Any], fused: str = "c") -> None:
    options = row["case"][1]
    assert row["error"] < 1e-5, (kind, rank, row)
    torch.testing.assert_close(row["alignment"], row["expected"], rtol=0, atol=2e-6)
    assert row["alignment"].numel() == 0 or float(row["alignment"].abs().max()) > 1e-3
    wanted = fused if options.get("fused") else "foreach" if options["foreach"] else "loop"
    if "own" not in row or row["own"]:
        assert row["backend"] == wanted
    tensors = kind == "zero" and options.get("scope") == "tensor"
    if not tensors:
        assert torch.equal(row["alignment"], first["alignment"])  # to the bit
    if tensors and "max_grad_norm" not in options:
        assert row["sizes"] == [[]] * len(row["sizes"])  # nothing is exchanged
        assert math.isnan(row["norm"])
    else:
        assert abs(row["norm"] - row["expected_norm"]) <= 1e-5 * row["expected_norm"]
        assert all(len(step) == 1 and step[0] <= 12 for step in row["sizes"]), row["sizes"]
    for s, expected in row.get("alignments", []):
        torch.testing.assert_close(s, expected, rtol=0, atol=2e-6)
    for names in row.get("groups", []):
        assert not {"shard_group", "whole_tensors"} & set(names)


def test_options() -> None:
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"shard_group must be a torch\.distributed process group.*world"):
        tam.TAM(params, shard_group="world")
    with pytest.raises(ValueError, match="whole_tensors=True says how the ranks of shard_group hold tensors"):
        tam.AdaTAM(params, whole_tensors=True)
    with pytest.raises(ValueError, match="whole_tensors must be True or False, got 1"):
        tam.AdaTAMW(params, whole_tensors=1)


def test_the_scope_of_one_tensor_needs_whole_ones(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        params = [nn.Parameter(torch.ones(2))]
        with pytest.raises(ValueError, match=r"scope=.tensor. with shard_group needs whole_tensors=True"):
            tam.TAM(params, scope="tensor", shard_group=dist.group.WORLD)
        tam.TAM(params, scope="tensor", shard_group=dist.group.WORLD, whole_tensors=True)
        # A group of one has nobody to add up with.
        optimizer = tam.TAM(params, shard_group=dist.group.WORLD)
        params[0].grad = torch.ones(2)
        with counted() as sizes:
            optimizer.step()
        assert sizes == []
    finally:
        dist.destroy_process_group()
