"""Times one optimizer step against torch's optimizers: python benchmarks/step.py [--out FILE.json]

All optimizers of a list share parameters and gradients. Rounds are interleaved: in each, every
optimizer takes one step on an idle machine, timed by device events (the clock on a CPU), so that host
time before the first launch counts. On a GPU the device's time alone is measured too, with the
launches queued behind a pause. Reported are medians, minima and ratios of medians to torch's fused
optimizer of the family, beside the time the bytes must take at the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parameter_lists import LISTS

import tam

Step = Callable[[], Any]
Make = Callable[[list[torch.nn.Parameter]], Step]

# Bytes a parameter of float32 must move: reads and writes, each once a pass.
FLOOR = {"sgdm": 20, "tam": 28, "tam one pass": 20, "adamw": 28, "adatamw": 36, "adatamw one pass": 28}


def clipped(make: Make) -> Make:
    def build(params: list[torch.nn.Parameter]) -> Step:
        step = make(params)

        def both() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            step()

        return both

    return build


def contenders(device: str) -> dict[str, tuple[str, str, Make]]:
    """name: (baseline, floor, maker)"""
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    found: dict[str, tuple[str, str, Make]] = {
        "SGDM fused": ("SGDM fused", "sgdm", lambda ps: sgd(ps, 1e-5, momentum=0.9, fused=True).step),
        "SGDM foreach": ("SGDM fused", "sgdm", lambda ps: sgd(ps, 1e-5, momentum=0.9, foreach=True).step),
        "TAM": ("SGDM fused", "tam", lambda ps: tam.TAM(ps, 1e-5, fused=True).step),
        "TAM tensor": (
            "SGDM fused",
            "tam one pass",
            lambda ps: tam.TAM(ps, 1e-5, scope="tensor", fused=True).step,
        ),
        "AdamW fused": ("AdamW fused", "adamw", lambda ps: adamw(ps, 1e-5, fused=True).step),
        "AdamW foreach": ("AdamW fused", "adamw", lambda ps: adamw(ps, 1e-5, foreach=True).step),
        "AdaTAMW": ("AdamW fused", "adatamw", lambda ps: tam.AdaTAMW(ps, 1e-5, fused=True).step),
        "AdaTAMW tensor": (
            "AdamW fused",
            "adatamw one pass",
            lambda ps: tam.AdaTAMW(ps, 1e-5, scope="tensor", fused=True).step,
        ),
        "clip + AdamW fused": (
            "clip + AdamW fused",
            "adatamw",
            clipped(lambda ps: adamw(ps, 1e-5, fused=True).step),
        ),
        "AdaTAMW max_grad_norm": (
            "clip + AdamW fused",
            "adatamw",
            lambda ps: tam.AdaTAMW(ps, 1e-5, max_grad_norm=1.0, fused=True).step,
        ),
    }
    if device == "cpu":
        found["TAM foreach"] = ("SGDM fused", "tam", lambda ps: tam.TAM(ps, 1e-5, foreach=True).step)
        found["AdaTAMW foreach"] = (
            "AdamW fused",
            "adatamw",
            lambda ps: tam.AdaTAMW(ps, 1e-5, foreach=True).step,
        )
    try:
        import pytorch_optimizer
    except ImportError:
        return found
    found["pytorch_optimizer TAM"] = ("SGDM fused", "tam", lambda ps: pytorch_optimizer.TAM(ps, lr=1e-5).step)
    found["pytorch_optimizer AdaTAM"] = (
        "AdamW fused",
        "adatamw",
        lambda ps: pytorch_optimizer.AdaTAM(ps, lr=1e-5).step,
    )
    return found


def make_parameters(shapes: list[tuple[int, ...]], device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device=device).manual_seed(0)
    params = []
    for shape in shapes:
        p = torch.nn.Parameter(torch.randn(shape, device=device, generator=generator) * 0.02)
        p.grad = torch.randn(shape, device=device, generator=generator) * 1e-3
        params.append(p)
    return params


def timed(step: Step, device: str) -> float:
    """Milliseconds of one step."""
    if device == "cpu":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def device_time(step: Step, host_us: float) -> float:
    """Milliseconds of one step on the device, its launches queued behind a pause: no host time shows."""
    torch.cuda.synchronize()
    torch.cuda._sleep(int(3000 * host_us))  # cycles: 1.5 times the host time and more
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def host(step: Step) -> float:
    """Microseconds until step() returns."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    spent = (time.perf_counter() - begin) * 1e6
    torch.cuda.synchronize()
    return spent


