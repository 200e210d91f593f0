"""A verdict per claim, by the rule that registered.md fixes before the runs.

    evidence = load_evidence([Path("results")])
    rows = judge_claims(read_claims(CLAIMS)[0], evidence)

D is the difference that the claim is about, positive where it favours TAM, with a 95 % interval [L, U] by a
paired t-test. A superiority claim whose interval lies above 0 must also beat controls that have TAM's
schedule of d, but not its feedback. Holm's correction is applied once, over the claims that would be called
"holds".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tam.lab.core.plan import Outcome
from tam.lab.core.registry import get_experiment
from tam.lab.report.claims import Claim, Part
from tam.lab.report.evidence import Evidence
from tam.lab.report.outcomes import outcomes_by_seed
from tam.lab.report.statistics import (
    LEVEL,
    Estimate,
    compare_failures,
    compare_jumps,
    equivalence_p,
    estimate,
    holm,
    p_above,
)

HOLDS, SCHEDULE, FAILS = "holds", "holds as a schedule", "does not hold"
UNDECIDED, NOT_TESTED = "undecided", "not tested"
VERDICTS = (HOLDS, SCHEDULE, FAILS, UNDECIDED, NOT_TESTED)  # in the order of the table


@dataclass(frozen=True)
class PartResult:
    """What the runs say about one part of a claim."""

    part: Part
    verdict: str
    why: str
    estimate: Estimate | None = None  # of the fresh seeds, once there are n
    pilot: Estimate | None = None  # of stored runs: never part of a verdict
    equal_lr: Estimate | None = None  # at the same lr instead of the same effective lr
    controls: Mapping[str, Estimate] = field(default_factory=dict)  # TAM against each control
    p: float = math.nan  # of what is about to be called "holds"
    figure: str = ""  # of a part that is computed, not compared


@dataclass(frozen=True)
class Row:
    """A claim with its verdict."""

    claim: Claim
    verdict: str
    why: str
    parts: tuple[PartResult, ...]

    @property
    def deciding(self) -> PartResult | None:
        """The part that the verdict comes from: the first one with this verdict and a figure."""
        alike = [one for one in self.parts if one.verdict == self.verdict] or [*self.parts]
        return next((one for one in alike if one.estimate or one.pilot or one.figure), (*alike, None)[0])


def judge_claims(claims: Sequence[Claim], evidence: Evidence) -> list[Row]:
    """Return a row per claim, ordered by verdict and then as in the paper."""
    rows = [_combine(claim, [_judge(part, evidence) for part in claim.parts]) for claim in claims]
    adjusted = holm([max(one.p for one in row.parts) for row in rows if row.verdict == HOLDS])
    for i, row in enumerate(rows):
        if row.verdict == HOLDS and not adjusted.pop(0) <= LEVEL:
            rows[i] = replace(row, verdict=UNDECIDED, why="Not significant after Holm's correction")
    return sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), row.claim.number))


def _combine(claim: Claim, parts: Sequence[PartResult]) -> Row:
    """Return the verdict of a claim: it holds when all parts do, and fails when one part does."""
    found = [one.verdict for one in parts]
    if not parts:
        return Row(claim, NOT_TESTED, claim.missing, ())
    verdict = UNDECIDED
    if FAILS in found:
        verdict = FAILS
    elif set(found) == {NOT_TESTED}:
        verdict = NOT_TESTED
    elif set(found) <= {HOLDS, SCHEDULE}:
        verdict = SCHEDULE if SCHEDULE in found else HOLDS
    row = Row(claim, verdict, "", tuple(parts))
    return replace(row, why=row.deciding.why if row.deciding else "Some parts have no runs yet")


def _judge(part: Part, evidence: Evidence) -> PartResult:
    if part.computed:
        experiment, _, name = part.computed.partition("/")
        is_true, figure, why = get_experiment(experiment).computed[name]()
        return PartResult(part, HOLDS if is_true else FAILS, why, figure=figure, p=0.0)
    if part.rule == "lr-ratio":
        return _judge_lr_ratio(part, evidence)
    return _judge_comparison(part, evidence)


def _judge_comparison(part: Part, evidence: Evidence) -> PartResult:
    outcomes = evidence.registered(part.study)
    pilots = evidence.pilot(part.pilot, part.study) if part.pilot else {}
    pilot_names = part.pilot_variant or part.variant, part.pilot_against or part.against
    place, _, names = part.equal_lr.partition("|")
    equal_lr = _compare(part, evidence.pilot(place, part.study), *names.split("|")) if place else None
    result = PartResult(part, UNDECIDED, "", pilot=_compare(part, pilots, *pilot_names), equal_lr=equal_lr)
    n = len(_common_seeds(outcomes, part.variant, part.against))
    if n < part.n:
        seeds = len(_common_seeds(pilots, *pilot_names))
        if n == seeds == 0:
            return replace(result, verdict=NOT_TESTED, why="No runs yet")
        pilots_only = f"Pilots only, {seeds} seed{'s' if seeds > 1 else ''}"
        return replace(result, why=f"{n} of {part.n} seeds run so far" if n else pilots_only)
    found = _compare(part, outcomes, part.variant, part.against)
    if found is None or found.n < part.n:
        count = 0 if found is None else found.n
        return replace(result, why=f"{count} of {part.n} seeds have this outcome")
    result = replace(result, estimate=found)
    if math.isnan(found.low):
        return replace(result, why="The spread is not known")
    if part.rule in ("superiority", "log-rank"):
        return _judge_superiority(result, found, outcomes, evidence.needed_controls(part))
    return RULES[part.rule](result, found)


def _common_seeds(outcomes: Mapping[str, Outcome], *names: str) -> set[int]:
    """Return the seeds that all of these variants have finished. An empty name is none."""
    seeds = [set(outcomes[name].records) if name in outcomes else set() for name in names if name]
    return set.intersection(*seeds) if seeds else set()


def _judge_superiority(
    result: PartResult, found: Estimate, outcomes: Mapping[str, Outcome], needed_controls: Sequence[str]
) -> PartResult:
    """Judge a superiority claim. A control counts if it has all seeds but those whose source diverged."""
    part = result.part
    other = part.against.partition(",")[0].split(" at ")[0].split(" warm-up")[0]
    seeds = part.n - outcomes[part.variant].diverged
    differences = {name: _compare(part, outcomes, part.variant, name) for name in needed_controls}
    controls = {name: one for name, one in differences.items() if one is not None and one.n >= seeds}
    result = replace(result, controls=controls)
    if not found.low > 0:
        if found.high < part.margin:
            why = f"Any gain is below the margin, {part.margin:g}"
            if found.high < 0:
                why = f"Worse than {other} at equal effective lr"
            return replace(result, verdict=FAILS, why=why)
        return replace(result, why=f"Interval too wide at n = {found.n}")
    if not part.gate:
        return replace(result, verdict=HOLDS, why=f"Better than {other}", p=found.p)
    if len(controls) < len(needed_controls):
        return replace(result, why="Better, but controls are not run")
    if all(one.low > 0 for one in controls.values()):
        p = max([found.p, *(one.p for one in controls.values())])
        return replace(result, verdict=HOLDS, why=f"Better than {other} and all controls", p=p)
    for name in controls:
        control = _compare(part, outcomes, name, part.against)
        if control is not None and control.low > 0:
            kind = "Another seed's" if "another" in name else "Constant"
            return replace(result, verdict=SCHEDULE, why=f"{kind} damping gives the same gain")
    return replace(result, why="Not better than its controls")


def _judge_equality(result: PartResult, found: Estimate) -> PartResult:
    margin = result.part.margin
    if -margin <= found.low and found.high <= margin:
        return replace(result, verdict=HOLDS, why=f"Within {margin:g}", p=equivalence_p(found, margin))
    if found.low > margin or found.high < -margin:
        why = f"Differs by more than {margin:g}"
        if result.part.rule == "target":
            is_below = (found.low > margin) == result.part.measure.lower
            why = f"{'Below' if is_below else 'Above'} {result.part.target:g} by more than {margin:g}"
        return replace(result, verdict=FAILS, why=why)
    return replace(result, why=f"Interval too wide at n = {found.n}")


def _judge_no_worse(result: PartResult, found: Estimate) -> PartResult:
    margin = result.part.margin
    if found.low >= -margin:
        return replace(result, verdict=HOLDS, why=f"Worse by at most {margin:g}", p=p_above(found, -margin))
    if found.high < -margin:
        return replace(result, verdict=FAILS, why=f"Worse by more than {margin:g}")
    return replace(result, why=f"Interval too wide at n = {found.n}")


def _judge_sign(result: PartResult, found: Estimate) -> PartResult:
    if found.low > 0:
        return replace(result, verdict=HOLDS, why="The sign is as claimed", p=found.p)
    if found.high < 0:
        return replace(result, verdict=FAILS, why="The sign is the other one")
    return replace(result, why="The sign is not clear")


RULES: Mapping[str, Callable[[PartResult, Estimate], PartResult]] = {
    "equality": _judge_equality,
    "target": _judge_equality,
    "no-worse": _judge_no_worse,
    "sign": _judge_sign,
}


def _compare(part: Part, outcomes: Mapping[str, Outcome], variant: str, against: str = "") -> Estimate | None:
    """Return the estimate of a part's difference between two variants, or from its target."""
    if variant not in outcomes or (against and against not in outcomes):
        return None
    measure = part.measure
    compared = [outcomes[name].records for name in filter(None, (variant, against))]
    worst = math.nan
    if measure.chance is None and any(one.diverged for records in compared for one in records.values()):
        every = [one for outcome in outcomes.values() for one in outcome.records.values() if not one.diverged]
        values = [value for value in map(measure.of, every) if math.isfinite(value)]
        worst = (max if measure.lower else min)(values, default=math.nan)
    ours, *theirs = (outcomes_by_seed(records, measure, worst) for records in compared)
    if not theirs:
        return estimate(ours, part.target, measure.lower)
    if measure.jump:
        last = max((len(record.metrics) for records in compared for record in records.values()), default=0)
        return compare_jumps(ours, theirs[0], last)
    found = estimate(ours, theirs[0], measure.lower)
    if found is None:
        return None
    failures, mcnemar = compare_failures(*compared)
    return replace(found, failures=failures, mcnemar=mcnemar)


def _judge_lr_ratio(part: Part, evidence: Evidence) -> PartResult:
    """Count the stored grids in which the best lr of TAM is the target times SGDM's. It is exploratory."""
    ratios, at_edges = [], 0
    for plan in evidence.plans_of(part.pilots):
        names = [variant.name for variant in plan.study.variants]
        if part.variant in names and part.against in names:
            lrs = [plan.selected_lr(plan.study.variant(name)) for name in (part.variant, part.against)]
            if lrs[0] is not None and lrs[1] is not None:
                ratios.append(lrs[0][0] / lrs[1][0])
                at_edges += lrs[0][1] and lrs[1][1]
    if not ratios:
        return PartResult(part, NOT_TESTED, "No runs yet")
    alike = sum(math.isclose(ratio, part.target, rel_tol=1e-6) for ratio in ratios)
    figure = f"in {alike} of {len(ratios)} grids; both best at an edge of the grid in {at_edges}"
    return PartResult(part, UNDECIDED, "Pilots only", figure=figure)
