"""H4, H5, H7 and H8: against loops over draws that are written out, on made-up losses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import fmean

import pytest

from tam.lab.core.config import TrialConfig
from tam.lab.core.ladder_plan import LadderPlan, make_plan
from tam.lab.core.plan import Plan
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import Results, TrialRecord
from tam.lab.core.study import Variant
from tam.lab.experiments.pretrain.hypotheses import FirstStage, judge_hypotheses
from tam.lab.experiments.sgd_ladder.hypotheses import COMPARED, NAMES, Network
from tam.lab.experiments.sgd_ladder.studies import LOWEST_LR_MLP, LOWEST_LR_RESNET
from tam.lab.report.hypotheses import Draws, Hypothesis

CAP = math.log(10)
Fill = Callable[[Variant, TrialConfig], dict[str, float]]  # of a trial: what its result holds


def make_filled_plan(experiment: str, study: str, fill: Fill, preset: str = "registered") -> Plan:
    """Return the plan of a study with made-up results for all trials that can run."""
    chosen = next(one for one in get_experiment(experiment).presets[preset] if one.name == study)
    plan = make_plan(get_experiment(experiment), chosen, Results(), preset)
    while trials := plan.to_run():
        for variant, trial in trials:
            result = fill(variant, trial)
            diverged = math.isnan(result[chosen.outcome])
            plan.results.records[trial.key] = TrialRecord(trial.key, {"diverged": diverged, **result})
    return plan


def judge(*plans: Plan) -> dict[str, Hypothesis]:
    by_key = {(plan.experiment.name, plan.preset, plan.study.name): plan for plan in plans}
    return {one.number: one for one in judge_hypotheses(by_key)}


# ---------------------------------------------------------------------- the SGD side

BEST = {"S1n": 2.5, "S2n": 1.7, "S3n": 2.5, "S4": 1.0, "S5": 4.3, "S5c": 3.4}  # the rung of the lowest loss


def rung_of(trial: TrialConfig) -> float:
    """Return the place of a trial's lr among those of its network."""
    lowest = LOWEST_LR_MLP if getattr(trial, "model", "") == "mlp" else LOWEST_LR_RESNET
    return 2 * math.log2(trial.lr / lowest / (1 if trial.optimizer == "sgdm" else 2))


def made_up(variant: Variant, trial: TrialConfig) -> dict[str, float]:
    """Return noisy losses in the shape of a bowl. With gain 5 some runs freeze."""
    generator = random.Random(f"{variant.name} {rung_of(trial):.1f} {trial.seed}")
    number = next((key for key, name in NAMES.items() if name == variant.name), "")
    loss = 1.5 + 0.02 * (rung_of(trial) - BEST.get(number, 2)) ** 2 + generator.gauss(0, 0.015)
    frozen = 60.0 if number == "S4" and generator.random() < 0.3 else 10.0
    return {"validation_loss": loss, "failed": loss > CAP, "frozen_steps": frozen}


def figures_of(plan: Plan, number: str) -> dict[float, list[tuple[float, bool]]]:
    """Return capped loss and freezing of each trial by SGDM's lr, read from the results by hand."""
    assert isinstance(plan, LadderPlan)
    figures: dict[float, list[tuple[float, bool]]] = {}
    variant = plan.study.variant(NAMES[number])
    for trial in plan.comparison_trials(variant):
        if (record := plan.results.get(trial.key)) is not None:
            loss = float(record.result["validation_loss"])
            capped = min(loss, CAP) if math.isfinite(loss) else CAP
            lr = trial.lr if trial.optimizer == "sgdm" else trial.lr / 2
            own = capped, float(record.result["frozen_steps"]) > 50
            figures.setdefault(float(f"{lr:.6g}"), []).append(own)
    return dict(sorted(figures.items()))


def knee_of(figures: dict[float, list[tuple[float, bool]]]) -> float:
    """Return the upper knee, by the words of the registration."""
    lrs, means = [*figures], [fmean(loss for loss, _ in own) for own in figures.values()]
    best = means.index(min(means))
    if all(loss == CAP for loss, _ in figures[lrs[best]]):
        return lrs[0]
    for k in range(best + 1, len(lrs)):
        if means[k] >= means[best] + 0.02:
            share = (means[best] + 0.02 - means[k - 1]) / (means[k] - means[k - 1])
            return math.exp((1 - share) * math.log(lrs[k - 1]) + share * math.log(lrs[k]))
    return lrs[-1]


