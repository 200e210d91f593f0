"""What the paper says of its comparison on MTEB, compared with what its tables, or other rows, say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from tam.lab.core.toml import read_toml
from tam.lab.experiments.llm.paper_tables import comparison
from tam.lab.experiments.llm.paper_tables.comparison import SIMILAR, Improvement, Measurement, Row, Share

PAPER = read_toml(Path(__file__).with_name("claims.toml"))
Conditions = Sequence[Mapping[str, object]]  # values of attributes; one of the mappings must fit


@dataclass(frozen=True)
class Claim:
    """What the paper says, what the rows say, and whether they agree. None: the rows cannot tell."""

    words: str
    evidence: str
    agrees: bool | None

    def __str__(self) -> str:
        verdict = {True: "Agrees", False: "Does not agree", None: "Cannot be decided"}[self.agrees]
        return f'"{self.words}" {verdict}: {self.evidence}.'


class ShareClaim(NamedTuple):
    """The claim that a share is above a bound in all settings but the excepted ones, or in most of them."""

    words: str
    kind: str
    bound: str
    excepted: Conditions
    epochs: Sequence[int] = ()  # of the settings it is about; none: all
    most: bool = False


class AverageClaim(NamedTuple):
    """The claim that the leaders have the greatest average improvements."""

    words: str
    name: str  # of what is averaged: a format string
    leaders: Conditions
    families: Sequence[str] = ()  # it is about; none: all
    within: str = ""  # compared only if this attribute is the same


def check_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the paper's claims, each compared with these rows."""
    improvements, shares = comparison.improvements(rows), comparison.shares(rows)
    return [
        _check_configurations(improvements),
        *(_check_shares(ShareClaim(**claim), shares) for claim in PAPER["shares"]),
        *(_check_averages(AverageClaim(**claim), improvements) for claim in PAPER["averages"]),
        _check_base_and_large(improvements),
    ]


def _check_configurations(improvements: Sequence[Improvement]) -> Claim:
    """Check the claim of 28 of 42 configurations as two in three, which works for any number of them."""
    every_family = comparison.percents(improvements, attrgetter("family")).items()
    families = {family: values for family, values in every_family if values}
    needed = {family: math.ceil(Fraction(28, 42) * len(values)) for family, values in families.items()}
    counts = comparison.counts(improvements)
    similar = {family: counts[family][SIMILAR] for family in families}
    agrees = all(n >= needed[family] for family, n in similar.items()) if similar else None
    parts = ", ".join(f"{family} {n} of {len(families[family])}" for family, n in similar.items()) or "none"
    if agrees is False:
        bound = max(-sorted(values)[-needed[family]] for family, values in families.items())
        parts += f"; it would hold from {math.ceil(100 * bound) / 100:g}% on"  # rounded up: there it holds
    return Claim(PAPER["configurations"], f"averages similar within {SIMILAR}% or better: {parts}", agrees)


def _test_shares(claim: ShareClaim, shares: Iterable[Share]) -> tuple[list[Share], list[Share], list[Share]]:
    """Return the settings that a claim is about, those of them where it fails, and its exceptions."""
    measured = [one for one in shares if one.n and (not claim.epochs or one.epochs in claim.epochs)]
    tested = [share for share in measured if not _fits(share, claim.excepted)]
    failed = [share for share in tested if share.counts[claim.kind] <= Fraction(claim.bound) * share.n]
    return tested, failed, [share for share in measured if _fits(share, claim.excepted)]


def _check_shares(claim: ShareClaim, shares: Iterable[Share]) -> Claim:
    tested, failed, excepted = _test_shares(claim, shares)
    passes = len(tested) - len(failed)
    evidence = f"{comparison.describe_kind(claim.kind)} on more than {claim.bound} of the datasets"
    evidence += f" in {passes} of {len(tested)} settings"
    evidence += f"; not in {_list_shares(failed, claim.kind)}" if failed else ""
    evidence += f"; excepted: {_list_shares(excepted, claim.kind)}" if excepted else ""
    agrees = 2 * passes > len(tested) if claim.most else not failed
    return Claim(claim.words, evidence, agrees if tested else None)


def _fits(one: Measurement, conditions: Conditions) -> bool:
    return any(all(getattr(one, key) == value for key, value in each.items()) for each in conditions)


def _list_shares(listed: Iterable[Share], kind: str) -> str:
    percents = ((share, comparison.format_percent(share.percent(kind), "{:.1f}")) for share in listed)
    return ", ".join(f"{share.model} with {share.epochs} epochs ({value}%)" for share, value in percents)


def _check_averages(claim: AverageClaim, improvements: Iterable[Improvement]) -> Claim:
    """Check that the leaders have the greatest means. A group without others is skipped."""
    about = [one for one in improvements if not claim.families or one.family in claim.families]
    groups = comparison.group_by(about, attrgetter(claim.within) if claim.within else lambda one: "")
    evidence, leads = [], []
    for _, group in sorted(groups.items()):
        percents = comparison.percents(group, claim.name.format).items()
        means = {name: sum(values, Fraction()) / len(values) for name, values in percents if values}
        leaders = {claim.name.format(one) for one in group if _fits(one, claim.leaders)}
        first = [mean for name, mean in means.items() if name in leaders]
        others = [mean for name, mean in means.items() if name not in leaders]
        if first and others:
            leads.append(min(first) > max(others))
            evidence.append(", ".join(f"{name} {float(mean):+.2f}%" for name, mean in means.items()))
    return Claim(claim.words, f"on average {'; '.join(evidence) or 'none'}", all(leads) if leads else None)


def _check_base_and_large(improvements: Iterable[Improvement]) -> Claim:
    percents: dict[str, dict[tuple[str, int], Fraction]] = {"RoBERTa-base": {}, "RoBERTa-large": {}}
    for one in improvements:
        if one.model in percents and one.percent is not None:
            percents[one.model][one.category, one.epochs] = one.percent
    base, large = percents.values()
    both = base.keys() & large.keys()
    higher = sum(base[key] > large[key] for key in both)
    return Claim(
        PAPER["base_and_large"],
        f"the improvement of RoBERTa-base is the larger in {higher} of {len(both)} configurations",
        2 * higher > len(both) if both else None,
    )


def check_two_thirds() -> tuple[bool, str, str]:
    """Return whether the paper's tables bear claim 10: higher scores on over two thirds of the datasets."""
    claim = next(ShareClaim(**one) for one in PAPER["shares"] if one["kind"] == "better")
    tested, failed, _ = _test_shares(claim, comparison.shares(comparison.read_rows(comparison.MTEB)))
    figure = ", ".join(comparison.format_percent(one.percent(claim.kind), "{:.0f}") for one in failed)
    counts = f"{len(failed)} of {len(tested)} settings"
    return (
        not failed,
        f"{figure} % in {counts}" if failed else counts,
        f"Too few datasets in {counts}",
    )
