"""H1 to H8 of registered.md, decided from the stored runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from tam.lab.core.ladder import cap_loss, summarize
from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.plan import Plan
from tam.lab.core.study import Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.pretrain.registered import FIRST_STAGE, variants
from tam.lab.experiments.sgd_ladder.hypotheses import Network, both
from tam.lab.report.hypotheses import Array, Draws, Hypothesis, decide, draw_ladder, judge
from tam.lab.report.verdicts import FAILS, HOLDS

Plans = Mapping[tuple[str, str, str], Plan]  # by experiment, preset and study
EXPERIMENTS = ("pretrain", "sgd_ladder")  # whose runs decide
STATEMENTS = {
    number: Hypothesis(number=number, **texts)
    for number, texts in read_toml(Path(__file__).with_name("notes.toml"))["hypotheses"].items()
}
NAMES = {number: variant.name for number, variant in variants((1.0,)).items()}  # of V1, V2 ...
GAP, CLOSED = 0.02, 0.8  # H2
NO_GAP = "no gap"  # a verdict that only H2 can have
SCHEDULE, FAILURES = 0.01, 0.15  # H3
COLD = 0.03  # H4
EQUAL = 0.005  # H6
BAND = 0.04  # H8
ROUNDING = 1e-3  # relative: of learning rates that are rounded, and then converted


def judge_hypotheses(plans: Plans) -> list[Hypothesis]:
    """Return all hypotheses with their verdicts, given the plans with results."""
    # A control whose source diverged cannot be run, and nothing waits for it.
    complete = {
        (experiment, study): plan
        for (experiment, preset, study), plan in plans.items()
        if preset == "registered" and experiment in EXPERIMENTS and not plan.to_run()
    }
    ladders = {key: plan for key, plan in complete.items() if isinstance(plan, LadderPlan)}
    results = dict(STATEMENTS)
    first, failures = ladders.get(("pretrain", "ladder")), complete.get(("pretrain", "failures"))
    stage = None if first is None else FirstStage(first)
    if stage is not None:
        results |= {"H1": stage.shift(), "H2": stage.clipping()}
        if failures is not None:
            results["H3"] = stage.schedule(failures)
    if (best := complete.get(("pretrain", "best"))) is not None:
        results["H6"] = best_loss(best)
    if (cold := complete.get(("pretrain", "warmup-0"))) is not None:
        results["H4"] = cold_start(cold)
    sgd_plans = {name: ladders.get(("sgd_ladder", name)) for name in ("resnet", "mlp")}
    missing = [name for name, plan in sgd_plans.items() if plan is None]
    draws = Draws()
    sgd_side = [Network(plan, draws) for plan in sgd_plans.values() if plan is not None]
    if sgd_side:
        results["H5"] = replace(pumping(sgd_side), missing=", ".join(missing))
    if stage is not None or sgd_side:
        missing = ["first stage"] * (stage is None) + missing
        results["H7"] = replace(soft_restart(stage, sgd_side), missing=", ".join(missing))
    if own := [plan for (experiment, _), plan in ladders.items() if experiment == "pretrain"]:
        results["H8"] = instrument(own)
    return judge([results[number] for number in STATEMENTS])


class FirstStage:
    """The means of the first stage, as measured and in every draw."""

    def __init__(self, plan: LadderPlan) -> None:
        draws = Draws()
        self.n = str(len(plan.study.seeds))
        by_name = {one.name: one for one in plan.study.variants}
        self.drawn = {
            number: draw_ladder(plan.losses(by_name[name]), draws, plan.rules)
            for number, name in NAMES.items()
            if name in by_name
        }

    def knees(self, number: str) -> tuple[Array, Array]:
        return self.drawn[number].lower_knee, self.drawn[number].upper_knee

    def means(self, *numbers: str) -> tuple[Array, ...]:
        """Return the rungs that all these variants have, as AdamW's lrs, and the means of each there."""
        lrs = self.drawn["V1"].lrs
        places = []
        for number in numbers:  # those of others are a little off, by rounding
            own = self.drawn[number].lrs
            places.append(np.abs(np.log(own[:, None] / lrs)).argmin(1))
            assert np.allclose(own, lrs[places[-1]], rtol=ROUNDING)
        common = reduce(np.intersect1d, places)
        means = (
            self.drawn[number].means[:, np.searchsorted(own, common)]
            for number, own in zip(numbers, places, strict=True)
        )
        return lrs[common], *means

    def shift(self) -> Hypothesis:
        """H1: V4 is V1 at other learning rates, with the same width."""
        (low, high), (low4, high4) = self.knees("V1"), self.knees("V4")
        shift = np.sqrt(low4 / low * high4 / high)
        octaves = np.log2(high4 / low4) - np.log2(high / low)
        is_true = (shift >= 1.2) & (shift <= 1.8) & (np.abs(octaves) < 0.25)
        figure = (
            f"knees shifted by a factor of {_interval(shift)}; width {_interval(octaves, '+.2f')} octaves"
        )
        return decide(replace(STATEMENTS["H1"], figure=figure, n=self.n), is_true)

    def clipping(self) -> Hypothesis:
        """H2: clipping closes what AdaTAMW gains without it."""
        _, knee = self.knees("V1n")
        lrs, clipped, unclipped, unclipped4 = self.means("V1", "V1n", "V4n")
        gap = unclipped - unclipped4
        counts = (lrs <= 2 * knee[:, None]) & (gap > GAP)
        closed = (unclipped - clipped) / np.where(counts, gap, np.inf)
        is_true = np.asarray((~counts | (closed >= CLOSED)).all(1))
        largest = gap[0, lrs <= 2 * knee[0]].max()
        figure = f"AdaTAMW's largest gain without clipping, up to twice AdamW's knee: {largest:.3f} nats"
        one = replace(STATEMENTS["H2"], figure=figure, n=self.n)
        if not counts[0].any():
            return replace(one, verdict=NO_GAP, why=f"No gap above {GAP} to close")
        return decide(one, is_true)

    def schedule(self, failures: Plan) -> Hypothesis:
        """H3: a schedule without feedback does the same."""
        low, high = self.knees("V4")
        is_true, largest = np.ones(len(low), dtype=bool), {}
        for number in ("V5", "V6"):
            lrs, own, feedback = self.means(number, "V4")
            inside = (lrs > low[:, None]) & (lrs < high[:, None])
            is_true &= (~inside | (np.abs(own - feedback) < SCHEDULE)).all(1)
            largest[number] = max((own - feedback)[0, inside[0]], key=abs, default=math.nan)
        rates, draws = {}, Draws()
        for outcome in failures.outcomes():
            failed = [float(record.result["failed"]) for record in outcome.records.values()]
            rates[outcome.variant.name] = draws.means([failed])[:, 0]
        for number in ("V5", "V6"):
            is_true &= np.abs(rates[NAMES[number]] - rates[NAMES["V4"]]) < FAILURES
        failed_runs = ", ".join(f"{100 * rate[0]:.0f} %" for rate in rates.values())
        figure = (
            "loss minus AdaTAMW's, the largest between the knees: another seed's damping "
            f"{largest['V5']:+.3f}, lowered schedule {largest['V6']:+.3f} nats; failed runs of the three: "
            f"{failed_runs}"
        )
        return decide(replace(STATEMENTS["H3"], figure=figure, n=f"{self.n}, 32"), is_true)

    def soft_restart(self) -> Hypothesis:
        """H7 in the first stage."""
        octaves = np.log2(self.knees("V9")[1] / self.knees("V9c")[1])
        losses = (self.drawn[number].means[0].min(initial=math.inf) for number in ("V9", "V9c"))
        own, control = (f"{loss:.3f}" if math.isfinite(loss) else "not run" for loss in losses)
        figure = f"upper knee {_interval(octaves, '+.2f')} octaves; best loss {own} nats, control {control}"
        return decide(replace(STATEMENTS["H7"], figure=figure, n=self.n), octaves >= 0.25)


