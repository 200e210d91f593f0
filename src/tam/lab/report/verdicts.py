"""A verdict per claim, by the rule that docs/registered.md fixes before the runs.

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

HOLDS, SCHEDULE, FAILS = "holds", "holds as a schedule", "does not hold"
UNDECIDED, NOT_TESTED = "undecided", "not tested"
VERDICTS = (HOLDS, SCHEDULE, FAILS, UNDECIDED, NOT_TESTED)  # in the order of the table
LEVEL = 0.05


@dataclass(frozen=True)
class Estimate:
    """The mean of a difference with its 95 % interval. The interval is NaN if the spread is not known."""

    mean: float
    low: float
    high: float
    p: float
    n: int
    wilcoxon: float = math.nan  # p of the signed-rank test, as a check of the t-test
    failures: tuple[int, int] = (0, 0)  # diverged runs of the two variants
    mcnemar: float = math.nan  # exact p of a difference in failures


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
        alike = [one for one in self.parts if one.verdict == self.verdict]
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


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the adjusted p-values, in the same order. NaN counts as 1."""
    values = [1.0 if math.isnan(p) else p for p in p_values]
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, values[i] * (len(values) - rank)))
        adjusted[i] = largest
    return adjusted


def estimate(ours: Mapping[int, float], theirs: Mapping[int, float] | float, lower: bool) -> Estimate | None:
    """Return the mean difference by seed, positive where ours is better. None without two pairs.

    `theirs` can be one number: the value that ours is compared with.
    """
    from scipy.stats import ttest_rel, wilcoxon

    others = theirs if isinstance(theirs, Mapping) else dict.fromkeys(ours, theirs)
    seeds = sorted(ours.keys() & others.keys())
    a, b = ([values[seed] for seed in seeds] for values in ((others, ours) if lower else (ours, others)))
    if len(seeds) < 2 or not all(map(math.isfinite, a + b)):
        return None
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if max(differences) - min(differences) <= 1e-12 * max(map(abs, a + b)):  # no spread: nothing is known
        return Estimate(differences[0], math.nan, math.nan, math.nan, len(seeds))
    test = ttest_rel(a, b)
    interval = test.confidence_interval(1 - LEVEL)
    middle = math.fsum(differences) / len(differences)
    signed_rank = float(wilcoxon(differences).pvalue)
    low, high, p = float(interval.low), float(interval.high), float(test.pvalue)
    return Estimate(middle, low, high, p, len(seeds), signed_rank)


def compare_failures(ours: Outcome, theirs: Outcome) -> tuple[tuple[int, int], float]:
    """Return the numbers of diverged runs, and the exact p of McNemar's test on the common seeds."""
    from scipy.stats import binomtest

    seeds = ours.records.keys() & theirs.records.keys()
    pairs = [(ours.records[seed].diverged, theirs.records[seed].diverged) for seed in seeds]
    only_ours, only_theirs = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    discordant = only_ours + only_theirs
    p = float(binomtest(only_ours, discordant).pvalue) if discordant else math.nan
    return (sum(a for a, _ in pairs), sum(b for _, b in pairs)), p


def p_above(found: Estimate, bound: float) -> float:
    """Return p, two-sided, of a mean above this bound: at most 0.05 if the 95 % interval lies above it."""
    from scipy.stats import t as student

    error = (found.high - found.low) / 2 / float(student.ppf(1 - LEVEL / 2, found.n - 1))
    return min(1.0, 2 * float(student.sf((found.mean - bound) / error, found.n - 1)))


def equivalence_p(found: Estimate, margin: float) -> float:
    """Return p of two one-sided tests: at most 0.05 if the 95 % interval lies inside the margin."""
    mirrored = replace(found, mean=-found.mean)
    return max(p_above(found, -margin), p_above(mirrored, -margin))


def _judge(part: Part, evidence: Evidence) -> PartResult:
    if part.computed:
        experiment, _, name = part.computed.partition("/")
        is_true, figure, why = get_experiment(experiment).computed[name]()
        return PartResult(part, HOLDS if is_true else FAILS, why, figure=figure, p=0.0)
    if part.rule == "lr-ratio":
        return _judge_lr_ratio(part, evidence)
    return _judge_comparison(part, evidence)


def _judge_comparison(part: Part, evidence: Evidence) -> PartResult:
    found = _compare(part, evidence.registered(part.study), part.variant, part.against)
    pilot_names = part.pilot_variant or part.variant, part.pilot_against or part.against
    pilot = _compare(part, evidence.pilot(part.pilot, part.study), *pilot_names) if part.pilot else None
    place, _, names = part.equal_lr.partition("|")
    equal_lr = _compare(part, evidence.pilot(place, part.study), *names.split("|")) if place else None
    result = PartResult(part, UNDECIDED, "", pilot=pilot, equal_lr=equal_lr)
    n = len(_common_seeds(evidence.registered(part.study), [part.variant, *filter(None, [part.against])]))
    if n < part.n:
        pilots = evidence.pilot(part.pilot, part.study) if part.pilot else {}
        seeds = len(_common_seeds(pilots, [name for name in pilot_names if name]))
        if n == seeds == 0:
            return replace(result, verdict=NOT_TESTED, why="No runs yet")
        pilots_only = f"Pilots only, {seeds} seed{'s' if seeds > 1 else ''}"
        return replace(result, why=f"{n} of {part.n} seeds so far" if n else pilots_only)
    if found is None or math.isnan(found.low):
        return replace(result, why="The spread is not known", estimate=found)
    controls = {
        name: one
        for name in part.controls
        if (one := _compare(part, evidence.registered(part.study), part.variant, name)) is not None
    }
    result = replace(result, estimate=found, controls=controls)
    if part.rule in ("superiority", "log-rank"):
        return _judge_superiority(result, found, evidence)
    return RULES[part.rule](result, found)


