"""What an experiment is, and which trials it needs.

An experiment has studies (CIFAR-10 with ResNet18 is one): a workload and arms that are compared on it. Of
each arm the lr is chosen on the validation images with tuning seeds; the arms are then compared at those lrs
with other seeds, whose test images are read once, at the end.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from tam.lab.store import LabError, TrialFolder, key_of, read_result

Trial = dict[str, Any]  # a config: all that determines it


@dataclass(frozen=True)
class Arm:
    """What is compared: an optimizer with its options, and the learning rates it may choose from.

    A control has the lr of another arm, times `lr_ratio`; with `damping` its d is replaced by that arm's own,
    seed by seed: by their mean, or in shuffled order (`variants.controls` makes them), or by the d of that
    arm's run with the study's next seed, in order ("another", `variants.another_seeds_damping`).
    """

    name: str
    optimizer: str
    lrs: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the trial, where not the study's
    versus: str | None = None  # what it is compared with, where not the study's baseline; "": with nothing
    against: tuple[str, ...] = ()  # arms it is compared with besides
    control_of: str | None = None
    lr_ratio: float = 1.0
    damping: str | None = None


@dataclass(frozen=True)
class Study:
    """A workload and the arms compared on it."""

    name: str
    title: str
    workload: Mapping[str, Any]
    arms: tuple[Arm, ...]
    baseline: str  # the arm the others are compared with
    seeds: tuple[int, ...]  # of the comparison
    tuning_seeds: tuple[int, ...] = ()  # of the choice of lr; none are needed for a single lr
    extend: bool = False  # grids, until every arm's winner is inside
    paper: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)  # mean and spread, by arm
    outcome: str = "validation"  # what is compared, as a result calls it
    label: str = "validation %"
    higher: bool = True  # is better
    margin: float = 0.2  # differences within it matter to nobody
    digits: int = 2  # shown after the point
    test_label: str = "test %"
    choices: Mapping[str, str] = field(default_factory=dict)  # where not the experiment's
    controls: bool = True  # whether its arms can have some
    small: bool = False  # it shows that everything runs: choices of the real thing do not hold

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        named = {
            self.baseline,
            *(other for arm in self.arms for other in (arm.versus, *arm.against) if other),
        }
        if len(set(names)) < len(names) or not named <= set(names):
            raise ValueError(
                f"study {self.name}: arms must have names of their own, and be compared with such"
            )
        if set(self.seeds) & set(self.tuning_seeds) or not self.seeds:
            raise ValueError(f"study {self.name}: it needs seeds, and others to choose an lr with")
        for arm in self.arms:
            if (arm.control_of is None) != bool(arm.lrs) or (len(arm.lrs) > 1 and not self.tuning_seeds):
                raise ValueError(
                    f"study {self.name}, arm {arm.name}: an arm has lrs, a control none; to choose between "
                    "several takes tuning seeds"
                )

    @property
    def identity(self) -> str:
        """Its name and its workload: studies of one name may have been given other models, tasks or files."""
        return f"{self.name} {json.dumps(self.workload, sort_keys=True)}"

    def only(self, arms: Sequence[str], seeds: int | None, controls: bool = False) -> Study:
        """The study with some of its arms, those they need, their controls if asked, and its first seeds."""
        wanted = {self.arm(name).name for name in arms} or {arm.name for arm in self.arms}
        wanted |= {arm.control_of for arm in self.arms if arm.name in wanted and arm.control_of}
        wanted |= {arm.versus for arm in self.arms if arm.name in wanted and arm.versus}
        wanted |= {arm.name for arm in self.arms if controls and arm.control_of in arms}
        wanted.add(self.baseline)
        kept = tuple(
            replace(arm, against=tuple(name for name in arm.against if name in wanted))
            for arm in self.arms
            if arm.name in wanted
        )
        if seeds is not None and seeds > len(self.seeds):
            raise LabError(f"{self.name} has {len(self.seeds)} seeds, not {seeds}")
        return replace(self, arms=kept, seeds=self.seeds[:seeds])

    def trials(self) -> int:
        """How many there are at most, unless grids are extended; two arms may come to the same ones."""
        tuned = sum(len(arm.lrs) for arm in self.arms if len(arm.lrs) > 1)
        return tuned * len(self.tuning_seeds) + len(self.arms) * len(self.seeds)

    def arm(self, name: str) -> Arm:
        for arm in self.arms:
            if arm.name == name:
                return arm
        names = ", ".join(f'"{arm.name}"' for arm in self.arms)
        raise LabError(f'{self.name} has no arm "{name}"; it has {names}')

    def comparisons(self) -> list[tuple[str, str]]:
        """What is compared with what: arms with the baseline, and with each of their controls."""
        controls = [(arm.control_of, arm.name) for arm in self.arms if arm.control_of]
        others = [(arm.name, self.compared_with(arm)) for arm in self.arms if not arm.control_of]
        more = [(arm.name, other) for arm in self.arms for other in arm.against]
        return [*((name, other) for name, other in others if other), *more, *controls]

    def compared_with(self, arm: Arm) -> str:
        """The arm's own, else the baseline; nothing for the baseline itself."""
        if arm.versus is not None:
            return arm.versus
        return "" if arm.name == self.baseline or arm.control_of else self.baseline


