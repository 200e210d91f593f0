"""The comparisons of a study, and what the report says about them in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Study
from tam.lab.report import statistics as stats
from tam.lab.report.statistics import Difference, Pairs
from tam.step.rule import damping_of

REQUIRED_CONTROLS = {None, "shuffled", "mean"}  # kinds of damping: a variant helps if it beats all three
FINDINGS = {
    "equivalent": "equivalent within the margin", "undecided": "no significant difference",
    "better": "better here", "worse": "worse here",
}  # fmt: skip


@dataclass(frozen=True)
class StudyResults:
    """The outcomes and comparisons of a study, computed once."""

    plan: Plan
    outcomes: Mapping[str, Outcome]  # by variant
    duplicates: Mapping[str, str]  # variants whose trials are those of an earlier variant
    differences: Mapping[tuple[str, str, str], Difference]  # of all studies of the preset

    @property
    def study(self) -> Study:
        return self.plan.study

    def difference(self, variant: str, other: str) -> Difference | None:
        return self.differences.get((self.study.identity, variant, other))


def compare_studies(group: PresetGroup) -> list[StudyResults]:
    """Compare what was run of a preset. Comparisons that were not run count in Holm's correction."""
    outcomes = {
        plan.study.identity: {one.variant.name: one for one in plan.outcomes()} for plan in group.plans
    }
    family = {}
    for study in group.planned:
        by_variant = outcomes.get(study.identity, {})
        for name, other in study.comparisons():
            family[study.identity, name, other] = Pairs([])
            if name in by_variant and other in by_variant:
                values, others = (by_variant[one].values(study.outcome) for one in (name, other))
                differences = [value - others[seed] for seed, value in values.items() if seed in others]
                lost = by_variant[name].lost + by_variant[other].lost
                family[study.identity, name, other] = Pairs(differences, study.margin, study.higher, lost)
    results = stats.compare(family)
    return [
        StudyResults(plan, outcomes[plan.study.identity], plan.duplicates(), results) for plan in group.plans
    ]


def describe_comparisons(results: StudyResults) -> list[str]:
    """Return what is said about comparisons with the paper, variants and controls, and about the damping."""
    paper = results.study.choices.get("the paper says")
    further = [(variant.name, other) for variant in results.study.variants for other in variant.against]
    return [
        *([f"The paper says: {paper}"] if paper else []),
        *(f"{name}: the same runs as {other}, at the same lr." for name, other in results.duplicates.items()),
        *compare_with_paper(results),
        *(_describe_difference(results, name, other) for name, other in further),
        *compare_with_controls(results),
        *_describe_damping(results),
    ]


def _describe_difference(results: StudyResults, variant: str, other: str) -> str:
    difference, digits = results.difference(variant, other), results.study.digits
    if difference is None:
        return f"{variant} minus {other}: not run."
    middle = f"{variant} minus {other}: {difference.mean:+.{digits}f}"
    if not difference.verdict:
        return f"{middle}, {difference.explain_no_verdict()}."
    test = f"n = {difference.n}, p = {difference.p:.2g}: {difference.verdict}"
    return f"{middle} ({difference.format_interval(digits)}), {test}."


def compare_with_paper(results: StudyResults) -> list[str]:
    """Return whether the paper's differences are found here, those without a difference first."""
    baseline, papers, digits = results.study.baseline, results.study.paper, results.study.digits
    lines = []
    for name, (mean, _) in papers.items() if baseline in papers else ():
        difference = results.difference(name, baseline)
        if difference is None or not difference.verdict:
            continue
        in_paper = mean - papers[baseline][0]
        place = "within" if difference.low <= in_paper <= difference.high else "outside"
        line = (
            f"{name} minus {baseline}: {FINDINGS[difference.verdict]}: {difference.mean:+.{digits}f} "
            f"({difference.format_interval(digits)}), n = {difference.n}. "
            f"The paper's {in_paper:+.{digits}f} lies {place} the interval."
        )
        lines.append((list(FINDINGS).index(difference.verdict), line))
    return [line for _, line in sorted(lines)]


def compare_with_controls(results: StudyResults) -> list[str]:
    """Return the comparisons of variants with their controls, and whether each variant helps."""
    study, lines = results.study, []
    for source in dict.fromkeys(variant.control_of for variant in study.variants if variant.control_of):
        controls = [variant for variant in study.variants if variant.control_of == source]
        lines += [_describe_difference(results, source, control.name) for control in controls]
        lines += _explain_missing_seeds(results, source, [one.name for one in controls if one.damping])
        differences = [(one.damping, results.difference(source, one.name)) for one in controls]
        whole = [
            (damping, one) for damping, one in differences if one is not None and one.n == len(study.seeds)
        ]
        beaten = {damping for damping, difference in whole if difference.verdict == "better"}
        conclusion = "helps" if beaten >= REQUIRED_CONTROLS else "is not shown to help"
        if not {one.damping for one in controls} >= REQUIRED_CONTROLS:
            conclusion += " (not all of its controls are planned)"
        elif any(difference is None for _, difference in differences):
            conclusion += " (not all of its controls were run)"
        lines.append(
            f"{source} {conclusion}: it must be better than SGDM or Adam at its effective lr and than both "
            "damping controls, with all seeds."
        )
    return lines


def _explain_missing_seeds(results: StudyResults, source: str, controls: Sequence[str]) -> list[str]:
    """Say why controls have fewer seeds than the run whose d they take."""
    records = {name: outcome.records for name, outcome in results.outcomes.items()}
    diverged = [seed for seed, record in records[source].items() if record.diverged]
    affected = [name for name in controls if records[name] and not records[name].keys() & set(diverged)]
    if not diverged or not affected:
        return []
    seeds = ", ".join(map(str, diverged))
    return [f"{' and '.join(affected)}: no run with seed {seeds}, where {source} diverged and left no d."]


def _describe_damping(results: StudyResults) -> list[str]:
    """Return the mean s and d of each variant. With d = 1/2 and twice SGDM's lr, TAM equals SGDM."""
    means = []
    for name, outcome in results.outcomes.items():
        if not outcome.variant.control_of and name not in results.duplicates:  # d of a control is replaced
            rows = (row for record in outcome.records.values() for row in record.metrics)
            s = [row["alignment"] for row in rows if "alignment" in row]
            means += [f"{name} {fmean(s):+.3f} and {damping_of(fmean(s)):.3f}"] if s else []
    return [f"Mean s, and d = (1 + s) / 2: {'; '.join(means)}."] if means else []
