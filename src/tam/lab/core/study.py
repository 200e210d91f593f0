"""A study: a workload, and the variants that are compared on it.

The lr of each variant is selected with tuning seeds. The variants are then compared at those lrs with other
seeds, whose test data is read once, at the end. A ladder is a study that selects no lr: it runs all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from tam.lab.core.errors import LabError

HALF_DECADE = 10**0.5
MIN_RUNGS = 5  # of a ladder
SAME_FACTOR = 1e-3  # relative difference up to which two factors between rungs are the same


@dataclass(frozen=True)
class Variant:
    """What is compared: an optimizer with its options, and the learning rates to select from.

    A control (see `core.controls`) has the lr of another variant, times `lr_ratio`. With `damping`, the d of
    that variant replaces its own: constant at the run's mean ("mean"), in shuffled order ("shuffled"), or as
    the next seed of the study recorded it ("another").
    """

    name: str
    optimizer: str
    lrs: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the trial, instead of the study's
    versus: str | None = None  # what it is compared with, instead of the study's baseline; "": nothing
    against: tuple[str, ...] = ()  # further variants it is compared with
    control_of: str | None = None
    lr_ratio: float = 1.0
    damping: str | None = None


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    workload: Mapping[str, Any]
    variants: tuple[Variant, ...]
    baseline: str  # the variant the others are compared with
    seeds: tuple[int, ...]  # of the comparison
    tuning_seeds: tuple[int, ...] = ()  # of the selection of lrs; a single lr needs none
    former_tuning_seeds: int = 1  # so many of them had runs that did not store the number
    extend: bool = False  # extend the grids until every variant's winner is inside
    paper: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)  # mean, spread by variant
    outcome: str = "validation"  # the figure of a result that is compared
    label: str = "validation %"
    higher: bool = True  # is better
    margin: float = 0.2  # smaller differences do not matter
    digits: int = 2  # after the point
    test_label: str = "test %"
    choices: Mapping[str, str] = field(default_factory=dict)  # instead of the experiment's
    controls: bool = True  # whether its variants can have controls
    small: bool = False  # it only shows that everything runs

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        others = {name for variant in self.variants for name in (variant.versus, *variant.against) if name}
        unknown = ", ".join(sorted({self.baseline, *others} - set(names)))
        if len(set(names)) < len(names):
            raise ValueError(f"study {self.name}: two variants have the same name")
        if unknown:
            raise ValueError(f"study {self.name}: compares with unknown variants: {unknown}")
        if set(self.seeds) & set(self.tuning_seeds) or not self.seeds:
            raise ValueError(f"study {self.name}: needs seeds, and other seeds for tuning")
        for variant in self.variants:
            if (variant.control_of is None) != bool(variant.lrs):
                raise ValueError(f"study {self.name}: {variant.name} needs lrs, or none if it is a control")
        self._check_grids()

    def _check_grids(self) -> None:
        for variant in self.variants:
            if len(variant.lrs) > 1 and not self.tuning_seeds:
                raise ValueError(f"study {self.name}: {variant.name} has a grid, which needs tuning seeds")

    @property
    def identity(self) -> str:
        """The name and the workload: studies of one name can differ in model, tasks or files."""
        return f"{self.name} {json.dumps(self.workload, sort_keys=True)}"

    def only(self, names: Sequence[str], seeds: int | None, controls: bool = False) -> Study:
        """Return the study with these variants (and those they need), and with its first seeds only."""
        selected = {self.variant(name).name for name in names} or {variant.name for variant in self.variants}
        selected |= {one.control_of for one in self.variants if one.name in selected and one.control_of}
        selected |= {one.versus for one in self.variants if one.name in selected and one.versus}
        selected |= {one.name for one in self.variants if controls and one.control_of in names}
        selected.add(self.baseline)
        variants = tuple(
            replace(variant, against=tuple(name for name in variant.against if name in selected))
            for variant in self.variants
            if variant.name in selected
        )
        if seeds is not None and seeds > len(self.seeds):
            raise LabError(f"{self.name} has {len(self.seeds)} seeds, not {seeds}")
        return replace(self, variants=variants, seeds=self.seeds[:seeds])

    def trials(self) -> int:
        """Return the number of trials, at most, unless grids are extended. Two variants may share some."""
        tuned = sum(len(variant.lrs) for variant in self.variants if len(variant.lrs) > 1)
        return tuned * len(self.tuning_seeds) + len(self.variants) * len(self.seeds)

    def variant(self, name: str) -> Variant:
        for variant in self.variants:
            if variant.name == name:
                return variant
        names = ", ".join(f'"{variant.name}"' for variant in self.variants)
        raise LabError(f"{self.name} has no variant {json.dumps(name)}; it has {names}")

    def comparisons(self) -> list[tuple[str, str]]:
        """Return what is compared with what: variants with the baseline, others, and their controls."""
        first = [(one.name, self.compared_with(one)) for one in self.variants if not one.control_of]
        further = [(variant.name, other) for variant in self.variants for other in variant.against]
        with_controls = [(one.control_of, one.name) for one in self.variants if one.control_of]
        return [*((name, other) for name, other in first if other), *further, *with_controls]

    def compared_with(self, variant: Variant) -> str:
        """Return what a variant is compared with first; "" for the baseline itself and for controls."""
        if variant.versus is not None:
            return variant.versus
        return "" if variant.name == self.baseline or variant.control_of else self.baseline


@dataclass(frozen=True, kw_only=True)
class Ladder(Study):
    """A study that runs every variant at every lr of its grid with every seed: no lr is selected.

    `Variant.lrs` are the rungs, in the variant's own lr, a constant factor apart (see `rungs`). A control has
    the rungs of its source, times `lr_ratio`. The outcome is a validation loss, and no test data is read.
    """

    outcome: str = "validation_loss"
    label: str = "validation loss"
    higher: bool = False
    margin: float = 0.0
    digits: int = 3
    cap: float  # a loss that is larger or not finite counts as this one; ln 256 for bytes, for example
    tolerance: float = 0.02  # nats: the knees are where the mean loss crosses the best one plus this
    skip_above: bool = True  # leave out the rungs above two at which all seeds (at least 4) failed

    def _check_grids(self) -> None:
        if self.higher or self.tuning_seeds:
            raise ValueError(f"ladder {self.name}: lower must be better, and there can be no tuning seeds")
        if not (math.isfinite(self.cap) and math.isfinite(self.tolerance) and self.tolerance > 0):
            raise ValueError(f"ladder {self.name}: cap must be finite, and tolerance finite and positive")
        for variant in (one for one in self.variants if not one.control_of):
            lrs = sorted(variant.lrs)
            if len(lrs) < MIN_RUNGS:
                raise ValueError(
                    f"ladder {self.name}: {variant.name} must have at least {MIN_RUNGS} rungs, got {len(lrs)}"
                )
            factor = (lrs[-1] / lrs[0]) ** (1 / (len(lrs) - 1)) if lrs[0] > 0 else math.nan
            steps = [upper / lower for lower, upper in pairwise(lrs)] if lrs[0] > 0 else [math.nan]
            if not factor > 1 or not all(math.isclose(step, factor, rel_tol=SAME_FACTOR) for step in steps):
                raise ValueError(
                    f"ladder {self.name}: the rungs of {variant.name} must be positive and a constant factor "
                    f"apart, got {', '.join(f'{lr:g}' for lr in lrs)}"
                )

    def grid(self, variant: Variant) -> list[float]:
        """Return the rungs of a variant in its own lr, ascending. A control has those of its source."""
        if variant.control_of is None:
            return sorted(variant.lrs)
        return [lr * variant.lr_ratio for lr in self.grid(self.variant(variant.control_of))]

    def trials(self) -> int:
        return sum(len(self.grid(variant)) for variant in self.variants) * len(self.seeds)

    def comparisons(self) -> list[tuple[str, str]]:
        """Return nothing: a ladder compares no variants at one lr."""
        return []


def rungs(lowest: float, count: int, factor: float = 2**0.5) -> tuple[float, ...]:
    """Return learning rates a constant factor apart, rounded to 6 significant digits.

    >>> rungs(0.1, 5, 2)
    (0.1, 0.2, 0.4, 0.8, 1.6)
    """
    return tuple(float(f"{lowest * factor**i:.6g}") for i in range(count))


class Table(NamedTuple):
    """A table that a report shows of an experiment."""

    header: list[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Curve:
    """A chart of the report: a metric by epoch, or by the unit that `epochs` counts."""

    key: str
    title: str
    label: str
    log: bool = False
    by: str = "epoch"


@dataclass(frozen=True)
class Metric:
    """A metric that progress lines show."""

    key: str
    format: str = ".3f"
    higher_is_better: bool | None = None  # None: neither


@dataclass(frozen=True)
class Population:
    """Trials of one kind that train together in one program, instead of one by one."""

    run: Callable[..., Iterator[Any]]  # takes configs, folders, data folder, device and save_every
    kind: Callable[[Any], str]
    limit: Callable[[Any], int] | None = None  # the most trials of a config that train together; None: all