@dataclass(frozen=True)
class Curve:
    """A chart of the report: a metric by epoch, or by step."""

    key: str
    title: str
    label: str
    log: bool = False
    by: str = "epoch"


@dataclass(frozen=True)
class Together:
    """Trials that run as one program: all of one kind."""

    run: Callable[..., Iterator[Any]]  # given configs, folders, data folder and device
    kind: Callable[[Trial], str]


Table = tuple[list[str], list[list[str]]]  # header and rows


@dataclass(frozen=True)
class Experiment:
    """A section of the paper."""

    name: str
    title: str
    run: Callable[..., Iterator[Any]]  # a trial, given config, folder, data folder and device
    config: Callable[..., Trial]  # a trial's config, checked
    presets: Mapping[str, tuple[Study, ...]]
    choices: Mapping[str, str]  # what the paper does not say, and what was chosen for which reason
    curves: tuple[Curve, ...]
    figures: Callable[[Plan], list[str]] | None = None  # charts besides, as HTML
    check: Callable[[Trial, Path], None] = lambda trial, data: None  # raises where data is missing
    ranks: bool = False  # a trial can run on all ranks of a torchrun job
    alone: bool = False  # trials measure time: none runs beside another
    gpu: bool = True  # presets but smoke are meant for one
    together: Together | None = None  # instead of `run`
    says: Callable[[Plan], list[str]] | None = None  # lines besides, of what was found
    tables: Callable[[Plan], list[Table]] | None = None  # besides, too


def experiments() -> dict[str, Experiment]:
    """Every module of tam.lab.experiments has one."""
    package = importlib.import_module("tam.lab.experiments")
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = {}
    for name in modules:
        try:
            module = importlib.import_module(f"tam.lab.experiments.{name}")
        except Exception as error:
            raise LabError(f"the experiment {name} cannot be loaded: {error!r}") from error
        if not isinstance(getattr(module, "EXPERIMENT", None), Experiment):
            raise LabError(f"{module.__file__} has no EXPERIMENT")
        found[module.EXPERIMENT.name] = module.EXPERIMENT
    return found


# ---------------------------------------------------------------------- which trials there are


HALF_DECADE = 10**0.5
EXTENSIONS = 4  # at most, on each side


def _extended(arm: Arm, low: int, high: int) -> list[float]:
    """An arm's grid with so many half decades more below and above."""
    lrs = sorted(arm.lrs)
    below = [lrs[0] / HALF_DECADE**i for i in range(low, 0, -1)]
    return below + lrs + [lrs[-1] * HALF_DECADE**i for i in range(1, high + 1)]


