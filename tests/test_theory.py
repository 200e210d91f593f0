"""theory.md: its formulas agree with simulations, its simulation with TAM, its tables with both."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tam
from tam.lab.core.results import load_results
from tam.options import SHORT_AVERAGE
from tam.step.rule import damping_of

pytest.importorskip("matplotlib")  # the script draws, too

DOCS = Path(__file__).parent.parent / "docs" / "how-it-works"
PAGE = (DOCS / "theory.md").read_text(encoding="utf-8")


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / "figures" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # noise imports theory
    spec.loader.exec_module(module)
    return module


theory = load_script("theory")
noise = load_script("noise")


def rows_of(name: str) -> list[list[str]]:
    """Return the cells of a table of the page, without its head."""
    match = re.search(rf"<!-- table: {name} -->\n\n(.*?)\n\n<!-- end -->", PAGE, re.DOTALL)
    assert match is not None, name
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in match[1].splitlines()[2:]]


def limits(problem: str) -> dict[tuple[float, float], str]:
    return {
        (float(beta), ratio): cell
        for beta, *cells in rows_of(problem)
        for ratio, cell in zip(theory.RATIOS, cells, strict=True)
    }


def same_limit(cell: str, expected: str) -> bool:
    """Return True if two limits agree; the grid is coarse, and rounding moves a chaotic run."""
    if "none" in (cell, expected):
        return cell == expected
    return abs(math.log(float(cell) / float(expected))) < math.log(1.5)


# ---------------------------------------------------------------------- the signal


def test_the_identity_is_exact_for_any_preconditioner() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        root, lr = rng.standard_normal((5, 5)), rng.uniform(0.01, 1)
        H, minimum = root @ root.T, rng.standard_normal(5)
        before, u = rng.standard_normal(5), rng.uniform(0.1, 3, 5) * rng.standard_normal(5)
        after = before - lr * u
        loss = [0.5 * (x - minimum) @ H @ (x - minimum) for x in (before, after)]
        signal = (H @ (after - minimum)) @ u
        assert signal == pytest.approx((loss[0] - loss[1]) / lr - lr / 2 * u @ H @ u, rel=1e-9)
        # Past the minimum along the step: going back a little lowers the loss.
        back = after + 1e-6 * u - minimum
        assert (signal < 0) == (0.5 * back @ H @ back < loss[1])


@pytest.mark.parametrize(
    "a, beta", [(0.05, 0.9), (1.0, 0.9), (3.0, 0.9), (0.2, 0.99), (0.5, 0.0), (1.0, 0.5)]
)
def test_the_stationary_cosine_is_that_of_the_simulation(a: float, beta: float) -> None:
    formula = theory.stationary_cosine(a, beta)
    assert theory.simulated_cosine(a, beta, steps=2000, seed=1) == pytest.approx(formula, abs=0.006)
    assert formula == pytest.approx(-a / (2 * math.sqrt(1 - beta**2 + beta * a)), rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
def test_the_stationary_cosine_is_minus_one_at_the_edge(beta: float) -> None:
    assert theory.stationary_cosine(2 * (1 + beta), beta) == pytest.approx(-1, abs=1e-12)


def test_in_one_dimension_the_mean_cosine_is_an_arcsine() -> None:
    run = theory.steps_of_tam(2.0, 1.0, np.zeros((2000, 1)), 0.9, 1.0, noise=1.0, floor=0.0)
    means = [float(S.mean()) for *_, S in islice(run, 400)][100:]
    expected = 2 / math.pi * math.asin(theory.stationary_cosine(1.0, 0.9))
    assert sum(means) / len(means) == pytest.approx(expected, abs=0.005)


def test_the_settled_damping_is_that_of_tam() -> None:
    for lr in (0.1, 2.0):
        assert theory.measured_damping(lr, 0.9, 1000, 900) == pytest.approx(
            theory.settled_damping(lr, 0.9), abs=0.01
        )


# ---------------------------------------------------------------------- the simulation


@pytest.mark.parametrize("smoothing, gain, floor", [(0.9, 1.0, 1e-8), (0.0, 1.0, 1e-8), (0.9, 5.0, 0.25)])
def test_the_simulation_takes_the_steps_of_tam(smoothing: float, gain: float, floor: float) -> None:
    h, start = np.array([0.1, 1.0, 3.0]), np.array([[1.0, -2.0, 0.5]])
    p = torch.tensor(start[0], requires_grad=True)
    options = {"smoothing": smoothing, "gain": gain, "floor": floor}
    optimizer = tam.TAM([p], lr=0.3, momentum=0.8, **options)
    run = theory.steps_of_tam(0.3, h, start, 0.8, smoothing, gain=gain, floor=floor)
    for theta, _, s, d, _ in islice(run, 40):
        p.grad = torch.tensor(h) * p.detach()
        optimizer.step()
        np.testing.assert_allclose(theta[0], p.detach().numpy(), rtol=1e-7, atol=1e-12)
        assert float(s[0, 0]) == pytest.approx(float(optimizer.alignment), abs=1e-9)
        assert float(d[0, 0]) == pytest.approx(float(optimizer.damping), abs=1e-9)


def test_the_simulation_of_adatam_takes_its_steps() -> None:
    p, steps, squares = torch.tensor([1.0], dtype=torch.float64, requires_grad=True), 300, []
    optimizer = tam.AdaTAM([p], lr=1e-3, betas=(0.99, 0.999), bias_correction=True)
    for _ in range(steps):
        p.grad = p.detach().clone()
        optimizer.step()
        squares.append(p.item() ** 2)
    expected = math.sqrt(sum(squares[steps // 2 :]) / (steps // 2)) / 1e-3
    assert theory.adatam_amplitude(0.99, 0.9, steps=steps) == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------- pumping


@pytest.mark.parametrize("smoothing, grows", [(0.9, True), (0.99, False), (1.0, False)])
def test_tam_with_a_long_momentum_needs_a_long_average(smoothing: float, grows: bool) -> None:
    p = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = tam.TAM([p], lr=0.1, momentum=0.99, smoothing=smoothing)
    largest = [0.0, 0.0]
    for t in range(1500):
        p.grad = p.detach().clone()
        optimizer.step()
        largest[t >= 1000] = max(largest[t >= 1000], abs(p.item()))
    assert (largest[1] > 5) if grows else (largest[1] < 0.02), largest


def test_constant_damping_diverges_at_its_limit_and_not_before() -> None:
    for beta, floor in ((0.9, 0.0), (0.5, 0.5)):
        limit = theory.sgdm_limit(beta, floor)
        assert list(theory.diverges([0.97 * limit, 1.03 * limit], beta, 1.0, floor=floor)) == [False, True]


def test_the_table_of_examples_reproduces() -> None:
    rows = rows_of("examples")
    assert len(rows) == len(theory.EXAMPLES)
    for example, row in zip(theory.EXAMPLES, rows, strict=True):
        assert tuple(map(float, row[:4])) == example
        assert float(row[4]) == pytest.approx(theory.sgdm_limit(example[0], example[3]), rel=1e-2)
        assert same_limit(theory.limit_of_example(*example), row[5]), example


def test_a_brief_average_diverges_nearly_everywhere() -> None:
    count = theory.diverges(theory.example_grid(), 0.99, 0.9).sum()
    match = re.search(r"TAM diverges at (\d+) of those 100 values", PAGE)
    assert match is not None and count == pytest.approx(int(match[1]), abs=2)


@pytest.mark.parametrize("problem, beta, ratio", [
    ("one dimension", 0.9, 1), ("one dimension", 0.9, 4), ("one dimension", 0.99, 10),
    ("20 dimensions", 0.9, 1), ("20 dimensions", 0.95, 10), ("20 dimensions with noise", 0.9, 1),
    ("20 dimensions with noise", 0.9, 10),
])  # fmt: skip
def test_the_tables_of_limits_reproduce(problem: str, beta: float, ratio: float) -> None:
    assert same_limit(theory.limit_cell(beta, ratio, problem), limits(problem)[beta, ratio])


def test_what_the_page_says_of_the_limits() -> None:
    without_noise = {**{(1, *k): v for k, v in limits("one dimension").items()},
                     **{(20, *k): v for k, v in limits("20 dimensions").items()}}  # fmt: skip
    everything = {**without_noise, **{(0, *k): v for k, v in limits("20 dimensions with noise").items()}}
    assert all(cell == "none" for (_, beta, ratio), cell in everything.items() if ratio == 1 and beta >= 0.8)
    mild = {k: float(v) for k, v in everything.items() if k[2] <= SHORT_AVERAGE and v not in ("none", "")}
    assert min(v for k, v in mild.items() if k[1] >= 0.9) == 2.4
    assert min(v for k, v in mild.items() if k[1] == 0.8) == 0.24
    assert limits("one dimension")[0.5, 1] != "none"
    for (_, beta, ratio), cell in without_noise.items():
        if ratio >= 5 and beta >= 0.9:
            assert theory.sgdm_limit(beta) / float(cell) > 70
    assert f"warn above {SHORT_AVERAGE:g}" in PAGE


def test_adatam_with_a_brief_average_does_not_settle() -> None:
    for beta, smoothing, amplitude in rows_of("adatam"):
        assert (float(amplitude) > 1000) == ((beta, smoothing) == ("0.99", "0.9"))
    assert theory.adatam_amplitude(0.99, 0.9) == pytest.approx(float(rows_of("adatam")[-1][2]), rel=0.1)


# ---------------------------------------------------------------------- a small network


@pytest.mark.parametrize("batch", [64, noise.IMAGES])
def test_the_stacked_runs_are_plain_runs(batch: int) -> None:
    names, lrs = ["SGDM", "TAM, smoothing 0.0", "TAM, smoothing 0.9"], [0.05, 0.1, 0.1]
    stacked = noise.final_losses([noise.RULES[name] for name in names], lrs, batch, seed=3, steps=60)
    x, y = noise.digits()
    for name, lr, loss in zip(names, lrs, stacked.tolist(), strict=True):
        params = [p.requires_grad_() for p in noise.initial_weights(3)]
        smoothing = float(name[-3:]) if "TAM" in name else 0.0
        optimizer: torch.optim.Optimizer = tam.TAM(params, lr=lr, momentum=0.9, smoothing=smoothing)
        if name == "SGDM":
            optimizer = torch.optim.SGD(params, lr=lr, momentum=0.9)
        rows = noise.batches(len(y), batch, 3)

        def plain_loss(chosen: torch.Tensor, params: list[torch.Tensor] = params) -> torch.Tensor:
            h = x[chosen]
            for weight, bias in zip(params[:-2:2], params[1:-2:2], strict=True):
                h = torch.relu(h @ weight + bias)
            return torch.nn.functional.cross_entropy(h @ params[-2] + params[-1], y[chosen])

        for _ in range(60):
            optimizer.zero_grad()
            plain_loss(next(rows)).backward()
            optimizer.step()
        assert plain_loss(torch.arange(len(y))).item() == pytest.approx(loss, rel=1e-3)


def test_the_table_of_the_network_reproduces() -> None:
    """Two rows of ten: the others take minutes. Rounding differs between machines, and grows in training."""
    stored = {(batch, name): cells for batch, name, *cells in rows_of("noise")}
    names = ["SGDM", "TAM, smoothing 0.9"]
    for name, row in zip(names, noise.measure(names, 64), strict=True):
        loss, lr, knee, failed = (
            [float(cells[i].split()[0]) for cells in (row, stored["64", name])] for i in range(4)
        )
        assert loss[0] == pytest.approx(loss[1], abs=3e-4) and knee[0] == pytest.approx(knee[1], rel=0.1)
        assert lr[0] == pytest.approx(lr[1], rel=0.5) and failed[0] == pytest.approx(failed[1], abs=2)


def test_what_the_page_says_of_the_network() -> None:
    knees = {(batch, name[-3:]): [float(x) for x in re.findall(r"[\d.]+", cells[2])]
             for batch, name, *cells in rows_of("noise")}  # fmt: skip
    without_noise = [knee[0] for (batch, _), knee in knees.items() if batch == "all images"]
    assert knees["all images", "0.0"][0] == max(without_noise)
    assert knees["all images", "0.9"][0] == min(without_noise)
    assert knees["all images", "0.0"][1] > knees["all images", "0.9"][2]
    with_noise = [knee for (batch, _), knee in knees.items() if batch == "64"]
    assert max(low for _, low, _ in with_noise) < min(high for *_, high in with_noise)  # all overlap
    best = {name[-3:]: float(cells[0]) for batch, name, *cells in rows_of("noise") if batch == "64"}
    assert min(best["0.0"], best["0.5"]) > max(best["GDM"], best["0.9"], best[".99"])


# ---------------------------------------------------------------------- freezing, and the start


def test_the_table_of_freezes_reproduces_and_stays_below_the_formula() -> None:
    for (beta, gain, floor), row in zip(theory.FREEZES, rows_of("freezes"), strict=True):
        start, steps = theory.longest_freeze(0.1, beta, gain, floor)
        assert steps == int(row[4]) and steps < theory.frozen_steps(beta, floor) == pytest.approx(
            float(row[3]), abs=0.5
        )
        frozen = theory.path(0.1, beta, beta, gain, floor, start + steps)[start:]
        turned = np.sign(frozen[:, 1]) != np.sign(frozen[0, 1])
        assert not turned[:-6].any()  # s needs a few steps to rise once m has turned
        assert np.ptp(frozen[steps // 2 :, 0]) < 0.15 * abs(frozen[-1, 0])  # theta hardly moves


def test_the_frozen_runs_of_the_mlp_are_those_of_the_page() -> None:
    results = load_results(DOCS.parents[1] / "results" / "registered" / "sgd_ladder")
    runs = [one for one in results if one.config["model"] == "mlp" and one.config["options"].get("gain") == 5]
    frozen = sorted(
        (one for one in runs if one.result["frozen_steps"] > 50), key=lambda one: one.config["lr"]
    )
    lengths = [one.result["frozen_steps"] for one in frozen]
    assert (
        f"{len(frozen)} of {len(runs)} runs of the MLP froze." in PAGE
        and f"the last {lengths[0]} and {lengths[1]} of 1,560 steps" in PAGE
    )
    assert all(one.result["failed"] for one in frozen) and len({one.config["seed"] for one in frozen}) == 1
    for one in frozen:
        losses = [row["validation_loss"] for row in one.metrics]
        assert losses[0] > losses[1] > losses[2] and max(losses[:3]) < min(losses[3:])
        assert one.alignment is not None
        is_frozen = damping_of(one.alignment, 5.0) < 0.02
        assert is_frozen[-one.result["frozen_steps"] :].all()  # up to the last step
    assert theory.frozen_steps(0.99, 1e-8) > 1_560
    assert [one.config["lr"] for one in frozen] == sorted({one.config["lr"] for one in runs})[:2]


def test_the_first_gradients_of_a_tiny_transformer_agree() -> None:
    cosine, damping = theory.first_cosines(0)
    assert cosine > 0.4 and damping > 0.65
    assert all(float(row[1]) > 0.4 and float(row[2]) > 0.65 for row in rows_of("start"))


# ---------------------------------------------------------------------- the page


def test_every_table_and_picture_of_the_page_is_there() -> None:
    names = re.findall(r"<!-- table: (.*) -->", PAGE)
    assert len(names) == 10 and all(map(rows_of, names))
    for picture in re.findall(r"\]\((figures/.*?)\)", PAGE):
        assert (DOCS / picture).is_file(), picture
    with pytest.raises(ValueError, match="0 places for the table 'other'"):
        theory.write_table(PAGE, "other", "")
    assert "| 1 |" in theory.write_table(PAGE, "cosine", "| 1 |")


def test_the_pictures_can_be_drawn(tmp_path: Path) -> None:
    theory.draw_pumping(tmp_path)
    theory.draw_freezing(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "figures").glob("theory-*.svg")}
