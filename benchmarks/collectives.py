"""Counts what a training step exchanges: python benchmarks/collectives.py [--out FILE.json]

Trains a small transformer on gloo ranks of this machine (DDP and FSDP2 on 2, HSDP on 4) with AdamW and
AdaTAMW, and counts every collective with the bytes each rank brings to it, in the forward and backward
passes and in `optimizer.step()`. On a GPU it times the exchange instead: NCCL with one rank that is made to
exchange with itself, so that all of the exchange's work is there but the network's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import tam
from step import device_time, host, make_parameters, timed
from tam.sharding import exchange

WIDTH, LAYERS = 64, 4


class Counting(TorchDispatchMode):
    """Counts collectives by name, and the bytes this rank brings to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0].strip("_").removesuffix("_base")
            given = args[1] if "gather" in name or "scatter" in name else args[0]
            given = [given] if isinstance(given, torch.Tensor) else given
            self.calls[name] += 1
            self.bytes += sum(x.numel() * x.element_size() for x in given if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "AdaTAMW": lambda params: tam.AdaTAMW(params, lr=1e-4),
    "AdaTAMW, scope='tensor'": lambda params: tam.AdaTAMW(params, lr=1e-4, scope="tensor"),
}


def wrapped(kind: str) -> nn.Module:
    model = Net()
    if kind == "DDP":
        return DistributedDataParallel(model)
    shape, names = ((2, 2), ("replicas", "shards")) if kind == "HSDP" else ((2,), ("shards",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def count(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        model = wrapped(kind)
        optimizer = make(model.parameters())
        for _ in range(3):  # the first steps differ: ranks compare their lists, buckets are arranged
            x = torch.randn(2, 8, WIDTH)
            optimizer.zero_grad()
            with Counting() as passes:
                model(x).square().mean().backward()
            with Counting() as step:
                optimizer.step()
        found[name] = {
            phase: {"calls": dict(counting.calls), "bytes": counting.bytes}
            for phase, counting in (("passes", passes), ("step", step))
        }
    found["parameters"] = sum(p.numel() for p in Net().parameters())
    found["tensors"] = len(list(Net().parameters()))
    return found


def worker(kind: str, rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = count(kind)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # at once: threads of the libraries may abort an interpreter that takes its time


def on_ranks(kind: str, ranks: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=worker, args=(kind, i, ranks, folder)) for i in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return dict(json.loads(Path(folder, "found.json").read_text()))


# ---------------------------------------------------------------------- on a GPU


def timed_exchange(rounds: int) -> dict[str, Any]:
    """AdaTAMW's fused step over BERT-large's parameters, without and with an exchange, and AdamW's."""
    from parameter_lists import LISTS

    exchange.has_other_ranks = lambda group: True
    params = make_parameters(LISTS["bert-large"], "cuda")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        steps = {
            "AdamW fused": torch.optim.AdamW(params, 1e-5, fused=True).step,
            "AdaTAMW": tam.AdaTAMW(params, 1e-5, fused=True).step,
            "AdaTAMW with an exchange": tam.AdaTAMW(
                params, 1e-5, fused=True, shard_group=dist.group.WORLD
            ).step,
        }
        for step in steps.values():
            for _ in range(5):
                step()
        times: dict[str, dict[str, list[float]]] = {
            name: {"step_ms": [], "device_ms": [], "host_us": []} for name in steps
        }
        for _ in range(rounds):
            for name, step in steps.items():
                times[name]["step_ms"].append(timed(step, "cuda"))
                times[name]["host_us"].append(host(step))
                times[name]["device_ms"].append(device_time(step, times[name]["host_us"][-1]))
        dist.destroy_process_group()
    return {name: {k: statistics.median(v) for k, v in row.items()} for name, row in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the figures there")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    found: dict[str, Any] = {"versions": {"torch": torch.__version__, "python": platform.python_version()}}
    if torch.cuda.is_available():
        found |= {"hardware": torch.cuda.get_device_name(), "rounds": options.rounds}
        found["exchange"] = timed_exchange(options.rounds)
    else:
        found |= {"hardware": "CPU, gloo", "rounds": 1}
        found["collectives"] = {
            kind: on_ranks(kind, n) for kind, n in (("DDP", 2), ("FSDP2", 2), ("HSDP", 4))
        }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
