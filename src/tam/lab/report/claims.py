"""The claims that `tam lab verdicts` judges, read from a TOML file and checked."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tam.lab.core.errors import LabError
from tam.lab.core.registry import EXPERIMENTS_PACKAGE, experiment_names, get_experiment
from tam.lab.core.toml import read_toml
from tam.lab.report.outcomes import Measure

GATED = ("superiority", "log-rank")
PAIRED = (*GATED, "equality", "no-worse")
COMPARED = (*PAIRED, "target", "sign")
RULES = (*COMPARED, "computed", "lr-ratio")
MAX_WORDS = 8  # of the reason next to a verdict


@dataclass(frozen=True, kw_only=True)
class Part:
    """One comparison that a claim rests on. The head of the claim file says what the fields mean."""

    rule: str
    label: str
    study: str = ""
    variant: str = ""
    against: str = ""
    controls: tuple[str, ...] = ()
    gate: bool = True  # whether a superiority claim must also beat its controls
    measure: Measure = field(default_factory=lambda: Measure(result=("validation",)))
    unit: str = ""
    margin: float = 0.0
    n: int = 0
    target: float = 0.0
    effect: float | None = None
    pilot: str = ""
    pilot_variant: str = ""
    pilot_against: str = ""
    pilots: tuple[str, ...] = ()
    equal_lr: str = ""
    computed: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is claimed, and where."""

    number: int
    claim: str
    section: str
    link: str
    paper: str
    stands_for: str = ""
    ours: bool = False
    missing: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it is one of the paper's own claims."""
        return not self.stands_for and not self.ours


def paper_claims() -> Path:
    """Return the file with the paper's claims."""
    package = importlib.util.find_spec(EXPERIMENTS_PACKAGE)
    assert package is not None and package.origin is not None
    return Path(package.origin).with_name("claims.toml")


def read_claims(path: Path) -> tuple[list[Claim], dict[str, Any]]:
    """Return the claims of a file, and what its picture shows. A LabError names what is wrong in it."""
    try:
        declared = read_toml(path)
        claims = [_read_claim(one) for one in declared["claim"]]
        picture = dict(declared.get("picture", {}))
        is_complete = {"source", "variants", "titles"} <= picture.keys()
        if picture and not (is_complete and str(picture["source"]).count("/") == 2):
            raise ValueError("picture needs source = EXPERIMENT/PRESET/STUDY, variants and titles")
        if not claims:
            raise ValueError("it has no claim")
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{path} is no valid claim file: {error}") from error
    return claims, picture


def _read_claim(declared: Mapping[str, Any]) -> Claim:
    place = f"claim {declared.get('number', '?')}"
    parts = tuple(_read_part(part, place) for part in declared.get("part", ()))
    values = {key: value for key, value in declared.items() if key != "part"}
    _check_types(Claim, values, place)
    claim = Claim(**values, parts=parts)
    if bool(parts) == bool(claim.missing):
        raise ValueError(f"{place}: needs parts, or a reason in `missing`")
    if len(claim.missing.split()) > MAX_WORDS:
        raise ValueError(f"{place}: `missing` has more than {MAX_WORDS} words")
    return claim


def _read_part(declared: Mapping[str, Any], place: str) -> Part:
    values = dict(declared)
    rule = values.get("rule")
    if rule not in RULES:
        raise ValueError(f"{place}: rule must be one of {', '.join(RULES)}, got {rule!r}")
    try:
        outcome = values.pop("outcome", {})
        measure = {"measure": Measure.from_toml(outcome)} if rule in COMPARED else {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error
    _check_types(Part, values, place)
    lists = {key: tuple(values.get(key, ())) for key in ("controls", "pilots")}
    part = Part(**{**values, **measure, **lists})
    _check_part(part, place)
    return part


def _check_part(part: Part, place: str) -> None:
    """Raise ValueError if a part cannot be judged, before any result is read."""
    if part.rule in COMPARED and (not part.margin > 0 or part.n < 2):
        raise ValueError(f"{place}: margin must be above 0 and n at least 2, got {part.margin} and {part.n}")
    if part.rule in PAIRED and not part.against:
        raise ValueError(f"{place}: the rule {part.rule} needs `against`")
    if part.rule in GATED and part.gate and not part.controls:
        raise ValueError(f"{place}: the rule {part.rule} needs controls, or gate = false")
    study, *names = part.equal_lr.split("|")
    pilots = [(one, 1) for one in part.pilots]
    forms = [(part.study, 1), (part.computed, 1), (part.pilot, 2), (study, 2), *pilots]
    for source, slashes in forms:
        if not source:
            continue
        if source.count("/") != slashes:
            raise ValueError(f"{place}: {source!r} must have {slashes + 1} parts")
        if source.partition("/")[0] not in experiment_names():
            raise ValueError(f"{place}: there is no experiment {source.partition('/')[0]!r}")
    if part.equal_lr and len(names) != 2:
        raise ValueError(f"{place}: equal_lr must be EXPERIMENT/PRESET/STUDY|VARIANT|AGAINST")
    experiment, _, name = part.computed.partition("/")
    if (part.rule == "computed") != bool(name) or (name and name not in get_experiment(experiment).computed):
        raise ValueError(f"{place}: nothing computes {part.computed!r}")


def _check_types(kind: type, values: Mapping[str, Any], place: str) -> None:
    """Raise ValueError if an entry is unknown or of a wrong type."""
    types = {one.name: str(one.type) for one in fields(kind)}
    for key, value in values.items():
        if key not in types:
            raise ValueError(f"{place}: unknown entry {key!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        is_valid = {
            "str": isinstance(value, str), "bool": isinstance(value, bool), "float": is_number,
            "float | None": is_number, "int": is_number and isinstance(value, int),
            "tuple[str, ...]": isinstance(value, list) and all(isinstance(one, str) for one in value),
        }.get(types[key], False)  # fmt: skip
        if not is_valid:
            raise ValueError(f"{place}: {key} cannot be {value!r}")
