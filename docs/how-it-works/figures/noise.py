"""Train an MLP on digits at many learning rates, with and without the noise of batches.

    make theory

writes the table "noise" of theory.md, in 2 to 4 minutes. The comparison was registered before it was run, in
docs/results/registered.md, "Noise and smoothing".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_digits
from theory import PAGE, table, write_table
from torch import Tensor
from torch.nn.functional import cross_entropy, relu

from tam.lab.core.ladder import cap_loss
from tam.lab.core.study import rungs
from tam.lab.optimizers.rule import Rule, RuleStack
from tam.lab.report.hypotheses import Draws, knees

IMAGES, STEPS, CHANCE, TOLERANCE = 1437, 400, math.log(10), 0.02
WIDTHS = (64, 32, 32, 10)
LRS = rungs(0.002, 17)  # SGDM's
SEEDS = range(6)
BATCHES = {"all images": IMAGES, "64": 64}
RULES = {"SGDM": Rule(torque=False)} | {
    f"TAM, smoothing {gamma}": Rule(smoothing=gamma) for gamma in (0.0, 0.5, 0.9, 0.99)
}  # all with momentum 0.9


def digits() -> tuple[Tensor, Tensor]:
    """Return the training images as rows of mean 0 and variance 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x[:IMAGES], dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(y[:IMAGES])


def initial_weights(seed: int) -> list[Tensor]:
    """Return the weights and biases that torch gives a network."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    return [p.detach() for layer in layers for p in (layer.weight.T.contiguous(), layer.bias)]


def losses(params: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each run, given stacked parameters."""
    h = x.expand(len(params[0]), -1, -1)
    for i in range(0, len(params), 2):
        h = torch.baddbmm(params[i + 1][:, None], relu(h) if i else h, params[i])
    each = cross_entropy(h.flatten(0, 1), y.repeat(len(h)), reduction="none")
    return each.view(len(h), -1).mean(1)


def batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each batch, pass after pass. What makes no whole batch is left out."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator)[: count // size * size].split(size)


def final_losses(
    rules: Sequence[Rule], lrs: Sequence[float], batch: int, seed: int, steps: int = STEPS
) -> Tensor:
    """Train one run per rule and lr. Return the losses on all images, one per run."""
    x, y = digits()
    params = [p.expand(len(rules), *p.shape).clone().requires_grad_() for p in initial_weights(seed)]
    stack, rows, lr = RuleStack(params, rules), batches(len(y), batch, seed), torch.tensor(lrs)
    for _ in range(steps):
        chosen = next(rows)
        stack.step(torch.autograd.grad(losses(params, x[chosen], y[chosen]).sum(), params), lr)
    with torch.no_grad():
        return losses(params, x, y)


def measure(names: Sequence[str], batch: int) -> Iterator[list[str]]:
    """Train each variant with all lrs and seeds. Yield its best loss, the lr, the upper knee and failures."""
    cases = [(RULES[name], lr) for name in names for lr in LRS]
    own_lrs = [lr * (1 + rule.torque) for rule, lr in cases]
    by_seed = []
    for seed in SEEDS:
        by_seed.append(final_losses([rule for rule, _ in cases], own_lrs, batch, seed))
        print(f"batches of {batch}: seed {seed + 1} of {len(SEEDS)}", flush=True)
    for own in torch.stack(by_seed, 1).split(len(LRS)):  # [lrs, seeds]
        failed = int((~(own <= CHANCE)).sum())
        means = Draws().means([[cap_loss(loss, CHANCE) for loss in losses] for losses in own.tolist()])
        upper = knees(means, np.array(LRS), TOLERANCE)[1]
        low, high = np.quantile(upper[1:], [0.025, 0.975])
        best = int(means[0].argmin())
        yield [
            f"{means[0, best]:.4f}", f"{LRS[best]:.3g}", f"{knee(upper[0])} [{knee(low)}, {knee(high)}]",
            f"{failed} of {own.numel()}",
        ]  # fmt: skip


def knee(lr: float) -> str:
    """Return a knee as text. One above the rungs counts as the last rung."""
    return f"{'≥ ' if math.isclose(lr, LRS[-1]) else ''}{lr:.2f}"


def main() -> None:
    """Write the table."""
    torch.set_num_threads(1)
    lines = [
        [label, name, *row]
        for label, batch in BATCHES.items()
        for name, row in zip(RULES, measure([*RULES], batch), strict=True)
    ]
    head = ["batch", "variant", "best loss", "at lr", "upper knee", "failed"]
    text = write_table(PAGE.read_text(encoding="utf-8"), "noise", table(head, lines))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
