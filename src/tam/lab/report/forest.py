"""Forest plots: differences in units of their margin, one row per comparison, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from markupsafe import Markup

from tam.lab.report.render import render

Shape = Literal["square", "hollow", "triangle", "diamond"]
LIMIT = 5.0  # margins: what lies beyond is drawn as an arrow
LEFT, RIGHT, WIDTH = 312, 492, 760  # the plot and the picture, in pixels; the figures are on the right
MOST_LETTERS = 47  # that fit to the left of the plot; longer labels are squeezed
ROW, TOP = 34, 62
LEGEND: Mapping[Shape, str] = {
    "square": "equal effective lr", "hollow": "equal lr",
    "triangle": "against another seed's damping", "diamond": "the paper's figure",
}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """A difference and its interval, divided by the margin. One end can be infinite.

    There is no interval if neither end is finite: the spread is not known, or a test without an interval
    finds nothing.
    """

    shape: Shape
    x: float
    low: float = math.nan
    high: float = math.nan
    is_pilot: bool = False

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low) or math.isfinite(self.high)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval, or the mark twice."""
        return (min(self.x, self.low), max(self.x, self.high)) if self.has_interval else (self.x, self.x)


@dataclass(frozen=True)
class ForestRow:
    """One line of the plot: two lines of text, the marks, the figures and the verdict."""

    label: str
    detail: str
    marks: Sequence[Mark]
    text: str
    n: str = ""
    verdict: str = ""
    is_stand_in: bool = False


def forest_plot(
    rows: Sequence[ForestRow], title: str, description: str, hollow: str = LEGEND["hollow"]
) -> Markup:
    """Return the plot as an `<svg>` element. `hollow` says what a hollow square is."""
    rows = [replace(row, marks=[mark for mark in row.marks if math.isfinite(mark.x)]) for row in rows]
    shapes = {mark.shape for row in rows for mark in row.marks}
    texts: dict[Shape, str] = {**LEGEND, "hollow": hollow}
    legend = {shape: text for shape, text in texts.items() if shape in shapes}
    if any(mark.is_pilot for row in rows for mark in row.marks):
        legend["square"] += " (dashed: pilot runs)"
    bottom = TOP + ROW * len(rows)
    return render(
        "forest.svg.j2", rows=rows, title=title, description=description, legend=legend, position=_position,
        left=LEFT, right=RIGHT, width=WIDTH, top=TOP, row_height=ROW, bottom=bottom, limit=LIMIT,
        most_letters=MOST_LETTERS, height=bottom + 46 + 18 * len(legend),
    )  # fmt: skip


def _position(x: float) -> float:
    """Return the pixel of a difference in margins, clipped to the plot."""
    clipped = max(-LIMIT, min(LIMIT, x))
    return LEFT + (clipped + LIMIT) / (2 * LIMIT) * (RIGHT - LEFT)
