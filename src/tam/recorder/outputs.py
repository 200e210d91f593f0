"""Recorded steps as lines of JSON and as TensorBoard's scalars."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tam._extras import missing


def columns(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}/{i}", x) for i, x in enumerate(value))
        else:
            yield name, value


def json_line(row: dict[str, Any]) -> str:
    """A line of JSON, in which there is no nan."""

    def known(x: Any) -> Any:
        if isinstance(x, list):
            return [known(y) for y in x]
        return x if math.isfinite(x) else None

    return json.dumps({name: known(value) for name, value in row.items()}) + "\n"


class Lines:
    """A file to which steps are appended, a line each."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:  # now, if it cannot be written
            file.seek(0)
            written = file.read()
            file.truncate(written.rfind(b"\n") + 1)  # a killed process may have left half a line
        self.path = path

    def append(self, rows: Iterator[dict[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json_line(row) for row in rows)

    def cut(self, step: int) -> None:
        """Removes what is about later steps."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        replacement = self.path.with_name(self.path.name + ".part")
        replacement.write_text("".join(kept), encoding="utf-8")
        replacement.replace(self.path)


def open_writer(target: Any) -> Any:
    """A SummaryWriter: the given one, or a new one for the given folder."""
    if not isinstance(target, (str, Path)):
        return target
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing("Recorder's output to TensorBoard", "record", error) from error
    return SummaryWriter(str(target))


def write_scalars(writer: Any, rows: Iterator[dict[str, Any]]) -> None:
    for row in rows:
        for name, value in columns(row):
            if name != "step":
                writer.add_scalar(f"tam/{name}", value, row["step"])