def truths_of(plan: Plan, generator: random.Random | None) -> tuple[bool, bool]:
    """Return whether H5 and H7 are true of a network, as measured or in a draw of the seeds."""
    figures = {number: figures_of(plan, number) for number in COMPARED}
    if generator is not None:
        figures = {
            number: {lr: generator.choices(own, k=len(own)) for lr, own in rungs.items()}
            for number, rungs in figures.items()
        }
    knees = {number: knee_of(rungs) for number, rungs in figures.items()}
    limit = 2**-0.25 * knees["S1n"]
    lrs = [*figures["S4"]]
    above = min(max(sum(lr < knees["S4"] for lr in lrs), 1), len(lrs) - 1)
    around = [frozen for lr in lrs[above - 1 : above + 1] for _, frozen in figures["S4"][lr]]
    pumps = knees["S2n"] < limit <= knees["S3n"]
    return pumps and sum(around) >= 0.2 * len(around), knees["S5"] >= 2**0.25 * knees["S5c"]


def test_h5_and_the_sgd_side_of_h7_are_loops_over_draws() -> None:
    plans = [make_filled_plan("sgd_ladder", name, made_up) for name in ("resnet", "mlp")]
    draws, generator, count = Draws(), random.Random(1), 1000
    networks = [Network(plan, draws) for plan in plans if isinstance(plan, LadderPlan)]
    for network in networks:
        for number in COMPARED:
            assert network.knees[number][0] == pytest.approx(knee_of(figures_of(network.plan, number)))
        expected = truths_of(network.plan, None)
        assert (network.pumps()[0] & network.frozen[0], network.restarts_help()[0]) == expected
    drawn = [[truths_of(plan, generator) for plan in plans] for _ in range(count)]
    shares = [sum(all(truth[i] for truth in both) for both in drawn) / count for i in range(2)]
    assert 0.05 < shares[0] < 0.95 and 0.05 < shares[1] < 0.95  # the draws differ
    found = judge(*plans)["H5"]
    assert found.p == pytest.approx(1 - shares[0], abs=0.05)
    restarts = (networks[0].restarts_help() & networks[1].restarts_help())[1:].mean()
    assert restarts == pytest.approx(shares[1], abs=0.05)