def _common_seeds(outcomes: Mapping[str, Outcome], names: Sequence[str]) -> set[int]:
    """Return the seeds that all of these variants have finished."""
    seeds = [set(outcomes[name].records) if name in outcomes else set() for name in names]
    return set.intersection(*seeds) if seeds else set()


def _judge_superiority(result: PartResult, found: Estimate, evidence: Evidence) -> PartResult:
    part = result.part
    other = part.against.partition(",")[0].split(" at ")[0].split(" warm-up")[0]
    if not found.low > 0:
        if found.high < part.margin:
            worse = found.high < 0
            why = f"Worse than {other} at equal effective lr" if worse else f"Gain below {part.margin:g}"
            return replace(result, verdict=FAILS, why=why)
        return replace(result, why=f"Interval too wide at n = {found.n}")
    if not part.gate:
        return replace(result, verdict=HOLDS, why=f"Better than {other}", p=found.p)
    if len(result.controls) < len(evidence.needed_controls(part)):
        return replace(result, why="Better, but controls are not run")
    if all(one.low > 0 for one in result.controls.values()):
        p = max([found.p, *(one.p for one in result.controls.values())])
        return replace(result, verdict=HOLDS, why=f"Better than {other} and all controls", p=p)
    for name in part.controls:
        control = _compare(part, evidence.registered(part.study), name, part.against)
        if control is not None and control.low > 0:
            kind = "Another seed's" if "another" in name else "Constant"
            return replace(result, verdict=SCHEDULE, why=f"{kind} damping does it, too")
    return replace(result, why="Not better than its controls")


def _judge_equality(result: PartResult, found: Estimate) -> PartResult:
    margin = result.part.margin
    if -margin <= found.low and found.high <= margin:
        return replace(result, verdict=HOLDS, why=f"Within {margin:g}", p=equivalence_p(found, margin))
    if found.low > margin or found.high < -margin:
        return replace(result, verdict=FAILS, why=f"Differs by more than {margin:g}")
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
    values = [measure.of(record) for records in compared for record in records.values()]
    finite = [value for value in values if math.isfinite(value)]
    worst = (max if measure.lower else min)(finite, default=math.nan)
    ours, *theirs = (outcomes_by_seed(records, measure, worst) for records in compared)
    if not theirs:
        return estimate(ours, part.target, measure.lower)
    if measure.jump:
        last = max((len(record.metrics) for records in compared for record in records.values()), default=0)
        return _compare_jumps(ours, theirs[0], last)
    found = estimate(ours, theirs[0], measure.lower)
    if found is None:
        return None
    failures, mcnemar = compare_failures(outcomes[variant], outcomes[against])
    return replace(found, failures=failures, mcnemar=mcnemar)


def _compare_jumps(ours: Mapping[int, float], theirs: Mapping[int, float], last: int) -> Estimate | None:
    """Return the mean delay of the first jump, censored at the last epoch, with p of the log-rank test.

    The interval says what the test says: it excludes 0 if p is at most 0.05.
    """
    from scipy.stats import CensoredData, logrank

    if min(len(ours), len(theirs)) < 2:
        return None
    samples = [
        CensoredData(
            uncensored=[v for v in side.values() if math.isfinite(v)],
            right=[float(last)] * sum(math.isinf(v) for v in side.values()),
        )
        for side in (ours, theirs)
    ]
    delays = [min(ours[seed], last) - min(theirs[seed], last) for seed in ours.keys() & theirs.keys()]
    middle = math.fsum(delays) / len(delays)
    p = float(logrank(*samples).pvalue)
    low, high = (math.ulp(0.0), math.inf) if middle > 0 else (-math.inf, -math.ulp(0.0))
    if not p <= LEVEL:
        low, high = -math.inf, math.inf
    return Estimate(middle, low, high, p, len(delays))


def _judge_lr_ratio(part: Part, evidence: Evidence) -> PartResult:
    """Count the stored grids in which the best lr of TAM is the target times SGDM's. It is exploratory."""
    ratios = []
    for plan in evidence.plans_of(part.pilots):
        names = [variant.name for variant in plan.study.variants]
        if part.variant in names and part.against in names:
            lrs = [plan.selected_lr(plan.study.variant(name)) for name in (part.variant, part.against)]
            if lrs[0] is not None and lrs[1] is not None:
                ratios.append(lrs[0][0] / lrs[1][0])
    if not ratios:
        return PartResult(part, NOT_TESTED, "No runs yet")
    alike = sum(math.isclose(ratio, part.target, rel_tol=1e-6) for ratio in ratios)
    figure = f"{alike} of {len(ratios)} grids"
    return PartResult(part, UNDECIDED, "Pilots only, one tuning seed", figure=figure)
