"""The tables' columns: C and Triton have the numbers of the enums."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tam.step.fused import columns, cpu
from tam.step.fused.columns import Row, Segment

CC = shutil.which("cc")
NEEDS_CC = pytest.mark.skipif(CC is None, reason="there is no C compiler")
ROOT = Path(__file__).parents[3]


def compiled(source: str, folder: Path, *options: str) -> Path:
    """Compile C code that includes the header."""
    (folder / "columns.h").write_text(columns.c_header())
    (folder / "source.c").write_text(f'#include "columns.h"\n{source}')
    result = folder / "result"
    subprocess.run([str(CC), "-std=c11", *options, folder / "source.c", "-o", result], check=True)
    return result


@NEEDS_CC
def test_c_has_the_numbers_of_the_enums_and_the_offsets_of_the_struct(tmp_path: Path) -> None:
    tables = (Row, Segment, columns.Sum, columns.Option, columns.Kind, columns.Flag)
    expected = {member.name: int(member) for table in tables for member in table}
    expected |= {"SUMS": len(columns.Sum), "OPTIONS": len(columns.Option), "KINDS": len(columns.Kind)}
    fields = [name for name, _ in columns.ARGUMENTS]
    values = [*expected.values(), *[getattr(cpu.Tables, name).offset for name in fields]]
    values += [getattr(cpu.Tables, name).size for name in fields] + [ctypes.sizeof(cpu.Tables)]
    prints = [
        *expected,
        *[f"offsetof(tables, {name})" for name in fields],
        *[f"sizeof(((tables *)0)->{name})" for name in fields],
        "sizeof(tables)",
    ]
    lines = "".join(f'printf("%d\\n", (int)({value}));\n' for value in prints)
    program = compiled(f"#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n{lines}}}", tmp_path)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert dict(zip(prints, map(int, output.split()), strict=True)) == dict(zip(prints, values, strict=True))


def test_triton_has_the_numbers_of_the_enums() -> None:
    tl = pytest.importorskip("triton.language")
    from tam.step.fused import kernels

    found = {name: x.value for name, x in vars(kernels).items() if isinstance(x, tl.constexpr)}
    assert len(found) > 30
    tables = (Row, Segment, columns.Share, columns.Sum, columns.Option, columns.Kind)
    expected = {member.name: int(member) for table in tables for member in table}
    expected |= {"SUMS": len(columns.Sum), "OPTIONS": len(columns.Option), "KINDS": len(columns.Kind)}
    expected |= {"FOUND_INF": int(columns.FOUND_INF), "LANES": 1024}
    assert found == {name: expected[name] for name in found}


@NEEDS_CC
def test_a_kernel_of_another_layout_is_refused(tmp_path: Path) -> None:
    source = "int tam_layout(void) { return LAYOUT ^ 1; }"
    stale = cpu.load_library(compiled(source, tmp_path, "-shared", "-fPIC"))
    assert isinstance(stale, str) and "built from another version" in stale


def test_the_kernel_was_built_from_these_columns() -> None:
    kernel = cpu.library()
    assert not isinstance(kernel, str), kernel
    assert kernel.tam_layout() == columns.LAYOUT


def test_setup_writes_the_header_without_torch() -> None:
    pytest.importorskip("setuptools")
    code = (
        "import runpy, setuptools, sys\n"
        "sys.modules['torch'] = None\n"
        "setuptools.setup = lambda **_: None\n"
        "print(runpy.run_path('setup.py')['c_header'](), end='')"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert found.stdout == columns.c_header()


@pytest.mark.parametrize(
    "shares, segments, runs, expected",
    [
        ([0, 1, 2], [0, 1, 2], [(0, 1), (1, 1), (2, 1)], True),
        ([0, 0, 1], [0, 0, 1], [(0, 1), (1, 1)], False),  # two tensors in one segment
        ([0, 2, 1], [0, 2, 1], [(0, 1), (1, 1), (2, 1)], False),  # in another order
        ([0, 1, 2], [0, 0, 1], [(0, 2), (2, 1)], False),  # a segment of two shares
        ([0, 1], [0, 1], [(0, 1), (1, 1), (2, 1)], False),  # a segment without rows
    ],
)
def test_rows_are_segments(
    shares: list[int], segments: list[int], runs: list[tuple[int, int]], expected: bool
) -> None:
    rows = torch.zeros(len(Row), len(shares), dtype=torch.int64)
    rows[Row.SHARE], rows[Row.SEGMENT] = torch.tensor(shares), torch.tensor(segments)
    table = torch.zeros(len(Segment), len(runs), dtype=torch.int64)
    table[Segment.FIRST], table[Segment.COUNT] = torch.tensor(runs).t()
    assert cpu.rows_are_segments(rows, table) is expected
