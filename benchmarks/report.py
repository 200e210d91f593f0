"""Writes benchmarks/results/README.md from the JSON files beside it: python benchmarks/report.py"""

from __future__ import annotations

import json
from pathlib import Path
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


def write() -> str:
    lines = [
        "# Measured speed",
        "",
        "Made by `benchmarks/report.py` from the JSON files here; `benchmarks/step.py`, `bert_large.py`",
        "and `recorder.py` say how the figures were taken. Step: one step on an idle machine,",
        "median of interleaved rounds, host time before the first launch included. Device: the device's",
        "time alone. Ratio: to torch's fused optimizer of the family in the same run (for the last two rows",
        "of a list, to clipping and then fused AdamW). Floor: the bytes that must move over the bandwidth of",
        "a copy; the tensor scope is held to one pass over them, the others to two.",
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
        else:
            lines += end_to_end_table(found)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(write(), encoding="utf-8")
