"""The notebook runs, and its stored outputs are whole and small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tam

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"
LARGEST = 300_000  # bytes of the file, outputs included


def code_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def stored_outputs() -> list[dict[str, Any]]:
    return [output for cell in code_cells() for output in cell["outputs"]]


def test_code_cells_run(tmp_path: Path) -> None:
    # In a smaller version, and without a kernel: `make notebook` runs the whole.
    script = tmp_path / "tour.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in code_cells()), encoding="utf-8")
    env = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(Path(tam.__file__).parents[1]),
        "TAM_TOUR_QUICK": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "same weights: True\nsame s: True" in done.stdout


def test_outputs_are_stored_in_order_and_without_errors() -> None:
    assert [cell["execution_count"] for cell in code_cells()] == list(range(1, len(code_cells()) + 1))
    assert {output["output_type"] for output in stored_outputs()} == {
        "display_data",
        "execute_result",
        "stream",
    }
    assert all(output.get("name") != "stderr" for output in stored_outputs())
    assert "same weights: True\nsame s: True\n" in "".join(stored_outputs()[-1]["text"])


def test_pictures_are_stored_and_small() -> None:
    pictures = [output for output in stored_outputs() if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    assert NOTEBOOK.stat().st_size < LARGEST


def test_cells_that_draw_or_print_have_outputs() -> None:
    for cell in code_cells():
        source = "".join(cell["source"])
        if "plt.show()" in source or "print(" in source:
            assert cell["outputs"], source


def test_stored_outputs_show_what_the_first_cell_says() -> None:
    # The shift of the lr is about 2 where training becomes unstable, and nearly gone in effective lr.
    text = "".join(
        "".join(output["text"]) for output in stored_outputs() if output["output_type"] == "stream"
    )
    rows = [line.split() for line in text.splitlines() if line.startswith("down through 90 %:")]
    shifts = {" ".join(row[4:-3]): float(row[-1]) for row in rows}
    assert 1.6 < shifts["lr"] < 2.5
    assert 0.8 < shifts["effective lr"] < 1.25