class Plan:
    """The trials of one study, as far as they are known from the results so far."""

    def __init__(
        self, experiment: Experiment, study: Study, root: Path, preset: str = "", whole: Study | None = None
    ) -> None:
        self.experiment, self.study, self.root, self.preset = experiment, study, root, preset
        self.whole = whole or study  # with the arms that were not asked for

    def trial(self, arm: Arm, lr: float, seed: int, *, test: bool, **more: Any) -> Trial:
        settings = {**self.study.workload, **arm.settings, **more}
        return self.experiment.config(
            optimizer=arm.optimizer, options=dict(arm.options), lr=lr, seed=seed, test=test, **settings
        )

    def result(self, trial: Trial) -> dict[str, Any] | None:
        return TrialFolder(self.root, trial).result

    # The choice of lr.

    def grid(self, arm: Arm) -> list[float]:
        """The learning rates of an arm, ascending; all grids are extended where a winner is at an edge."""
        if self.study.extend and len(arm.lrs) > 1:
            return _extended(arm, *self._extensions())
        return sorted(arm.lrs)

    def _extensions(self) -> tuple[int, int]:
        """How far all grids are extended below and above, given the results so far."""
        low = high = 0
        while True:
            winners = [self._winner(arm, _extended(arm, low, high)) for arm in self._tuned()]
            known = [winner for winner in winners if winner is not None]
            if len(known) < len(winners):
                return low, high  # these must be run first
            more = (
                low + any(place == 0 for place, _ in known),
                high + any(place == last for place, last in known),
            )
            if more == (low, high) or max(more) > EXTENSIONS:
                return low, high
            low, high = more

    def _tuned(self) -> list[Arm]:
        """The arms whose lr is to be chosen; grids are extended for all arms or none, asked for or not."""
        arms = self.whole.arms if self.study.extend else self.study.arms
        return [arm for arm in arms if arm.control_of is None and len(arm.lrs) > 1]

    def tuning(self, arm: Arm, lrs: Sequence[float]) -> list[Trial]:
        return [self.trial(arm, lr, seed, test=False) for lr in lrs for seed in self.study.tuning_seeds]

    def _winner(self, arm: Arm, lrs: Sequence[float]) -> tuple[int, int] | None:
        """The place of the best lr and the last place; None where trials are missing."""
        found = [self.tuned_to(arm, lr) for lr in lrs]
        scores = [score if self.study.higher else -score for score in found if score is not None]
        if len(scores) < len(lrs):
            return None
        return max(range(len(lrs)), key=scores.__getitem__), len(lrs) - 1

    def tuned_to(self, arm: Arm, lr: float) -> float | None:
        """The mean outcome of an lr over the tuning seeds, the worst where one diverged."""
        found = [self.result(trial) for trial in self.tuning(arm, [lr])]
        results = [result for result in found if result is not None]
        if not results or len(results) < len(found):
            return None
        if any(result["diverged"] for result in results):
            return float("-inf" if self.study.higher else "inf")
        return mean(float(result[self.study.outcome]) for result in results)

    def chosen(self, arm: Arm) -> tuple[float, bool] | None:
        """The lr of an arm and whether it is at an edge of its grid; None where that is not known yet."""
        if arm.control_of is not None:
            found = self.chosen(self.study.arm(arm.control_of))
            return None if found is None else (found[0] * arm.lr_ratio, False)
        lrs = self.grid(arm)
        if len(lrs) == 1:
            return lrs[0], False
        winner = self._winner(arm, lrs)
        if winner is None or not isfinite(self.tuned_to(arm, lrs[winner[0]]) or 0.0):
            return None  # not all are run, or all have diverged
        return lrs[winner[0]], winner[0] in (0, winner[1])

    # The comparison.

    def reported(self, arm: Arm) -> list[Trial] | None:
        """The trials of the comparison, one a seed; None where they are not known yet."""
        chosen = self.chosen(arm)
        if chosen is None:
            return None
        if arm.damping is None:
            return [self.trial(arm, chosen[0], seed, test=True) for seed in self.study.seeds]
        assert arm.control_of is not None
        source_arm = self.study.arm(arm.control_of)
        source_lr = self.chosen(source_arm)
        assert source_lr is not None  # it is known, or the control's would not be
        return [
            self.trial(arm, chosen[0], seed, test=True, damping=arm.damping,
                       damping_of=key_of(self.trial(source_arm, source_lr[0], source_seed, test=True)))
            for seed, source_seed in self._source_seeds(arm.damping)
        ]  # fmt: skip

    def _source_seeds(self, damping: str) -> list[tuple[int, int]]:
        """Return each seed and the seed whose d a control takes: its own, or the next of the whole study.

        The next one of the whole study, also where only some of its seeds are run: a control is one trial.
        """
        every = self.whole.seeds
        if damping != "another":
            return [(seed, seed) for seed in self.study.seeds]
        if len(every) < 2:
            raise LabError(f"{self.study.name} has one seed: a control needs another one's d")
        return [(seed, every[(every.index(seed) + 1) % len(every)]) for seed in self.study.seeds]

    def to_run(self) -> list[tuple[Arm, Trial]]:
        """The trials that can be run now and have no result; empty when the study is done."""
        tuning = [(arm, trial) for arm in self._tuned() for trial in self.tuning(arm, self.grid(arm))]
        wanted = [(arm, trial) for arm, trial in tuning if self.result(trial) is None]
        if wanted:  # no test image is read before every lr is chosen
            return wanted
        reported = [(arm, trial) for arm in self.study.arms for trial in self.reported(arm) or []]
        return [
            (arm, trial) for arm, trial in reported if self.result(trial) is None and self._has_source(trial)
        ]

    def _has_source(self, trial: Trial) -> bool:
        """Whether the trial whose d it takes, if any, is done; one that diverged has none to take."""
        key = trial.get("damping_of")
        if key is None:
            return True
        source = read_result(self.root / "trials" / str(key))
        return source is not None and not source["diverged"]