def best_loss(plan: Plan) -> Hypothesis:
    """H6: V4 and V1 at their best learning rates."""
    means = Draws().means(_capped_losses(plan, "V4", "V1"))
    difference = means[:, 0] - means[:, 1]
    figure = f"{_interval(difference, '+.4f')} nats"
    one = replace(STATEMENTS["H6"], figure=figure, n=str(len(plan.study.seeds)))
    return decide(one, np.abs(difference) < EQUAL)


def cold_start(plan: Plan) -> Hypothesis:
    """H4: without warm-up, d above 1/2 harms."""
    means = Draws().means(_capped_losses(plan, "V4", "V2", "V7"))
    harm, recovered = means[:, 0] - means[:, 1], means[:, 0] - means[:, 2]
    figure = f"worse by {_interval(harm, '+.3f')}, of which a cap recovers {_interval(recovered, '+.3f')}"
    one = replace(STATEMENTS["H4"], figure=figure, n=str(len(plan.study.seeds)))
    return decide(one, (harm > COLD) & (recovered >= CLOSED * harm))


def pumping(networks: Sequence[Network]) -> Hypothesis:
    """H5: a cosine that is averaged too briefly pumps, and a large gain freezes."""
    figure = "; ".join(
        f"{network.plan.study.name}: upper knee {network.octaves('S2n', 'S1n'):+.2f} octaves with smoothing "
        f"0.9, {network.octaves('S3n', 'S1n'):+.2f} with 0.99; with gain 5, runs frozen at the knee: "
        f"{' of '.join(map(str, network.frozen_runs))}"
        for network in networks
    )
    one = replace(STATEMENTS["H5"], figure=figure, n=str(len(networks[0].plan.study.seeds)))
    return decide(one, both([network.pumps() & network.frozen for network in networks]))


