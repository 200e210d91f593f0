"""Hypotheses: draws of the seeds, knees of every draw, and Holm's correction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tam.lab.core import ladder
from tam.lab.report.hypotheses import Draws, Hypothesis, decide, judge, knees


def make(number: str, p: float | None, **fields: Any) -> Hypothesis:
    return Hypothesis(number=number, title="", statement="", p=p, **fields)


def test_the_first_row_is_measured_and_the_others_scatter_around_it() -> None:
    values = [[1.0, 2.0, 6.0], [5.0, 5.0]]
    means = Draws(20_000).means(values)
    assert means[0].tolist() == [3.0, 5.0]
    assert means[1:, 0].mean() == pytest.approx(3.0, abs=0.05)
    # The variance of a mean of three draws is a third of the variance of the values, 14 / 3.
    assert means[1:, 0].var() == pytest.approx(14 / 9, rel=0.05)
    assert (means[:, 1] == 5.0).all()
    assert (Draws(100).means(values) == Draws(100).means(values)).all()


def test_the_figures_of_a_seed_are_drawn_together() -> None:
    means = Draws(500).means([[(1.0, -1.0), (2.0, -2.0), (6.0, -6.0)], [(5.0, -5.0)] * 3])
    assert means.shape == (501, 2, 2) and (means[..., 0] == -means[..., 1]).all()
    assert (means[..., 0] == Draws(500).means([[1.0, 2.0, 6.0], [5.0] * 3])).all()


def test_knees_are_those_of_a_ladder() -> None:
    generator = np.random.default_rng(0)
    lrs = 0.001 * 2.0 ** (np.arange(9) / 2)
    bowl = 0.3 * (np.log(lrs / 0.004)) ** 2 + 1.5 + 0.02 * generator.standard_normal((50, 9))
    lower, upper = knees(bowl, lrs, 0.05)
    for row, low, high in zip(bowl, lower, upper, strict=True):
        expected = ladder.summarize({lr: [loss] for lr, loss in zip(lrs, row, strict=True)}, 0.05)
        assert low == pytest.approx(expected.lower_knee) and high == pytest.approx(expected.upper_knee)


def test_a_knee_outside_the_rungs_is_the_last_rung() -> None:
    lrs = np.array([1.0, 2.0, 4.0])
    lower, upper = knees(np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]]), lrs, 0.5)
    assert upper[0] == pytest.approx(4.0) and lower[1] == pytest.approx(1.0)
    assert lower[0] == pytest.approx(4 / 2**0.5) and upper[1] == pytest.approx(2**0.5)


def test_verdicts() -> None:
    found = judge([
        make("A", 0.004), make("B", 0.012), make("C", 0.5), make("D", 0.98), make("E", None),
        make("F", None, verdict="holds"),
    ])  # fmt: skip
    verdicts = {one.number: one.verdict for one in found}
    # Four are decided by draws. Holm: 0.004 <= 0.025 / 4, but 0.012 > 0.025 / 3.
    assert verdicts == {
        "A": "holds", "B": "undecided", "C": "undecided", "D": "does not hold", "E": "not tested",
        "F": "holds",
    }  # fmt: skip


def test_missing_runs_leave_a_statement_undecided_unless_it_is_false() -> None:
    found = judge([make("A", 0.0, missing="resnet"), make("B", 0.98, missing="x"), make("C", 0.012)])
    assert [one.verdict for one in found] == ["undecided", "does not hold", "undecided"]
    assert found[0].why == "resnet not complete yet"
    assert found[1].why == "True in 2.0 % of the draws, x not complete yet"
    # Holm's correction counts the one that waits: 0.012 > 0.025 / 3.
    assert judge([make("A", 0.0, missing="x"), make("C", 0.008)])[1].verdict == "holds"


def test_later_runs_cannot_take_back_that_a_statement_holds() -> None:
    """So one that is not run counts in Holm's correction: 0.02 > 0.025 / 2."""
    before = judge([make("A", None), make("B", 0.02)])
    after = judge([make("A", 0.3), make("B", 0.02)])
    assert [one.verdict for one in before] == ["not tested", "undecided"]
    assert [one.verdict for one in after] == ["undecided", "undecided"]
    assert judge([make("A", None), make("B", 0.012)])[1].verdict == "holds"


def test_the_correction_leaves_out_what_draws_do_not_decide() -> None:
    assert judge([make("A", None, by_draws=False), make("B", 0.02)])[1].verdict == "holds"


def test_a_share_at_a_limit_is_within_it() -> None:
    is_true = np.arange(10_001) <= 250  # of 10,000 draws 250 are true: 2.5 %
    assert judge([decide(make("A", None), is_true)])[0].verdict == "does not hold"
    assert judge([decide(make("A", None), ~is_true)])[0].verdict == "holds"
    one_more = np.arange(10_001) <= 251
    assert judge([decide(make("A", None), one_more)])[0].verdict == "undecided"
    assert judge([decide(make("A", None), ~one_more)])[0].verdict == "undecided"


def test_p_is_the_share_of_draws_in_which_it_is_false() -> None:
    is_true = np.array([False, True, True, True, False])  # the first is for the measured means
    assert decide(make("A", None), is_true).p == 0.25