def test_a_control_whose_source_diverged_delays_no_verdict() -> None:
    def fill(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        lost = variant.name == NAMES["S5"] and rung_of(trial) > 6 and trial.seed < 2
        return made_up(variant, trial) | ({"validation_loss": math.nan, "failed": True} if lost else {})

    plans = [make_filled_plan("sgd_ladder", name, fill) for name in ("resnet", "mlp")]
    assert not any(plan.is_finished() or plan.to_run() for plan in plans)
    assert judge(*plans)["H5"].p is not None and not judge(*plans)["H5"].missing
    del plans[0].results.records[next(iter(plans[0].results.records))]
    assert judge(*plans)["H5"].missing == "resnet"  # a trial that can run is missing


def test_one_network_can_refute_a_statement_about_both_but_not_confirm_it() -> None:
    def pumping(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        best = 2 if variant.name == NAMES["S2n"] else 5
        return {
            "validation_loss": 1.5 + 0.1 * abs(rung_of(trial) - best),
            "failed": False,
            "frozen_steps": 60,
        }

    def level(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        return {**pumping(variant, trial), "frozen_steps": 0}

    (confirms, refutes), whole = (
        [make_filled_plan("sgd_ladder", "mlp", fill) for fill in (pumping, level)],
        make_filled_plan("sgd_ladder", "resnet", pumping),
    )
    found = judge(confirms)["H5"]
    assert (found.p, found.verdict, found.why) == (0.0, "undecided", "resnet not complete yet")
    assert judge(confirms, whole)["H5"].verdict == "holds"
    assert judge(refutes)["H5"].verdict == "does not hold"


def test_h7_cannot_hold_before_the_sgd_side_is_run() -> None:
    def fill(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        restarts = variant.name == "soft restart"
        octaves = math.log2(
            trial.lr / (0.001 if restarts else 0.0005) / (1 if trial.optimizer == "adamw" else 0.2)
        )
        return {"validation": 1.4 + 0.05 * octaves**2, "settled_alignment": 0.0}

    found = judge(make_filled_plan("pretrain", "ladder", fill))["H7"]
    assert (found.p, found.verdict, found.why) == (0.0, "undecided", "resnet, mlp not complete yet")


def test_a_draw_without_a_run_that_trained_has_its_knee_at_the_lowest_rung() -> None:
    def fill(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        trains = variant.name != NAMES["S2n"] or (rung_of(trial) < 0.5 and trial.seed == 0)
        failed = {"validation_loss": math.nan, "failed": True, "frozen_steps": 0}
        return made_up(variant, trial) if trains else failed

    plan = make_filled_plan("sgd_ladder", "mlp", fill)
    assert isinstance(plan, LadderPlan)
    knees = Network(plan, Draws()).knees["S2n"]
    assert knees[0] == pytest.approx(knee_of(figures_of(plan, "S2n"))) and knees[0] > LOWEST_LR_MLP
    # A draw leaves seed 0 out with probability (3/4)^4.
    assert (knees[1:] == LOWEST_LR_MLP).mean() == pytest.approx(0.75**4, abs=0.02)


def test_restarts_that_always_diverge_do_not_help() -> None:
    """Then their control cannot be run at all."""

    def fill(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        if variant.name == NAMES["S5"]:
            return {"validation_loss": math.nan, "failed": True, "frozen_steps": 0, "diverged": True}
        return made_up(variant, trial)

    plan = make_filled_plan("sgd_ladder", "mlp", fill)
    assert isinstance(plan, LadderPlan)
    network = Network(plan, Draws())
    assert not network.restarts_help().any() and network.octaves("S5", "S5c") == 0


def test_the_sgd_side_alone_can_refute_h7() -> None:
    plans = [make_filled_plan("sgd_ladder", name, made_up) for name in ("resnet", "mlp")]

    def no_gain(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        return {"validation_loss": 1.5 + 0.1 * abs(rung_of(trial) - 3), "failed": False, "frozen_steps": 0}

    assert judge(*plans)["H7"].verdict == "undecided" and judge(*plans)["H7"].missing == "first stage"
    refuted = judge(make_filled_plan("sgd_ladder", "mlp", no_gain))["H7"]
    assert (refuted.p, refuted.verdict, refuted.n) == (1.0, "does not hold", "4")


# ---------------------------------------------------------------------- the others


def gpt(lost: Callable[[str, int, int], bool]) -> list[Plan]:
    """Return the first stage and its failures, with V4 and V9 like V1, of which some runs diverged."""

    def fill(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        rung = round(2 * math.log2(trial.lr * (1 if trial.optimizer == "adamw" else 5) / 0.00035))
        diverged = lost(variant.name, rung, trial.seed)
        loss = 1.4 + 0.02 * (rung - 4) ** 2 + 0.001 * (trial.seed % 3)
        return {"validation": math.nan if diverged else loss, "failed": diverged, "settled_alignment": 0.0}

    return [make_filled_plan("pretrain", name, fill) for name in ("ladder", "failures")]


@pytest.mark.parametrize("source", ["AdaTAMW per tensor", "soft restart"])
@pytest.mark.parametrize("first_lost", [0, 8, 11])
def test_controls_that_cannot_be_run_stop_no_verdict(source: str, first_lost: int) -> None:
    """Their sources have diverged at the upper rungs, or at all."""
    plans = gpt(lambda name, rung, seed: name == source and rung >= first_lost and seed < 100)
    assert isinstance(plans[0], LadderPlan)
    stage = FirstStage(plans[0])
    assert len(stage.means("V1", "V4", "V6")[0]) == 12
    assert len(stage.means("V4", "V5")[0]) == (12 if source == "soft restart" else first_lost)
    found = judge(*plans)
    assert all(found[number].p is not None for number in ("H1", "H3", "H7"))
    assert found["H1"].verdict == "does not hold"  # V4 is V1, not shifted
    assert found["H7"].verdict == "does not hold"


def cold(variant: Variant, trial: TrialConfig) -> dict[str, float]:
    harm = {"AdaTAMW per tensor": 0.1, "d at most 1/2": 0.01}.get(variant.name, 0.0)
    lost = variant.name == "AdaTAMW per tensor" and trial.seed == 300
    return {"validation": math.nan if lost else 1.4 + harm + 0.001 * (trial.seed % 3), "failed": lost}


def test_a_diverged_run_counts_as_the_cap_without_a_ladder_too() -> None:
    """H4: the mean of V4 is that of eleven losses and of ln 256."""
    plan = make_filled_plan("pretrain", "warmup-0", cold)
    found = judge(plan)["H4"]
    losses = [math.log(256), *(1.5 + 0.001 * (seed % 3) for seed in range(301, 312))]
    controls = [1.4 + 0.001 * (seed % 3) for seed in range(301, 312)]  # one has no source
    assert found.figure.startswith(f"worse by {fmean(losses) - fmean(controls):+.3f}")
    assert found.n == "12" and found.verdict == "holds"


def test_h8_uses_the_registered_ladders_alone() -> None:
    def fill(variant: Variant, trial: TrialConfig) -> dict[str, float]:
        share = 1 if trial.optimizer == "adamw" else 5
        octaves = math.log2(share * trial.lr / 0.00198)
        return {"validation": 1.4 + 0.05 * octaves**2, "settled_alignment": -0.1 - 0.2 * max(0.0, octaves)}

    first = make_filled_plan("pretrain", "ladder", fill)
    other = make_filled_plan("pretrain", "quick", lambda v, t: {**fill(v, t), "settled_alignment": 0.9},
                             "quick")  # fmt: skip
    assert judge(first)["H8"] == judge(first, other)["H8"]
    assert judge(first)["H8"].verdict == "holds"
    assert judge(other)["H8"].verdict == "not tested"
