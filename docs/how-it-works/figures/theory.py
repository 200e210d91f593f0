"""Compute the numbers and pictures of theory.md.

    make theory

writes the tables between the markers of the page, and theory-*.svg. It takes about a minute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tam

DOCS = Path(__file__).parent.parent
PAGE = DOCS / "theory.md"

BETAS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
RATIOS = (1, 1.5, 2, 2.5, 3, 4, 5, 10)  # (1 - smoothing) / (1 - momentum)
STARTS = 4  # random starts per point
GROWTH = 1e-4  # per step: a mean growth rate of log |theta| above this is divergence

# beta, smoothing, gain and floor of the table of examples
EXAMPLES = (
    (0.9, 0.9, 1.0, 1e-8), (0.9, 0.0, 1.0, 1e-8), (0.95, 0.9, 1.0, 1e-8), (0.99, 0.9, 1.0, 1e-8),
    (0.99, 0.99, 1.0, 1e-8), (0.9, 0.9, 2.0, 1e-8), (0.9, 0.9, 5.0, 1e-8), (0.9, 0.9, 5.0, 0.5),
    (0.9, 0.9, 5.0, 1.0),
)  # fmt: skip
FREEZES = ((0.9, 2.0, 1e-8), (0.9, 5.0, 1e-8), (0.9, 5.0, 1e-2))  # beta, gain, floor


# ---------------------------------------------------------------------- the simulation


def steps_of_tam(
    lr: Any, h: Any, theta: np.ndarray, beta: Any, smoothing: Any, *, gain: float = 1.0, floor: float = 1e-8,
    momentum: Any = 0.0, noise: float = 0.0, seed: int = 0,
) -> Iterator[tuple[np.ndarray, ...]]:  # fmt: skip
    """Take TAM's steps on L = sum(h theta^2) / 2 for many runs at once. A test compares them with `tam.TAM`.

    Rows are runs, columns are coordinates; lr, beta and smoothing are one number or one per run.
    After each step yields theta, m, s, d and S. The arrays are reused: changing theta and m by a common
    factor is allowed, since the rule does not depend on their scale.
    """
    theta = np.array(theta, dtype=float)
    lr, beta, smoothing = (np.reshape(x, (-1, 1)) for x in (lr, beta, smoothing))
    m, s = np.zeros_like(theta) + momentum, np.zeros((len(theta), 1))
    rng = np.random.default_rng(seed)
    while True:
        g = h * theta
        if noise:
            g = g + noise * rng.standard_normal(g.shape)
        dot, mm, gg = (np.einsum("rc,rc->r", a, b)[:, None] for a, b in ((m, g), (m, m), (g, g)))
        norms = np.sqrt(mm) * np.sqrt(gg)
        S = np.clip(dot / np.where(norms > 0, norms, 1.0), -1, 1)
        s = smoothing * s + (1 - smoothing) * S
        d = (1 + np.clip(gain * s, -1, 1)) / 2
        m *= beta
        m += (floor + d) * g
        theta -= lr * m
        yield theta, m, s, d, S


def growth(
    lr: np.ndarray, h: np.ndarray, beta: Any, smoothing: Any, steps: int, gain: float = 1.0,
    floor: float = 1e-8,
) -> np.ndarray:  # fmt: skip
    """Return the growth of log |(theta, lr m)| per step in the second half of a noise-free run."""
    rng, shape = np.random.default_rng(0), (len(lr), len(h))
    starts = rng.standard_normal(shape), rng.standard_normal(shape)
    column, total = lr[:, None], np.zeros(len(lr))
    run = steps_of_tam(lr, h, starts[0], beta, smoothing, gain=gain, floor=floor, momentum=starts[1])
    for t, (theta, m, *_) in enumerate(islice(run, steps), 1):
        if t % 20 == 0 or t in (steps // 2, steps):  # before it leaves the range of floats
            size = np.sqrt((theta**2).sum(1) + ((column * m) ** 2).sum(1))
            theta /= size[:, None]
            m /= size[:, None]
            total += np.log(size)
        if t == steps // 2:
            total[:] = 0
    return total / (steps - steps // 2)


def diverges(
    lr_h: Sequence[float], beta: float, smoothing: float, *, gain: float = 1.0, floor: float = 1e-8,
    h: Any = (1.0,), steps: int = 10_000,
) -> np.ndarray:  # fmt: skip
    """Return for each lr times the largest curvature whether noise-free TAM diverges."""
    lr = np.repeat(np.asarray(lr_h, dtype=float), STARTS)
    rates = growth(lr, np.asarray(h, dtype=float), beta, smoothing, steps, gain, floor)
    return rates.reshape(-1, STARTS).mean(1) > GROWTH


def diverges_with_noise(lr_h: Sequence[float], beta: float, smoothing: float, h: Any) -> np.ndarray:
    """Return for each lr whether TAM, started at the minimum with gradient noise of 1, leaves it for good."""
    lr, h = np.repeat(np.asarray(lr_h, dtype=float), STARTS), np.asarray(h, dtype=float)
    run = steps_of_tam(lr, h, np.zeros((len(lr), len(h))), beta, smoothing, noise=1.0)
    far = np.zeros(len(lr), bool)
    for theta, m, *_ in islice(run, 6000):
        far |= np.abs(theta).max(1) > 1e6 * lr
        theta[far] = m[far] = 0.0
    return far.reshape(-1, STARTS).mean(1) >= 0.5


def sgdm_limit(beta: float, floor: float = 0.0) -> float:
    """Return lr h at which constant damping, a weight of 1/2 + floor, becomes unstable."""
    return 2 * (1 + beta) / (0.5 + floor)


def spectrum(dimensions: int = 20, condition: float = 100.0) -> np.ndarray:
    return np.geomspace(1 / condition, 1, dimensions)


# ---------------------------------------------------------------------- formulas


def stationary_cosine(a: Any, beta: float) -> Any:
    """Return E[g m] / sqrt(E[g^2] E[m^2]) of one mode at stationarity; a = lr d h."""
    return -a / (2 * np.sqrt(1 - beta**2 + beta * a))


def settled_damping(lr_h: float, beta: float) -> float:
    """Return d that solves d = (1 + S) / 2 with S = `stationary_cosine` of lr d h, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        d = (low + high) / 2
        low, high = (d, high) if (1 + stationary_cosine(lr_h * d, beta)) / 2 > d else (low, d)
    return low


