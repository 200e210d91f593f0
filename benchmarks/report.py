"""Writes benchmarks/results/README.md from the JSON files beside it: python benchmarks/report.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def step_table(found: dict[str, Any]) -> list[str]:
    on_gpu = any("device_ms" in row for rows in found["lists"].values() for row in rows.values())
    head = [
        "step ms",
        "ratio",
        "to floor",
        *(["device ms", "ratio", "to floor", "host µs", "extra MB"] * on_gpu),
    ]
    lines = []
    for name, rows in found["lists"].items():
        lines += [f"\n**{name}**\n", "| | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
        for key, row in rows.items():
            cells = [f"{row['median_ms']:.3f}", f"{row['ratio']:.3f}", f"{row['to_floor']:.3f}"]
            if on_gpu:
                cells += [
                    f"{row['device_ms']:.3f}",
                    f"{row['device_ratio']:.3f}",
                    f"{row['device_to_floor']:.3f}",
                ]
                cells += [f"{row['host_us']:.0f}", f"{row['extra_bytes'] / 2**20:.2f}"]
            lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return lines


def end_to_end_table(found: dict[str, Any]) -> list[str]:
    lines = ["| batch | AdamW fused ms | AdaTAMW ms | ratio |", "|---|---|---|---|"]
    for batch, row in found["batches"].items():
        ms = row["median_ms"]
        lines.append(f"| {batch} | {ms['AdamW fused']:.2f} | {ms['AdaTAMW']:.2f} | {row['ratio']:.4f} |")
    return lines


def write() -> str:
    lines = [
        "# Measured speed",
        "",
        "Made by `benchmarks/report.py` from the JSON files here; `benchmarks/step.py` and",
        "`benchmarks/bert_large.py` say how the figures were taken. Step: one step on an idle machine,",
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
            if found.get("threads") and "H200" not in found["hardware"]:
                lines.append(f"{found['threads']} threads.")
            lines.append(f"Copy: {found['copy_bytes_per_second'] / 1e9:.0f} GB/s.")
            lines += step_table(found)
        else:
            lines += end_to_end_table(found)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(write(), encoding="utf-8")
