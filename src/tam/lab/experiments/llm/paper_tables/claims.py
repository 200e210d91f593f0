"""What the paper says of its comparison on MTEB, compared with what its tables, or other rows, say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from tam.lab.experiments.llm.paper_tables import comparison
from tam.lab.experiments.llm.paper_tables.comparison import (
    SIMILAR,
    Improvement,
    Row,
    Share,
    family_of,
    percents,
)


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
    bound: Fraction
    is_excepted: Callable[[Share], bool]
    epochs: frozenset[int] = frozenset()  # of the settings it is about; none: all
    most: bool = False


HALF = Fraction(1, 2)
SHARE_CLAIMS = (
    ShareClaim(
        "Except for BERT models with 10 epochs and RoBERTa-large, AdaTAMW performs similar/better in "
        "majority of the datasets.", SIMILAR, HALF,
        lambda s: s.model == "RoBERTa-large" or (family_of(s.model) == "BERT" and s.epochs == 10),
    ),
    ShareClaim(
        "Except for the RoBERTa-large and BERT-base fine-tuned on 10 epochs, AdaTAMW generally matches or "
        "exceeds AdamW's performance in most settings.", SIMILAR, HALF,
        # RoBERTa-large with any epochs, as above: the words leave it open.
        lambda s: s.model == "RoBERTa-large" or (s.model == "BERT-base" and s.epochs == 10), most=True,
    ),
    ShareClaim(
        "[E]xcept for DeBERTa-base, AdaTAMW achieves higher scores on more than two-thirds of the MTEB "
        "datasets for in the 3- and 5-epoch settings.", "better", Fraction(2, 3),
        lambda s: s.model == "DeBERTa-base", epochs=frozenset({3, 5}),
    ),
    ShareClaim(
        "[Similar: less than 1%] Except for the BERT-base fine-tuned on 10 epochs, AdaTAMW generally matches "
        "or exceeds AdamW's performance in most settings.", "1", HALF,
        lambda s: s.model == "BERT-base" and s.epochs == 10, most=True,
    ),
)  # fmt: skip


def check_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the paper's claims, each compared with these rows."""
    improvements, shares = comparison.improvements(rows), comparison.shares(rows)
    settings = [_check_shares(claim, shares) for claim in SHARE_CLAIMS]
    return [_check_configurations(improvements), *settings, *_check_averages(improvements)]


def _check_configurations(improvements: Sequence[Improvement]) -> Claim:
    """Check the claim of 28 of 42 configurations as two in three, which works for any number of them."""
    families = {
        family: values for family, values in percents(improvements, lambda one: one.family).items() if values
    }
    needed = {family: math.ceil(Fraction(28, 42) * len(values)) for family, values in families.items()}
    similar = {
        family: n[SIMILAR] for family, n in comparison.counts(improvements).items() if family in families
    }
    agrees = all(n >= needed[family] for family, n in similar.items()) if similar else None
    parts = ", ".join(f"{family} {n} of {len(families[family])}" for family, n in similar.items()) or "none"
    if agrees is False:
        bound = max(-sorted(values)[-needed[family]] for family, values in families.items())
        parts += f"; it would hold from {math.ceil(100 * bound) / 100:g}% on"  # rounded up: there it holds
    return Claim(
        "Overall, AdaTAMW achieve similar or better performance than AdamW in at least 28 configurations "
        "across all three model types.",
        f"averages similar within {SIMILAR}% or better: {parts}",
        agrees,
    )


def _check_shares(claim: ShareClaim, every_share: Iterable[Share]) -> Claim:
    measured = [
        share for share in every_share if share.n and (not claim.epochs or share.epochs in claim.epochs)
    ]
    tested = [share for share in measured if not claim.is_excepted(share)]
    failed = [share for share in tested if share.counts[claim.kind] <= claim.bound * share.n]
    excepted = [share for share in measured if claim.is_excepted(share)]
    passes = len(tested) - len(failed)
    evidence = f"{comparison.describe_kind(claim.kind)} on more than {claim.bound} of the datasets"
    evidence += f" in {passes} of {len(tested)} settings"
    evidence += f"; not in {_list_shares(failed, claim.kind)}" if failed else ""
    evidence += f"; excepted: {_list_shares(excepted, claim.kind)}" if excepted else ""
    agrees = 2 * passes > len(tested) if claim.most else not failed
    return Claim(claim.words, evidence, agrees if tested else None)


