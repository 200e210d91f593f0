"""Processes with a process group (gloo), for tests that need several ranks."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(worker: Callable[[], Any], ranks: int, folder: Path) -> list[Any]:
    """What the worker, a function of a module, returns on each rank."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_enter, args=(worker, i, ranks, folder)) for i in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert not errors, "\n".join(errors)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
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


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of all tensors that are all-reduced inside."""
    sizes: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield sizes
    finally:
        dist.all_reduce = original
