"""Times the steps of two versions of the library, interleaved, on the GPU if there is one.

    python benchmarks/compare.py OLD/src src

Each version runs in processes of its own, by turns; per case the least time of all rounds counts. "Same"
gradients lie where they lay at the step before, "new" ones elsewhere, as backward passes may leave them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

Times = dict[str, tuple[float, float]]  # by case: wall time per step in a row of steps, host time of one step


def resnet18() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (1000, 512), (1000,)]


def bert_large() -> list[tuple[int, ...]]:
    d, layer = 1024, []
    layer += [(d, d), (d,)] * 4 + [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,)]
    return [(30522, d), (512, d), (2, d), (d,), (d,), *layer * 24, (d, d), (d,), (d, d), (d,), (d,)]


def measure() -> Times:
    """Return the times of the version that can be imported here."""
    import torch

    import tam

    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {"ResNet-18": (resnet18(), 200 if device == "cuda" else 6)}
    if device == "cuda":
        models["BERT-large"] = (bert_large(), 40)
    else:  # small tensors: the host's time is all there is
        models |= {f"{n} small tensors": ([(4, 4), (4,)] * (n // 2), 20) for n in (2, 62, 394)}
    backends: dict[str, dict[str, Any]] = {"": {}}
    if device == "cpu":
        backends |= {", loop": {"foreach": False}, ", foreach": {"foreach": True}}

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def run(
        cls: Any, shapes: list[tuple[int, ...]], steps: int, new: bool, options: dict[str, Any]
    ) -> tuple[float, float]:
        params = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.01) for shape in shapes]
        gradients = [[torch.randn_like(p) for p in params] for _ in range(2 if new else 1)]
        optimizer = cls(params, lr=1e-5, **options)

        def give(k: int) -> None:
            for p, g in zip(params, gradients[k % len(gradients)], strict=True):
                p.grad = g

        def steps_in_a_row() -> None:
            for k in range(steps):
                give(k)
                optimizer.step()
            wait()

        steps_in_a_row()
        wall = min(_seconds(steps_in_a_row) for _ in range(5)) / steps
        host = float("inf")
        for k in range(10 * steps if device == "cpu" else 40):
            give(k)
            wait()
            host = min(host, _seconds(optimizer.step))
        return wall, host

    return {
        f"{name}, {cls.__name__}{backend}, {'new' if new else 'same'} gradients": run(
            cls, shapes, steps, new, options
        )
        for name, (shapes, steps) in models.items()
        for cls in (tam.TAM, tam.AdaTAMW)
        for backend, options in backends.items()
        for new in (False, True)
        if new or not backend or device == "cuda"
    }


def _seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure_elsewhere(source: str) -> Times:
    """Return the times of the version in this folder, from a process of its own."""
    environment = {**os.environ, "PYTHONPATH": source}
    found = subprocess.run(
        [sys.executable, __file__, "--here"], env=environment, capture_output=True, text=True
    )
    if found.returncode:
        sys.exit(found.stderr)
    return {case: tuple(times) for case, times in json.loads(found.stdout).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", nargs="?", help="folder with the package `tam` of the old version")
    parser.add_argument("new", nargs="?", default="src", help="and of the new one")
    parser.add_argument("--rounds", type=int, default=4, help="how often each version runs")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure()))
        return
    if given.old is None:
        parser.error("name the folder of the old version")
    best: dict[str, Times] = {given.old: {}, given.new: {}}
    for _ in range(given.rounds):
        for source, least in best.items():
            for case, times in measure_elsewhere(source).items():
                least[case] = tuple(map(min, times, least.get(case, times)))  # type: ignore[assignment]
    print(
        "| case | step, µs: old | new | ratio | host, µs: old | new | ratio |\n|---|---|---|---|---|---|---|"
    )
    for case, (wall, host) in best[given.old].items():
        now, host_now = best[given.new][case]
        print(
            f"| {case} | {wall * 1e6:.0f} | {now * 1e6:.0f} | {now / wall:.2f} "
            f"| {host * 1e6:.0f} | {host_now * 1e6:.0f} | {host_now / host:.2f} |"
        )


if __name__ == "__main__":
    main()
