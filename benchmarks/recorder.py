"""What a Recorder costs a training step of ResNet-18: python benchmarks/recorder.py [--out FILE.json]

Random images in the shapes of CIFAR-10 and ImageNet, all quantities. Turns of a few steps with a recorder and
without it alternate; the ratio is that of neighbouring turns, its median over all of them.
Beside it, what the recorder adds to the host's time in `optimizer.step()` alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(32, 128, False), (32, 128, True), (224, 64, True)] if DEVICE == "cuda" else [(32, 128, False)]
OPTIMIZERS = {
    "SGDM": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True),
    "TAM": lambda ps: tam.TAM(ps, lr=0.02),
    "AdaTAMW": lambda ps: tam.AdaTAMW(ps, lr=2e-5),
}


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(nn.functional.relu(self.norm1(self.conv1(x)))))
        return nn.functional.relu(y + self.short(x))


def make_model(side: int) -> nn.Module:
    """ResNet-18, with the stem for images of this size."""
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    if side > 64:
        stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1)] if side > 64 else []
    width = 64
    for i, outputs in enumerate((64, 128, 256, 512)):
        for stride in (1 if i == 0 else 2, 1):
            layers.append(Block(width, outputs, stride))
            width = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers).to(DEVICE).to(memory_format=torch.channels_last).train()


class Training:
    """A model and its optimizer, on one batch."""

    def __init__(self, name: str, amp: bool, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.model, self.amp, self.images, self.labels = make_model(images.shape[-1]), amp, images, labels
        self.optimizer = OPTIMIZERS[name](self.model.parameters())

    def step(self) -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.amp):
            loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def turn(work: Callable[[], None], times: int) -> float:
    """Milliseconds each."""
    wait()
    start = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - start) / times * 1e3


def until_host_is_done(work: Callable[[], None], times: int) -> float:
    """Microseconds each until the host is done, from an idle device."""
    wait()
    start = time.perf_counter()
    for _ in range(times):
        work()
    found = (time.perf_counter() - start) / times * 1e6
    wait()
    return found


def measure(name: str, side: int, batch: int, amp: bool, rounds: int, steps: int) -> dict[str, float]:
    images = torch.randn(batch, 3, side, side, device=DEVICE).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=DEVICE)
    training = Training(name, amp, images, labels)
    recorder = tam.Recorder(training.optimizer)
    times: dict[str, list[float]] = {"without": [], "with": []}
    host: dict[str, list[float]] = {"without": [], "with": []}
    gc.disable()
    for i in range(-2, rounds):  # the first ones compile
        order = ["without", "with"]
        for which in order if i % 2 else reversed(order):
            recorder.every = 1 if which == "with" else 2**62  # never
            found = turn(training.step, steps), until_host_is_done(training.optimizer.step, steps)
            if i >= 0:
                times[which].append(found[0])
                host[which].append(found[1])
    gc.enable()
    recorder.close()
    assert len(recorder) == 2 * (rounds + 2) * steps and bool(recorder["grad_norm"].isfinite().all())
    added = statistics.median(b - a for a, b in zip(host["without"], host["with"], strict=True))
    return {
        "without_ms": statistics.median(times["without"]),
        "with_ms": statistics.median(times["with"]),
        "ratio": statistics.median(b / a for a, b in zip(times["without"], times["with"], strict=True)),
        "ratio_of_minima": min(times["with"]) / min(times["without"]),
        "host_added_us": added,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__, "tam": tam.__version__}
    results: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name()
        if DEVICE == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "versions": versions,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "recorder": {},
    }
    torch.set_float32_matmul_precision("high")
    for side, batch, amp in CASES:
        for name in OPTIMIZERS:
            row = measure(name, side, batch, amp, arguments.rounds, arguments.steps)
            key = f"{batch} images of {side} x {side}, {'bfloat16 autocast' if amp else 'float32'}: {name}"
            results["recorder"][key] = row
            print(key, {k: round(v, 4) for k, v in row.items()}, flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
