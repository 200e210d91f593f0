"""Recorded steps as lines of JSON and as TensorBoard's scalars."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tam._extras import missing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Value = float | list[float]  # a list if there are several segments or groups
Row = dict[str, Value]  # the number of the step and its quantities


def flatten_row(row: Row) -> Iterator[tuple[str, float]]:
    """Yield names and numbers; the entries of a list get names like `alignment/0`."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}/{i}", x) for i, x in enumerate(value))
        else:
            yield name, value


def to_json_line(row: Row) -> str:
    """Return a line of JSON, with null for numbers that are not finite."""

    def null_nonfinite(x: Value) -> object:
        if isinstance(x, list):
            return [*map(null_nonfinite, x)]
        return x if math.isfinite(x) else None

    return json.dumps({name: null_nonfinite(value) for name, value in row.items()}) + "\n"


class JsonlFile:
    """A file to which steps are appended, one line per step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:  # raises now if it cannot be written
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a killed process may have left half a line
        self.path = path

    def append(self, rows: Iterator[Row]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(map(to_json_line, rows))

    def drop_after(self, step: int) -> None:
        """Remove the lines of later steps."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        replacement = self.path.with_name(self.path.name + ".part")
        text = "".join(line for line in lines if json.loads(line)["step"] <= step)
        replacement.write_text(text, encoding="utf-8")
        replacement.replace(self.path)


def open_writer(target: SummaryWriter | str | Path) -> SummaryWriter:
    """Return the given writer, or a new one for the given folder."""
    if not isinstance(target, (str, Path)):
        return target
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing("Recorder's output to TensorBoard", "record", error) from error
    return SummaryWriter(str(target))


def write_scalars(writer: SummaryWriter, rows: Iterator[Row]) -> None:
    for row in rows:
        for name, value in flatten_row(row):
            if name != "step":
                writer.add_scalar(f"tam/{name}", value, row["step"])
