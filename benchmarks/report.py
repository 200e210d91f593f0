"""Write benchmarks/results/README.md from the JSON files next to it, and the tables of communication.md:
python benchmarks/report.py"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"


COLUMNS = {
    "median_ms": ("step ms", ".3f"),
    "ratio": ("ratio", ".3f"),
    "to_floor": ("to floor", ".3f"),
    "device_ms": ("device ms", ".3f"),
    "device_ratio": ("ratio", ".3f"),
    "device_to_floor": ("to floor", ".3f"),
    "host_us": ("host µs", ".0f"),
    "extra_bytes": ("extra bytes", ".0f"),
}


def step_table(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, rows in found["lists"].items():
        shown = [c for c in COLUMNS if any(c in row for row in rows.values())]
        lines += [f"\n**{name}**\n", "| | " + " | ".join(COLUMNS[c][0] for c in shown) + " |"]
        lines.append("|---" * (len(shown) + 1) + "|")
        for key, row in rows.items():
            cells = [format(row[c], COLUMNS[c][1]) if c in row else "" for c in shown]
            lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return lines


def end_to_end_table(found: dict[str, Any]) -> list[str]:
    lines = ["| batch | AdamW fused ms | AdaTAMW ms | ratio |", "|---|---|---|---|"]
    for batch, row in found["batches"].items():
        ms = row["median_ms"]
        lines.append(f"| {batch} | {ms['AdamW fused']:.2f} | {ms['AdaTAMW']:.2f} | {row['ratio']:.4f} |")
    return lines


def recorder_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "| training | without ms | with a recorder ms | ratio | host µs in the step |",
        "|---|---|---|---|---|",
    ]
    for name, row in found["recorder"].items():
        times = f"{row['without_ms']:.2f} | {row['with_ms']:.2f}"
        lines.append(f"| {name} | {times} | {row['ratio']:.4f} | {row['host_added_us']:.0f} |")
    return lines


def collectives_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "| | optimizer | forward and backward | bytes | the step | bytes |",
        "|---|---|---|---|---|---|",
    ]
    for kind, rows in found["collectives"].items():
        for name, row in rows.items():
            if isinstance(row, dict):
                cells = [f"{_calls(row[phase])} | {row[phase]['bytes']:,}" for phase in ("passes", "step")]
                lines.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    return lines


def _calls(phase: dict[str, Any]) -> str:
    names = {"allgather": "all-gather", "allreduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
    return ", ".join(f"{n} {names[name]}" for name, n in phase["calls"].items()) or "none"


def exchange_table(found: dict[str, Any]) -> list[str]:
    lines = ["| step | ms from idle | device ms | host µs |", "|---|---|---|---|"]
    for name, row in found["exchange"].items():
        lines.append(f"| {name} | {row['step_ms']:.3f} | {row['device_ms']:.3f} | {row['host_us']:.0f} |")
    return lines


def population_table(found: dict[str, Any]) -> list[str]:
    lines = ["| 180 networks | a pass, from s | to s | a task of 40 passes, s |", "|---|---|---|---|"]
    for name, row in found["population"].items():
        times = f"{min(row['pass_s']):.3f} | {max(row['pass_s']):.3f} | {row['task_s']:.1f}"
        lines.append(f"| {name} | {times} |")
    return lines


def throughput_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "| study | side by side | until all are compiled, s | an epoch, s | trials per hour |",
        "|---|---|---|---|---|",
    ]
    for study, rows in found["throughput"].items():
        for count, row in rows.items():
            times = f"{row['startup_s']:.0f} | {median(row['epoch_s']):.2f} | {row['trials_per_hour']:.1f}"
            lines.append(f"| {study} | {count} | {times} |")
    return lines


HOP = 10e-6  # seconds from one GPU to another over a network: what the estimate assumes
SIZE = 7e9  # parameters of the model it takes, in bfloat16 where they travel
LINK = 50e9  # bytes a second of each rank's link


def ranks_table(found: dict[str, Any]) -> list[str]:
    """What the counted collectives come to on other numbers of ranks.

    A gather or a scatter moves (n - 1) / n of the parameters through each rank's link, twice forth and once
    back. An all-reduce of some bytes takes 2 log2 n hops whatever its size, here all over the network.
    """
    rows, tensors = found["collectives"]["FSDP2"], found["collectives"]["FSDP2"]["tensors"]
    one, each = (rows[name]["step"]["bytes"] for name in ("AdaTAMW", "AdaTAMW, scope='tensor'"))
    calls = sum(rows["AdaTAMW"]["step"]["calls"].values())
    lines = [
        f"| ranks | AdamW: a rank sends | seconds | AdaTAMW adds | by tensor ({tensors}) | time | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for n in (8, 512, 16384):
        sent = 3 * SIZE * 2 * (n - 1) / n
        seconds, added = sent / LINK, calls * 2 * math.log2(n) * HOP
        passes = f"{sent / 1e9:.1f} GB | {seconds:.2f}"
        step = f"{one} bytes | {each:,} bytes | {added * 1e6:.0f} µs | {added / seconds:.3%}"
        lines.append(f"| {n:,} | {passes} | {step} |")
    return lines


def fill(page: Path, name: str, table: list[str]) -> None:
    """Puts a table between the page's marks of that name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(before + begin + "\n".join(table) + "\n" + end + rest.split(end)[1], encoding="utf-8")