def _list_shares(listed: Iterable[Share], kind: str) -> str:
    percents = ((share, comparison.format_percent(share.percent(kind), "{:.1f}")) for share in listed)
    return ", ".join(f"{share.model} with {share.epochs} epochs ({value}%)" for share, value in percents)


def _check_averages(improvements: Sequence[Improvement]) -> Iterator[Claim]:
    bert, roberta = ([one for one in improvements if one.family == name] for name in ("BERT", "RoBERTa"))
    words = "AdaTAMW shows the highest improvements over AdamW on DeBERTa models"
    yield _check_leaders(words, {"DeBERTa"}, [_means(improvements, lambda one: one.family)])
    every_epochs = sorted({one.epochs for one in improvements})
    yield _check_leaders(
        f"{words} across configurations with varying numbers of epochs.",
        {f"DeBERTa with {epochs} epochs" for epochs in every_epochs},
        [_means((one for one in improvements if one.epochs == n), _family_and_epochs) for n in every_epochs],
    )
    words = "[R]esults for RoBERTa are more mixed, with the most significant improvements observed in "
    yield _check_leaders(
        f"{words}Retrieval tasks.", {"Retrieval"}, [_means(roberta, lambda one: one.category)]
    )
    yield _check_leaders(
        "For BERT models, while AdaTAMW generally delivers similar or better average scores, the most "
        "notable gains occur in the 3 and 5 epoch settings.",
        {"BERT with 3 epochs", "BERT with 5 epochs"},
        [_means(bert, _family_and_epochs)],
    )
    models = _means(improvements, lambda one: one.model)
    yield _check_leaders(
        "AdaTAMW yields larger improvements for BERT-large and DeBERTa-large models",
        {"BERT-large", "DeBERTa-large"},
        [{k: v for k, v in models.items() if family_of(k) == family} for family in ("BERT", "DeBERTa")],
    )
    yield _check_base_and_large(roberta)


def _family_and_epochs(one: Improvement) -> str:
    return f"{one.family} with {one.epochs} epochs"


def _means(improvements: Iterable[Improvement], key: Callable[[Improvement], str]) -> dict[str, Fraction]:
    groups = percents(improvements, key)
    return {name: sum(values, Fraction()) / len(values) for name, values in groups.items() if values}


def _check_leaders(words: str, leaders: set[str], groups: Iterable[Mapping[str, Fraction]]) -> Claim:
    """Check that in each group of means the leaders have the greatest. A group without others is skipped."""
    evidence, leads = [], []
    for means in groups:
        first = [mean for name, mean in means.items() if name in leaders]
        others = [mean for name, mean in means.items() if name not in leaders]
        if first and others:
            leads.append(min(first) > max(others))
            evidence.append(", ".join(f"{name} {float(mean):+.2f}%" for name, mean in means.items()))
    return Claim(words, f"on average {'; '.join(evidence) or 'none'}", all(leads) if leads else None)


def _check_base_and_large(improvements: Sequence[Improvement]) -> Claim:
    base, large = (
        {(one.category, one.epochs): one.percent for one in improvements if one.model == f"RoBERTa-{size}"}
        for size in ("base", "large")
    )
    pairs = [(base[key], large[key]) for key in base.keys() & large.keys()]
    complete_pairs = [(b, c) for b, c in pairs if b is not None and c is not None]
    higher = sum(b > c for b, c in complete_pairs)
    return Claim(
        "[B]ut it performance on RoBERTa-large is less consistent, where RoBERTa-base often outperforms it.",
        f"the improvement of RoBERTa-base is the larger in {higher} of {len(complete_pairs)} configurations",
        2 * higher > len(complete_pairs) if complete_pairs else None,
    )


def check_two_thirds() -> tuple[bool, str, str]:
    """Return whether the paper's own tables bear claim 10: higher scores on over two thirds of the datasets."""
    claim = next(one for one in SHARE_CLAIMS if one.kind == "better")
    shares = comparison.shares(comparison.read_rows(comparison.MTEB))
    tested = [one for one in shares if one.epochs in claim.epochs and not claim.is_excepted(one)]
    failed = [one for one in tested if one.counts[claim.kind] <= claim.bound * one.n]
    lowest = ", ".join(f"{float(one.percent(claim.kind) or 0):.0f}" for one in failed)
    reason = f"Not in {len(failed)} of {len(tested)} settings of its tables" if failed else "In all its tables"
    return not failed, f"{lowest} % in {len(failed)} of {len(tested)} settings", reason
