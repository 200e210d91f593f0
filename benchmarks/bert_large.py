"""Times a masked-LM training step of BERT-large: python benchmarks/bert_large.py [--out FILE.json]

Random weights, bf16 autocast, gradients set to None each step, torch's fused AdamW and AdaTAMW in
interleaved rounds on the same model. Needs transformers and a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers

import tam
from tam.lab.experiments.runtime import trial as runtime

BATCHES = ((32, 512), (8, 128))
DEVICE = torch.device("cuda")


def measure(model: Any, shape: tuple[int, int], count: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds a step, one figure a round."""
    optimizers = {
        "AdamW fused": runtime.fused_adamw(model),
        "AdaTAMW": tam.AdaTAMW(model.parameters(), lr=2e-6, weight_decay=0.0, bias_correction=True),
    }
    tokens = torch.randint(0, model.config.vocab_size, shape, device=DEVICE)
    found = list(runtime.rounds(model, tokens, optimizers, count, steps))
    return {name: [1e3 * one[name] for one in found] for name in optimizers}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = runtime.make_model("BERT-large", DEVICE)
    results: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tam": tam.__version__,
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "batches": {},
    }
    for shape in BATCHES:
        times = measure(model, shape, arguments.rounds, arguments.steps)
        medians = {name: statistics.median(ts) for name, ts in times.items()}
        ratio = medians["AdaTAMW"] / medians["AdamW fused"]
        row = {"median_ms": medians, "min_ms": {k: min(ts) for k, ts in times.items()}, "ratio": ratio}
        tokens = shape[0] * shape[1]
        row["tokens_per_second"] = {k: tokens / v * 1e3 for k, v in medians.items()}
        results["batches"][f"{shape[0]} x {shape[1]}"] = row
        print(
            f"{shape[0]} x {shape[1]}:",
            {k: round(v, 3) for k, v in medians.items()},
            f"ratio {ratio:.4f}",
            flush=True,
        )
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
