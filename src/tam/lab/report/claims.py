"""The claims that `tam lab verdicts` judges, read from a TOML file and checked."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tam.lab.core.errors import LabError
from tam.lab.core.registry import EXPERIMENTS_PACKAGE, experiment_names
from tam.lab.core.toml import read_toml
from tam.lab.report.outcomes import Measure

COMPARED = ("superiority", "equality", "no-worse", "target", "sign", "log-rank")
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
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{path} is no valid claim file: {error}") from error
    return claims, picture


def _read_claim(declared: Mapping[str, Any]) -> Claim:
    place = f"claim {declared.get('number', '?')}"
    parts = tuple(_read_part(part, place) for part in declared.get("part", ()))
    values = {key: value for key, value in declared.items() if key != "part"}
    _check_names(Claim, values, place)
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
    if rule in COMPARED:
        try:
            values["measure"] = Measure.from_toml(values.pop("outcome", {}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place}: {error}") from error
    for key in ("controls", "pilots"):
        values[key] = tuple(values.get(key, ()))
    _check_names(Part, values, place)
    for key, kind in (("margin", (int, float)), ("target", (int, float)), ("n", int)):
        if not isinstance(values.get(key, 0), kind):
            raise ValueError(f"{place}: {key} must be a number, got {values[key]!r}")
    part = Part(**values)
    if rule in COMPARED and (not part.margin > 0 or part.n < 2):
        raise ValueError(f"{place}: margin must be above 0 and n at least 2, got {part.margin} and {part.n}")
    sources: Sequence[str] = [part.study, part.pilot, part.equal_lr, part.computed, *part.pilots]
    for source in filter(None, sources):
        if source.partition("/")[0] not in experiment_names():
            raise ValueError(f"{place}: there is no experiment {source.partition('/')[0]!r}")
    return part


def _check_names(kind: type, values: Mapping[str, Any], place: str) -> None:
    unknown = sorted(values.keys() - {one.name for one in fields(kind)})
    if unknown:
        raise ValueError(f"{place}: unknown entry {unknown[0]!r}")