NOTES = """
## Aims that were not reached

- **ResNet-18 on an H200**: 0.45 of the time of fused SGDM, and 0.60 of fused AdamW. Comparing addresses and
  launching two kernels takes as long as the kernels.
- **394 tensors (bert-large) on an H200**: 250 µs of host time.
- **CPU**: 1.45 of the time of fused SGDM, and 1.30 of fused AdamW. Reading is the limit. TAM reads 20
  bytes per parameter where SGDM reads 12. AdaTAMW reads 24 bytes where AdamW reads 16.
- **Recorder**: less than 2 % of a ResNet-18 training step, for torch's SGDM and AdamW. Their gradients must
  be found and measured in addition.

## Tried without a gain

- One persistent kernel for `scope="tensor"`, which updates a tensor while it is in the L2 cache. With tensors
  of 4 to 34 MB it took 1.0 to 1.3 times the time of two plain passes.
- Prefetching, larger chunks, and several streams.
"""


def write() -> str:
    lines = [
        "# Measured speed",
        "",
        "Made by `benchmarks/report.py` from the JSON files here. `benchmarks/step.py`, `bert_large.py`,",
        "`recorder.py`, `collectives.py`, `population.py` and `lab_throughput.py` say how each figure is",
        "measured. Step: one on an idle machine, median of interleaved rounds, host time before the first",
        "launch included. Device: the device's time alone. Ratio: to torch's fused optimizer of the",
        "family in the same run (for the last two rows of a list, to clipping and then fused AdamW).",
        "Floor: the bytes that must move, divided by the bandwidth of a copy. The tensor scope is",
        "compared with one pass over them, the others with two.",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
        lines += [
            "",
            f"## {path.stem}",
            "",
            f"{found['hardware']}; {versions}; {found['rounds']} rounds.",
            "",
        ]
        if "lists" in found:
            copy = found["copy_bytes_per_second"]
            lines.append(f"Copy: {copy / 1e9:.0f} GB/s." if copy else f"{found['threads']} threads.")
            lines += step_table(found)
        elif "recorder" in found:
            lines += recorder_table(found)
        elif "collectives" in found:
            lines += collectives_table(found)
        elif "exchange" in found:
            lines += exchange_table(found)
        elif "population" in found:
            lines += population_table(found)
        elif "throughput" in found:
            lines += throughput_table(found)
        else:
            lines += end_to_end_table(found)
    return "\n".join(lines) + "\n" + NOTES


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(write(), encoding="utf-8")
    counted = json.loads((RESULTS / "collectives.json").read_text())
    timed = json.loads((RESULTS / "exchange-h200.json").read_text())
    page = Path(__file__).parent.parent / "docs" / "how-it-works" / "communication.md"
    fill(page, "collectives", collectives_table(counted))
    fill(page, "exchange", exchange_table(timed))
    fill(page, "ranks", ranks_table(counted))
