"""Charts from what trials leave beside their metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from tam.lab.charts import Series, line_chart
from tam.lab.damping import FILE, read_alignment
from tam.lab.experiment import Plan
from tam.lab.outcome import Outcome, outcomes
from tam.step.rule import damping_of

BINS = 60


def distribution(plan: Plan) -> list[str]:
    """How d is distributed over the steps of a run, all seeds together: of the whole run, and of its ends."""
    found = {outcome.arm.name: _alignments(outcome) for outcome in outcomes(plan) if not outcome.arm.damping}
    runs = {name: [*map(damping_of, alignments)] for name, alignments in found.items() if alignments}
    if not runs:
        return []
    low = min(float(d.min()) for ds in runs.values() for d in ds)
    high = max(float(d.max()) for ds in runs.values() for d in ds)
    shown = []
    for title, part in (
        ("the whole run", slice(None)),
        ("its first tenth", slice(0, 10)),
        ("its last tenth", slice(90, 100)),
    ):
        lines = []
        for name, ds in runs.items():
            d = torch.cat([_part(one, part) for one in ds])
            counts = torch.histc(d, BINS, low, high) / len(d)
            middles = [low + (high - low) * (i + 0.5) / BINS for i in range(BINS)]
            quantiles = torch.quantile(
                d.double()[:: max(1, len(d) // 100_000)], torch.tensor([0.05, 0.5, 0.95]).double()
            )
            told = ", ".join(f"{x:.3f}" for x in quantiles.tolist())
            lines.append(Series(f"{name}: 5, 50, 95% at {told}", middles, (100 * counts).tolist()))
        shown.append(
            line_chart(lines, f"Distribution of d over {title}", "d = (1 + s) / 2", "% of the steps")
        )
    return shown


def _part(d: Tensor, percent: slice) -> Tensor:
    if percent.stop is None:
        return d
    return d[len(d) * percent.start // 100 : max(1, len(d) * percent.stop // 100)]


def _alignments(outcome: Outcome) -> list[Tensor]:
    """s of every step, of each seed that has it."""
    paths = [folder.path / FILE for folder in outcome.folders.values()]
    found = [read_alignment(path) for path in paths if path.exists()]
    return [s.float() for s in found if bool(s.isfinite().all()) and len(s)]