def soft_restart(stage: FirstStage | None, networks: Sequence[Network]) -> Hypothesis:
    """H7: soft restarts tolerate larger learning rates than a constant momentum, on both sides."""
    sides = [] if stage is None else [stage.soft_restart()]
    if networks:
        octaves = ", ".join(
            f"{network.plan.study.name} {network.octaves('S5', 'S5c'):+.2f}" for network in networks
        )
        figure, n = f"with SGD, upper knee: {octaves} octaves", str(len(networks[0].plan.study.seeds))
        one = replace(STATEMENTS["H7"], figure=figure, n=n)
        sides.append(decide(one, both([network.restarts_help() for network in networks])))
    figures, sizes = "; ".join(one.figure for one in sides), ", ".join(one.n for one in sides)
    return replace(sides[0], figure=figures, n=sizes, p=max(one.p for one in sides if one.p is not None))


class SettledAlignment(NamedTuple):
    """The settled s of a variant of a ladder, a mean over its seeds."""

    by_rung: list[float]
    best: int  # the rung with the lowest mean loss
    at_twice_knee: float  # interpolated at twice the upper knee

    @property
    def at_best(self) -> float:
        return self.by_rung[self.best]


def settled_alignment(plan: LadderPlan, variant: Variant) -> SettledAlignment:
    """Return the settled s. A knee, and twice the knee, above the rungs count as the last rung."""
    s = {
        plan.effective_lr(variant, lr): fmean(r.result["settled_alignment"] for r in records.values())
        for lr, records in plan.ladder(variant).items()
    }
    lrs, summary = sorted(s), summarize(plan.losses(variant), plan.rules.tolerance)
    by_rung, twice_knee = [s[lr] for lr in lrs], 2 * (summary.upper_knee or lrs[-1])
    at_twice_knee = float(np.interp(np.log(twice_knee), np.log(lrs), by_rung))
    return SettledAlignment(by_rung, lrs.index(summary.best_lr), at_twice_knee)


def instrument(plans: list[LadderPlan]) -> Hypothesis:
    """H8: s is in one band at the best rungs, and outside at twice the knees. Controls have others' s."""
    settled = [
        settled_alignment(plan, variant)
        for plan in plans
        for variant in plan.study.variants
        if variant.damping is None
    ]
    at_best, at_twice = [one.at_best for one in settled], [one.at_twice_knee for one in settled]
    middle = fmean(at_best)
    spread = max(abs(value - middle) for value in at_best)
    outside = [abs(value - middle) > BAND for value in at_twice]
    figure = (
        f"s at the best rung: {min(at_best):+.2f} to {max(at_best):+.2f}, mean {middle:+.2f}; at twice the "
        f"knee, more than {BAND} from that mean: {sum(outside)} of {len(outside)} variants"
    )
    holds = spread <= BAND and all(outside)
    why = "s differs between variants" if spread > BAND else "" if holds else "s does not leave the band"
    return replace(STATEMENTS["H8"], figure=figure, verdict=HOLDS if holds else FAILS, why=why)


def _capped_losses(plan: Plan, *numbers: str) -> list[list[float]]:
    """Return the losses of some variants. A diverged run counts as the cap, like in a ladder."""
    outcomes = {outcome.variant.name: outcome for outcome in plan.outcomes()}
    return [
        [
            cap_loss(math.nan if record.diverged else record.result["validation"], FIRST_STAGE.cap)
            for record in outcomes[NAMES[number]].records.values()
        ]
        for number in numbers
    ]


def _interval(values: Array, form: str = ".2f") -> str:
    """Return the measured value with the range of 95 % of the draws."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    measured: Any = values[0]
    return f"{measured:{form}} [{low:{form}}, {high:{form}}]"
