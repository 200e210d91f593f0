"""code-path.md lists the functions of a step, in the order and depth of their first call.

A failing test prints the list as it should be, ready to paste into the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tam
from tests.helpers import gradients, parameters
from tests.sharding.harness import on_ranks

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name before 3.11")
needs_c_kernel = pytest.mark.skipif(
    not tam.available_kernels()["cpu"].startswith("C, "), reason="the C kernel was not built"
)

SOURCE = Path(tam.__file__).parent
PAGE = (Path(__file__).parent.parent / "docs" / "how-it-works" / "code-path.md").read_text(encoding="utf-8")
LINE = re.compile(r"(?:[+ ] )?(?P<file>\S+\.py) +(?P<function>\S+)  +(?P<purpose>.+)")


class Counts(NamedTuple):
    functions: int
    files: int
    changes_of_file: int


# A step should not become harder to follow than this.
LIMITS = {
    "plain": Counts(25, 6, 20),
    "fused, unchanged addresses": Counts(16, 4, 8),
    "fused, new gradient tensors": Counts(20, 5, 10),
    "DTensor on 2 ranks": Counts(35, 8, 30),
    "DTensor on 2 ranks, first step": Counts(54, 9, 36),
}


class Call(NamedTuple):
    file: str
    function: str
    line: int
    depth: int


def trace(step: Callable[[], Any]) -> list[Call]:
    """Return the calls of the library's functions; comprehensions and lambdas are part of their function."""
    calls = []

    def is_ours(frame: FrameType) -> bool:
        code = frame.f_code
        return code.co_filename.startswith(str(SOURCE)) and not code.co_name.startswith("<")

    def record_call(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not is_ours(frame):
            return
        code, depth, caller = frame.f_code, 0, frame.f_back
        while caller is not None:
            depth, caller = depth + is_ours(caller), caller.f_back
        file = Path(code.co_filename).relative_to(SOURCE).as_posix()
        calls.append(Call(file, code.co_qualname, code.co_firstlineno, depth))

    sys.setprofile(record_call)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def first_calls(calls: list[Call]) -> list[Call]:
    first: dict[tuple[str, int], Call] = {}
    for call in calls:
        first.setdefault((call.file, call.line), call)
    return list(first.values())


def count(calls: list[Call]) -> Counts:
    files = [call.file for call in calls]
    changes = sum(a != b for a, b in pairwise(files))
    return Counts(len(first_calls(calls)), len(set(files)), changes)


def check_list(heading: str, calls: list[Call], known: list[Call] | None = None) -> None:
    """Compare the list under a heading with a step; `+` marks what the known step does not call."""
    (on_page,) = re.findall(rf"^#+ {heading}$.*?```\w+\n(.*?)\n```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [match for line in on_page.splitlines() if (match := LINE.fullmatch(line))]
    purposes = {line["function"].split(".")[-1]: line["purpose"] for line in lines}  # for a renamed class
    purposes |= {line["function"]: line["purpose"] for line in lines}
    known_functions = {call[:3] for call in known or []}
    rows = []
    for call in first_calls(calls):
        mark = "" if known is None else "  " if call[:3] in known_functions else "+ "
        default = purposes.get(call.function.split(".")[-1], "TODO: what it does")
        purpose = purposes.get(call.function, default)
        rows.append((mark + call.file, "  " * call.depth + call.function, purpose))
    widths = [max(len(row[i]) for row in rows) + 2 for i in (0, 1)]
    expected = "\n".join(f"{a:{widths[0]}}{b:{widths[1]}}{c}" for a, b, c in rows)
    if on_page != expected:
        print(expected)
        pytest.fail(f'code-path.md, "{heading}", should have the list below', pytrace=False)


def check_counts(path: str, calls: list[Call]) -> None:
    counts = count(calls)
    assert all(n <= limit for n, limit in zip(counts, LIMITS[path], strict=True)), (path, counts)
    row = " / ".join(map(str, counts))
    assert re.search(rf"^\| {re.escape(path)} \|.*\| {row} \|$", PAGE, re.MULTILINE), (
        f'code-path.md should count {row} for "{path}"'
    )


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    for p, g in zip(params, gradients(params, step), strict=True):
        p.grad = g


def plain_step() -> list[Call]:
    """Return the calls of the second step."""
    params = parameters([(4, 3), (3,)])
    optimizer = tam.TAM(params, foreach=False)
    set_gradients(params, 0)
    optimizer.step()
    return trace(optimizer.step)


def test_the_page_lists_a_plain_step() -> None:
    calls = plain_step()
    check_list("A plain step", calls)
    check_counts("plain", calls)


@needs_c_kernel
def test_the_page_lists_a_fused_step() -> None:
    params = parameters([(4, 3), (3,)])
    optimizer = tam.TAM(params, fused=True)
    set_gradients(params, 0)
    optimizer.step()
    unchanged = trace(optimizer.step)
    alive = [p.grad for p in params]  # so the new gradients lie elsewhere
    set_gradients(params, 1)
    moved = trace(optimizer.step)
    del alive
    check_list("A fused step", moved, known=unchanged)
    check_counts("fused, unchanged addresses", unchanged)
    check_counts("fused, new gradient tensors", moved)


def sharded_steps() -> list[list[Call]]:
    """Return the calls of the first and of the second step of two DTensors."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = parameters([(4, 3), (3,)])
    params = [torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
    for p, g in zip(params, gradients(whole, 0), strict=True):
        p.grad = distribute_tensor(g, mesh, [Shard(0)])
    optimizer = tam.TAM(params, foreach=False)
    return [trace(optimizer.step) for _ in range(2)]


def test_the_page_lists_a_step_of_dtensors(tmp_path: Path) -> None:
    first, second = on_ranks(sharded_steps, 2, tmp_path)[0]
    check_list("Several ranks", second, known=plain_step())
    check_counts("DTensor on 2 ranks", second)
    check_counts("DTensor on 2 ranks, first step", first)


def test_the_files_in_the_table_exist() -> None:
    (table,) = re.findall(r"^## Which file answers.*?\n(\|.*?\n)\n", PAGE, re.DOTALL | re.MULTILINE)
    files = re.findall(r"`([\w/]+(?:/|\.py|\.c))`", table)
    assert len(files) > 20
    assert [name for name in files if not (SOURCE / name).exists()] == []
