"""`tam lab` in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

import tam
from tam.cli import build

SOURCE = Path(tam.__file__).parents[1]


def tam_lab(*args: str | Path) -> tuple[int, str]:
    """Run a command. Return its exit status and its output, with the message of an error."""
    done = CliRunner().invoke(build(), ["lab", *map(str, args)])
    return done.exit_code, done.output + (str(done.exception) if done.exit_code else "")


def run_process(*args: str | Path, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `tam` in a process of its own, after the statements of `before`."""
    code = f"import sys\n{before}\nfrom tam.cli import main\nmain()"
    env = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@contextmanager
def start_process(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """Start `tam lab`. Yield the process and its stderr's lines. It is killed at the end or after minutes."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    # A job in the background, as CI may be, starts with SIGINT ignored.
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", code + "from tam.cli import main\nmain()", "lab", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        timer = threading.Timer(300, process.kill)
        timer.start()
        try:
            yield process, iter(process.stderr)
        finally:
            timer.cancel()
            process.kill()