def extra_memory(step: Step) -> int:
    """Bytes allocated at the peak of a step beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def copy_bandwidth(device: str) -> float | None:
    """Bytes a second of a large copy, those read and those written.

    None on a CPU: there a copy moves more than those, so that it gives no floor.
    """
    if device == "cpu":
        return None
    a = torch.empty(2**28, device=device)
    b = torch.empty_like(a)
    best = min(timed(lambda: b.copy_(a), device) for _ in range(10))
    return 2 * a.numel() * 4 / best * 1e3


def measure(shapes: list[tuple[int, ...]], device: str, rounds: int, only: set[str]) -> dict[str, Any]:
    """All contenders; on a CPU one family after another, as all their state would not fit in memory."""
    chosen = {k: v for k, v in contenders(device).items() if not only or k in only}
    large = sum(torch.Size(shape).numel() for shape in shapes) > 2e8
    if device == "cpu":
        chosen = {k: v for k, v in chosen.items() if not (large and "foreach" in k)}
    families = [None] if device == "cuda" else sorted({baseline for baseline, _, _ in chosen.values()})
    found: dict[str, Any] = {}
    for family in families:
        members = {k: v for k, v in chosen.items() if family in (None, v[0])}
        found |= measure_together(make_parameters(shapes, device), members, device, rounds)
        gc.collect()
    return {name: found[name] for name in chosen}


def measure_together(
    params: list[torch.nn.Parameter],
    chosen: dict[str, tuple[str, str, Make]],
    device: str,
    rounds: int,
) -> dict[str, Any]:
    steps = {name: make(params) for name, (_, _, make) in chosen.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step, device))
    result: dict[str, Any] = {
        name: {"median_ms": statistics.median(ts), "min_ms": min(ts)} for name, ts in times.items()
    }
    if device == "cuda":
        for name, step in steps.items():
            spent = statistics.median(host(step) for _ in range(max(5, rounds // 2)))
            result[name] |= {"host_us": spent, "extra_bytes": extra_memory(step), "device": []}
        for _ in range(max(5, rounds // 2)):
            for name, step in steps.items():
                result[name]["device"].append(device_time(step, result[name]["host_us"]))
        for row in result.values():
            row["device_ms"] = statistics.median(row.pop("device"))
    return result


COLUMNS = {
    "median_ms": "step ms",
    "min_ms": "min ms",
    "ratio": "ratio",
    "floor_ms": "floor ms",
    "to_floor": "to floor",
    "device_ms": "device ms",
    "device_ratio": "ratio",
    "device_to_floor": "to floor",
    "host_us": "host us",
    "extra_bytes": "extra B",
}


def report(
    name: str, shapes: list[tuple[int, ...]], found: dict[str, Any], bandwidth: float | None, device: str
) -> None:
    """Adds ratios and floors to what was found, and prints it."""
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    for key, (baseline, floor, _) in contenders(device).items():
        row, base = found.get(key), found.get(baseline)
        if row is None:
            continue
        for what in ("median_ms", "device_ms"):
            if what in row and base:
                row["ratio" if what == "median_ms" else "device_ratio"] = row[what] / base[what]
            if what in row and bandwidth:
                row["floor_ms"] = FLOOR[floor] * numbers / bandwidth * 1e3
                row["to_floor" if what == "median_ms" else "device_to_floor"] = row[what] / row["floor_ms"]
    shown = [c for c in COLUMNS if any(c in row for row in found.values())]
    print(f"\n{name}: {len(shapes)} tensors, {numbers / 1e6:.1f}M parameters")
    print(" " * 24, *(f"{COLUMNS[c]:>9s}" for c in shown))
    for key, row in found.items():
        print(f"{key:24s}", *(f"{row[c]:9.3f}" if c in row else " " * 9 for c in shown), flush=True)


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--lists", nargs="+", default=None, choices=LISTS, help="default: all that suit the device"
    )
    parser.add_argument("--rounds", type=int, default=None, help="default: 30 on a GPU, 7 on a CPU")
    names = ", ".join(contenders("cpu"))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of {names}")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    unknown = set(arguments.only) - set(contenders(device))
    if unknown:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))} on {device}")
    lists = arguments.lists or (list(LISTS) if device == "cuda" else list(LISTS)[:3])
    rounds = arguments.rounds or (30 if device == "cuda" else 7)
    bandwidth = copy_bandwidth(device)
    where = torch.cuda.get_device_name() if device == "cuda" else processor()
    results: dict[str, Any] = {
        "hardware": where,
        "threads": torch.get_num_threads(),
        "versions": {
            "torch": torch.__version__,
            "tam": tam.__version__,
            "python": platform.python_version(),
            "kernel": tam.available_kernels()[device],
        },
        "copy_bytes_per_second": bandwidth,
        "rounds": rounds,
        "lists": {},
    }
    copy = f"copy {bandwidth / 1e12:.2f} TB/s, " if bandwidth else ""
    print(f"{where}, torch {torch.__version__}, {copy}{rounds} interleaved rounds")
    for name in lists:
        found = measure(LISTS[name], device, rounds, set(arguments.only))
        report(name, LISTS[name], found, bandwidth, device)
        results["lists"][name] = found
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
