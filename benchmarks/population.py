"""How long a task of online learning takes for a population of 180 networks: 40 passes through 40,000 images.

    PYTHONPATH=src:. python3 benchmarks/population.py --data DATA --out FILE.json

Passes after the first are timed one by one; a task is 40 times their median.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from tam.lab.core.environment import describe_machine
from tam.lab.engines.worker import configure_torch
from tam.lab.experiments.online.population import Config, Population
from tam.lab.experiments.online.studies import DELTAS, GRID


def configs(depth: int) -> list[Config]:
    """Return the paper's grids: three optimizers, four lrs, three deltas, five seeds."""
    lrs = {"sgd": GRID, "sgdm": GRID, "tam": tuple(2 * lr for lr in GRID)}
    return [
        Config(depth=depth, delta=delta, optimizer=name, lr=lr, seed=seed, epochs=1)
        for name in lrs
        for lr in lrs[name]
        for delta in DELTAS
        for seed in range(5)
    ]


def time_passes(depth: int, data: Path, device: torch.device, passes: int) -> list[float]:
    """Return the seconds of each pass after the first."""
    members = configs(depth)
    population = Population(members, data, device, [None] * len(members))
    population.begin_task(0)
    seconds = []
    for number in range(passes + 1):
        begin = time.perf_counter()
        population.begin_pass(0, number)
        for _ in range(population.steps):
            population.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--passes", type=int, default=10)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    configure_torch(device)
    timings = {}
    for depth in (2, 4):
        with torch.cuda.stream(torch.cuda.Stream()):
            seconds = time_passes(depth, arguments.data, device, arguments.passes)
        timings[f"{depth} hidden layers"] = {"pass_s": seconds, "task_s": 40 * median(seconds)}
        print(f"depth {depth}: {40 * median(seconds):.1f} s per task of 180 networks")
    if arguments.out:
        versions = describe_machine(device)
        head = {"hardware": versions.pop("hardware"), "versions": versions, "rounds": arguments.passes}
        text = json.dumps({**head, "population": timings}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