def frozen_steps(beta: float, floor: float) -> float:
    """Return after how many steps beta^n has fallen to the floor."""
    return math.log(1 / floor) / -math.log(beta)


# ---------------------------------------------------------------------- measurements


def simulated_cosine(a: float, beta: float, steps: int = 4000, modes: int = 400, seed: int = 0) -> float:
    """Return the ratio of `stationary_cosine`, measured over many runs of SGDM with noise."""
    run = steps_of_tam(2 * a, 1.0, np.zeros((1, modes)), beta, 1.0, noise=1.0, floor=0.0, seed=seed)
    sums, previous = np.zeros(3), np.zeros((1, modes))
    for t, (_, m, *_) in enumerate(islice(run, steps)):
        g = 2 * (m - beta * previous)  # what m took, at d = 1/2
        if t >= steps // 4:
            sums += [(g * previous).sum(), (g * g).sum(), (previous * previous).sum()]
        previous = m.copy()
    return float(sums[0] / np.sqrt(sums[1] * sums[2]))


def measured_damping(lr: float, beta: float, size: int = 2000, steps: int = 1500) -> float:
    """Return the mean damping of `tam.TAM` on sum(theta^2) / 2 with gradient noise, once settled."""
    generator = torch.Generator().manual_seed(0)
    p = torch.zeros(size, requires_grad=True)
    optimizer, total = tam.TAM([p], lr=lr, momentum=beta, smoothing=max(beta, 0.9)), 0.0
    for t in range(steps):
        p.grad = p.detach() + torch.randn(size, generator=generator)
        optimizer.step()
        total += float(optimizer.damping) * (t >= steps // 3)
    return total / (steps - steps // 3)


def path(lr_h: float, beta: float, smoothing: float, gain: float, floor: float, steps: int) -> np.ndarray:
    """Return theta, m, s and d of a noise-free run in one dimension from theta = 1, one row per step."""
    run = steps_of_tam(lr_h, 1.0, np.ones((1, 1)), beta, smoothing, gain=gain, floor=floor)
    return np.array([[float(x[0, 0]) for x in row[:4]] for row in islice(run, steps)])


def longest_freeze(lr_h: float, beta: float, gain: float, floor: float, steps: int = 4000) -> tuple[int, int]:
    """Return where the longest run of steps with d = 0 begins, and how many steps it has."""
    best = start = 0
    since = 0
    for t, d in enumerate(path(lr_h, beta, beta, gain, floor, steps)[:, 3]):
        if d > 0:
            since = t + 1
        elif t + 1 - since > best:
            best, start = t + 1 - since, since
    return start, best


def adatam_amplitude(beta: float, smoothing: float, lr: float = 1e-3, steps: int = 8000) -> float:
    """Return the root mean square of theta / lr of noise-free AdaTAM in one dimension, once settled."""
    theta, m, v, s, total = 1.0, 0.0, 0.0, 0.0, 0.0
    for t in range(1, steps + 1):
        s = smoothing * s + (1 - smoothing) * float(np.sign(m * theta))
        m = beta * m + (1e-8 + (1 + s) / 2) * theta
        v = 0.999 * v + 0.001 * theta**2
        theta -= lr * m / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        total += theta**2 * (t > steps // 2)
    return math.sqrt(total / (steps - steps // 2)) / lr


class TinyGPT(torch.nn.Module):
    """Two pre-norm transformer blocks of width 64 on 32 tokens."""

    def __init__(self, tokens: int = 32, length: int = 32, width: int = 64) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embedding = torch.nn.Embedding(tokens, width)
        self.position = torch.nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = torch.nn.TransformerEncoder(
            layer, 2, norm=torch.nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = torch.nn.Linear(width, tokens, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            torch.nn.init.normal_(weight, std=0.02)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) + self.position
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def first_cosines(seed: int, steps: int = 20, batch: int = 32, length: int = 32) -> tuple[float, float]:
    """Return the mean S of steps 2 to 20 of AdaTAMW on a tiny GPT without warm-up, and the largest d."""
    torch.manual_seed(seed)
    chain = torch.softmax(2 * torch.randn(32, 32), 1)  # the text is a Markov chain
    model = TinyGPT()
    optimizer = tam.AdaTAMW.matching_adamw(model.parameters(), lr=1e-3)
    s, cosines, dampings = 0.0, [], []
    for _ in range(steps):
        text = [torch.randint(32, (batch,))]
        for _ in range(length):
            text.append(torch.multinomial(chain[text[-1]], 1)[:, 0])
        x = torch.stack(text, 1)
        logits = model(x[:, :-1])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
        cosines.append((float(optimizer.alignment) - 0.9 * s) / 0.1)
        s = float(optimizer.alignment)
        dampings.append(float(optimizer.damping))
    return sum(cosines[1:]) / (steps - 1), max(dampings)


# ---------------------------------------------------------------------- the tables


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def first_divergence(lr_h: np.ndarray, diverged: np.ndarray) -> str:
    """Return the smallest lr h that diverges, with two digits, or "none"."""
    return f"{lr_h[diverged][0]:.2g}" if diverged.any() else "none"


def grid_below_limit(beta: float, points: int) -> np.ndarray:
    return np.geomspace(1e-4, 0.99 * sgdm_limit(beta), points)


def example_grid() -> np.ndarray:
    return np.geomspace(1e-3, 20, 100)


def limit_of_example(beta: float, smoothing: float, gain: float, floor: float) -> str:
    lr_h = example_grid()
    return first_divergence(lr_h, diverges(lr_h, beta, smoothing, gain=gain, floor=floor))


def limit_cell(beta: float, ratio: float, problem: str) -> str:
    """Return an entry of the table of limits."""
    smoothing = 1 - ratio * (1 - beta)
    if smoothing < -1e-9:
        return ""
    smoothing = max(smoothing, 0.0)
    if problem == "one dimension":
        lr_h = grid_below_limit(beta, 100)
        return first_divergence(lr_h, diverges(lr_h, beta, smoothing))
    lr_h = grid_below_limit(beta, 40)
    if problem == "20 dimensions":
        return first_divergence(lr_h, diverges(lr_h, beta, smoothing, h=spectrum(), steps=5000))
    return first_divergence(lr_h, diverges_with_noise(lr_h, beta, smoothing, spectrum()))


PROBLEMS = ("one dimension", "20 dimensions", "20 dimensions with noise")


def tables() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each table of the page."""
    cosines = [
        (beta, f"{a:g}", f"{stationary_cosine(a, beta):.3f}", f"{simulated_cosine(a, beta):.3f}")
        for beta in (0.9, 0.99) for a in (0.05, 0.5, 2.0)
    ]  # fmt: skip
    yield "cosine", table(["β", "a", "formula", "simulation"], cosines)
    dampings = [
        (lr, f"{settled_damping(lr, 0.9):.3f}", f"{measured_damping(lr, 0.9):.3f}") for lr in (0.1, 0.5, 2.0)
    ]
    yield "damping", table(["η h", "d, formula", "d, `tam.TAM`"], dampings)
    examples = [
        (beta, smoothing, f"{gain:g}", f"{floor:g}", f"{sgdm_limit(beta, floor):.3g}",
         limit_of_example(beta, smoothing, gain, floor))
        for beta, smoothing, gain, floor in EXAMPLES
    ]  # fmt: skip
    head = ["β", "γ", "gain", "floor", "constant damping diverges from", "TAM diverges from"]
    yield "examples", table(head, examples)
    freezes = [
        (beta, f"{gain:g}", f"{floor:g}", f"{frozen_steps(beta, floor):.0f}",
         longest_freeze(0.1, beta, gain, floor)[1])
        for beta, gain, floor in FREEZES
    ]  # fmt: skip
    yield "freezes", table(["β = γ", "gain", "floor", "ln(1 / floor) / −ln β", "steps, simulation"], freezes)
    for problem in PROBLEMS:
        rows = [[beta, *(limit_cell(beta, ratio, problem) for ratio in RATIOS)] for beta in BETAS]
        yield problem, table(["β", *map(str, RATIOS)], rows)
        print(f"table of limits: {problem}")
    pairs = ((0.9, 0.9), (0.9, 0.0), (0.99, 0.99), (0.99, 0.9))
    rows = [(beta, smoothing, f"{adatam_amplitude(beta, smoothing):.2g}") for beta, smoothing in pairs]
    yield "adatam", table(["β₁", "γ", "rms θ / η"], rows)
    starts = [(seed, *(f"{x:.2f}" for x in first_cosines(seed))) for seed in range(3)]
    yield "start", table(["seed", "mean S, steps 2 to 20", "largest d"], starts)


def write_table(text: str, name: str, content: str) -> str:
    """Return the page with the table between its markers replaced."""
    pattern = rf"(<!-- table: {name} -->\n\n).*?(\n\n<!-- end -->)"
    text, count = re.subn(pattern, lambda match: f"{match[1]}{content}{match[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} places for the table {name!r}, not one")
    return text


# ---------------------------------------------------------------------- the pictures


def draw_pumping(folder: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.6, 3.0), layout="constrained")
    for smoothing, label in ((0.9, "TAM, γ 0.9"), (0.99, "TAM, γ 0.99"), (1.0, "constant damping")):
        rows = path(0.1, 0.99, smoothing, 1.0, 1e-8, 1500)
        energy = np.hypot(rows[:, 0], np.sqrt(0.2) * rows[:, 1])  # theta and m oscillate in turn
        axis.semilogy(range(0, 1500, 4), energy[::4], label=label, linewidth=1.2)
    axis.set(xlabel="step", ylabel="amplitude", title="β = 0.99, η h = 0.1, no noise")
    axis.legend(frameon=False)
    save(figure, folder / "theory-pumping.svg")


def draw_freezing(folder: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(5.6, 3.6), sharex=True, layout="constrained")
    for gain in (1.0, 5.0):
        rows = path(0.1, 0.9, 0.9, gain, 1e-8, 400)
        top.plot(rows[:, 0], label=f"gain {gain:g}", linewidth=1.2)
        bottom.plot(rows[:, 3], linewidth=1.2)
    top.set(ylabel="θ", title="β = γ = 0.9, η h = 0.1, no noise")
    top.legend(frameon=False)
    bottom.set(xlabel="step", ylabel="d", ylim=(-0.05, 1.05))
    save(figure, folder / "theory-freezing.svg")


def save(figure: Any, target: Path) -> None:
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    import warnings

    import matplotlib as mpl

    warnings.filterwarnings("ignore", ".*averages the cosine over about")  # this page is about it
    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "theory", "svg.fonttype": "none", "font.size": 9}
    torch.set_num_threads(1)
    draw_pumping(DOCS / "figures")
    draw_freezing(DOCS / "figures")
    text = PAGE.read_text(encoding="utf-8")
    for name, content in tables():
        text = write_table(text, name, content)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
