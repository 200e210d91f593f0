"""results/figures.py: what the pages say of a ladder, on made-up losses whose figures are known."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, quantiles
from types import ModuleType
from typing import Any

import pytest

from tam.lab.core.config import TrialConfig
from tam.lab.core.study import Variant
from tam.lab.experiments.sgd_ladder.studies import LOWEST_LR_DEFAULT
from tam.lab.report.evidence import Evidence
from tests.lab.experiments.test_hypotheses import make_filled_plan

RESULTS = Path(__file__).parents[2] / "results"
KEY = ("sgd_ladder", "default-momentum", "mlp-0.9")
SOURCE = "/".join(KEY)
BEST = {"SGDM": 2, "TAM": 3}  # the rung of the lowest loss
LOWEST = {"SGDM": 1.0, "TAM": 1.3}
RUNGS = [LOWEST_LR_DEFAULT * 2 ** (i / 2) for i in range(10)]

MakeFigures = Callable[[float], Any]


def rung_of(variant: Variant, trial: TrialConfig) -> int:
    return variant.lrs.index(trial.lr)


def loss_of(name: str, rung: int) -> float:
    """Return the loss without noise. From the best rung to the next one, it rises by 0.02."""
    return LOWEST[name] + 0.02 * (rung - BEST[name]) ** 2


def noise_of(name: str, rung: int, seed: int) -> float:
    return random.Random(f"{name} {rung} {seed}").gauss(0, 1)


@pytest.fixture(scope="module")
def figures_module() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RESULTS)
        yield importlib.import_module("figures")


@pytest.fixture
def make_figures(figures_module: ModuleType) -> MakeFigures:
    """Return a function that takes the spread of the losses of a rung."""

    def make(spread: float) -> Any:
        def fill(variant: Variant, trial: TrialConfig) -> dict[str, float]:
            name, rung = variant.name.partition(",")[0], rung_of(variant, trial)
            loss = loss_of(name, rung) + spread * noise_of(name, rung, trial.seed)
            return {"validation_loss": loss, "failed": False, "settled_alignment": 0.1 * (5 - rung)}

        plan = make_filled_plan("sgd_ladder", "mlp-0.9", fill, "default-momentum")
        return figures_module.Figures(Evidence(plans={KEY: plan}), [])

    return make


def test_figures_of_equal_seeds(make_figures: MakeFigures) -> None:
    figures = make_figures(0.0)
    assert figures.rungs(SOURCE) == pytest.approx(RUNGS, rel=1e-5)
    assert figures.summary(SOURCE, "TAM").best_lr == pytest.approx(RUNGS[3], rel=1e-5)
    assert figures.mean_losses(SOURCE, "TAM") == pytest.approx([loss_of("TAM", k) for k in range(10)])
    gap, shift = figures.best_gap(SOURCE, "TAM", "SGDM"), figures.knee_shift(SOURCE, "TAM", "SGDM")
    assert (gap.low, gap.mean, gap.high) == pytest.approx((0.3, 0.3, 0.3))
    assert (shift.low, shift.mean, shift.high) == pytest.approx((0.5, 0.5, 0.5), abs=1e-5)
    assert figures.octaves(SOURCE, "TAM", "SGDM") == "+0.50 [+0.50, +0.50] octaves"
    # The zero of s is at rung 5, two rungs and so one octave above TAM's best one.
    assert figures.zero_of_s(SOURCE, "TAM") == pytest.approx(1.0, abs=1e-5)
    gaps = figures.gaps(SOURCE, "TAM", "SGDM", RUNGS[7])
    assert [one.mean for one in gaps] == pytest.approx(
        [loss_of("TAM", rung) - loss_of("SGDM", rung) for rung in (7, 8, 9)]
    )


def test_ranges_are_those_of_drawn_seeds(make_figures: MakeFigures) -> None:
    spread, seeds = 0.01, range(10, 14)
    found = make_figures(spread).best_gap(SOURCE, "TAM", "SGDM")
    generator, gaps = random.Random(1), []
    for _ in range(4000):
        best = {}
        for name in BEST:
            drawn = [
                [noise_of(name, rung, seed) for seed in generator.choices(seeds, k=len(seeds))]
                for rung in range(len(RUNGS))
            ]
            best[name] = min(loss_of(name, rung) + spread * fmean(own) for rung, own in enumerate(drawn))
        gaps.append(best["TAM"] - best["SGDM"])
    low, *_, high = quantiles(gaps, n=40)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.001)
    assert found.high - found.low > 0.005


def test_a_zero_of_s_outside_of_the_rungs_is_infinite(make_figures: MakeFigures) -> None:
    figures = make_figures(0.0)
    plan = figures.evidence.plans[KEY]
    for offset, expected in ((1.0, float("inf")), (-1.0, float("-inf"))):
        for record in plan.results.records.values():
            record.result["settled_alignment"] = offset
        assert figures.zero_of_s(SOURCE, "TAM") == expected
