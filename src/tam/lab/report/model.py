"""What a page says, as data. `sections` builds it from results, and `render` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tam.lab.report.statistics import Estimate, Summary


@dataclass(frozen=True)
class TableData:
    """A table of text. The first column is left-aligned, and so are the others of a prose table."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_prose: bool = False
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page. Charts are shown in HTML only, facts are folded there."""

    title: str = ""
    anchor: str = ""  # with one, the table of contents lists the section
    notes: Sequence[str] = ()
    tables: Sequence[TableData] = ()
    paragraphs: Sequence[str] = ()
    charts: Sequence[str] = ()  # Markup; plain text is escaped
    undrawn: Sequence[str] = ()  # the runs that the curves leave out
    facts: Mapping[str, str] = field(default_factory=dict)  # settings and circumstances of the runs


@dataclass(frozen=True, kw_only=True)
class VariantSummary:
    """The figures of one variant in the table of its study."""

    name: str
    lr: float | None  # None while it is not selected
    effective_lr: float | None
    at_edge: bool  # the lr is at an edge of its grid
    n: int  # seeds with an outcome
    planned: int  # seeds
    finished: int
    diverged: int
    outcome: Summary | None
    test: Summary | None
    control_of: str | None
    compared_with: str  # "" for the baseline
    difference: Estimate | None
    paper: tuple[float, float | None] | None  # mean and standard deviation


@dataclass(frozen=True, kw_only=True)
class StudySection(Section):
    """The results of one study."""

    study: str
    outcome: str  # what is compared
    higher_is_better: bool
    variants: Sequence[VariantSummary]


@dataclass(frozen=True, kw_only=True)
class RungSummary:
    """The trials of a variant at one rung of a ladder."""

    effective_lr: float
    lr: float  # the variant's own
    loss: Summary | None  # of the finished trials, capped
    failed: int
    finished: int
    planned: int  # 0 if the stop rule leaves the rung out


@dataclass(frozen=True)
class Sensitivity:
    """The learning rate sensitivity in a window of effective lrs."""

    value: float
    window: tuple[float, float]
    rungs: int  # of the variant in the window
    expected: int  # rungs, had the variant one at every place


@dataclass(frozen=True, kw_only=True)
class LadderRow:
    """The figures of one variant of a ladder. Learning rates are effective ones."""

    name: str
    best_lr: float | None  # None: no trial is finished
    best_loss: Summary | None
    at_edge: bool  # the best rung is the lowest or highest one
    lower_knee: float | None  # None: outside of the rungs
    upper_knee: float | None
    octaves: float | None  # between the knees
    sensitivity: Sensitivity | None
    shifted_sensitivity: Sensitivity | None  # in the window moved by the ratio of the best lrs
    missing: int  # trials that are planned and have no result
    planned: int
    rungs: Sequence[RungSummary]


@dataclass(frozen=True, kw_only=True)
class LadderSection(StudySection):
    """The results of a ladder. `variants` has the figures of each one at its best rung."""

    ladder: Sequence[LadderRow]


@dataclass(frozen=True)
class PresetSection:
    """What was run of a preset."""

    experiment: str
    preset: str
    studies: Sequence[StudySection]
    facts: Mapping[str, str]  # that hold for all studies; empty if an earlier preset has the same ones


@dataclass(frozen=True)
class Tally:
    """How often TAM or AdaTAM differs from what it is compared with, at an equal effective lr."""

    ahead: int
    behind: int
    unclear: int  # the interval includes 0

    @property
    def total(self) -> int:
        return self.ahead + self.behind + self.unclear


@dataclass(frozen=True)
class Report:
    """The report of a results folder. The answer is two sentences and a forest plot."""

    title: str
    answer: Sequence[str]
    tally: Tally
    forest: str  # Markup; "" if nothing was compared
    notes: Sequence[str]
    presets: Sequence[PresetSection]

    @property
    def sections(self) -> list[StudySection]:
        return [section for preset in self.presets for section in preset.studies]
