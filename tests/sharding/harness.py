"""Processes with a process group (gloo), for tests that need several ranks."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tam import segments

# torch 2.6 cannot run FSDP2 on the CPU, and its fully_shard lacks this argument. Tests that only need
# sharded parameters use tensor parallel there, which works on two ranks.
FSDP_ON_CPU = "ignored_params" in inspect.signature(fully_shard).parameters
NEEDS_FSDP = pytest.mark.skipif(not FSDP_ON_CPU, reason="this torch cannot run FSDP2 on the CPU")


def on_ranks(worker: Callable[[], Any], ranks: int, folder: Path) -> list[Any]:
    """What the worker, a function of a module, returns on each rank."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_enter, args=(worker, i, ranks, folder)) for i in range(ranks)]
    deadline = time.monotonic() + 240
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert not errors, "\n".join(errors)
    assert codes == [0] * ranks, codes
    return [torch.load(folder / f"result-{i}", weights_only=False) for i in range(ranks)]


def _enter(worker: Callable[[], Any], rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        torch.save(worker(), folder / f"result-{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # at once: threads of the libraries may abort an interpreter that takes its time


class Counting(TorchDispatchMode):
    """Notes the size of what this rank brings to every collective but broadcasts, which are ZeRO's own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func.__name__.startswith("broadcast"):
            found = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
            self.sizes.append(sum(x.numel() for x in found if isinstance(x, torch.Tensor)))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of all that is exchanged inside, but for the first time the ranks compare their lists."""
    original = segments.agree_across_ranks
    with Counting() as counting:

        def agree(*args: Any) -> Any:
            known = len(counting.sizes)
            found = original(*args)
            del counting.sizes[known:]
            return found

        segments.agree_across_ranks = agree
        try:
            yield counting.sizes
        finally:
            segments.agree_across_ranks = original
