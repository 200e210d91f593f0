"""The claim table and its pictures: verdicts as Markdown, HTML, JSON and SVG."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tam.lab.core.controls import settled_step
from tam.lab.core.plan import Plan
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import without_nan
from tam.lab.report import verdicts
from tam.lab.report.charts import Series, line_chart
from tam.lab.report.claims import Part
from tam.lab.report.evidence import Evidence
from tam.lab.report.forest import ForestRow, Mark, forest_plot
from tam.lab.report.hypotheses import Hypothesis
from tam.lab.report.model import TableData
from tam.lab.report.render import render, render_svg, render_text
from tam.lab.report.statistics import Estimate
from tam.lab.report.texts import TEXTS
from tam.lab.report.verdicts import PartResult, Row

PAPER = "https://arxiv.org/html/2412.18790v1"
DIGITS = {"points": 2, "ln": 4, "epochs": 1}
COUNTED = {  # of a verdict: one claim, several
    verdicts.HOLDS: ("holds", "hold"), verdicts.SCHEDULE: ("holds as a schedule", "hold as a schedule"),
    verdicts.FAILS: ("does not hold", "do not hold"), verdicts.UNDECIDED: ("is undecided", "are undecided"),
    verdicts.NOT_TESTED: ("is not tested", "are not tested"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row of the claim table."""

    number: int
    claim: str
    report: str  # the address of the section the figures come from; "": none
    section: str
    paper_link: str
    paper: str
    ours: str
    n: str
    verdict: str
    why: str
    stands_for: str


def headline(rows: Sequence[Row]) -> str:
    """Return the sentence with the counts. Stand-ins and our own claims do not count."""
    counts = Counter(row.verdict for row in rows if row.claim.counts)
    parts = [f"{counts[word]} {COUNTED[word][counts[word] != 1]}" for word in verdicts.VERDICTS]
    return f"Of {sum(counts.values())} claims, {', '.join(parts[:-1])}, and {parts[-1]}."


def judged_hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """Return the registered hypotheses of the experiments that were run, with their verdicts."""
    experiments = sorted({plan.experiment.name for plan in evidence.plans.values()})
    return [one for name in experiments for one in get_experiment(name).hypotheses(evidence.plans)]


def table_rows(rows: Sequence[Row], evidence: Evidence, folder: Path) -> list[TableRow]:
    """Return the table. Addresses are relative to the folder it is written to."""
    return [
        TableRow(
            number=row.claim.number, claim=row.claim.claim, report=_report_address(row, evidence, folder),
            section=row.claim.section, paper_link=f"{PAPER}#{row.claim.link}" if row.claim.link else "",
            paper=row.claim.paper, ours=format_part(row.deciding), n=_count(row.deciding),
            verdict=row.verdict, why=row.why, stands_for=row.claim.stands_for,
        )
        for row in rows
    ]  # fmt: skip


def _report_address(row: Row, evidence: Evidence, folder: Path) -> str:
    """Return the address of the report next to the results that the deciding part comes from."""
    part = row.deciding.part if row.deciding else None
    place = evidence.place_of(part) if part else None
    if place is None or not (place[0] / "report.md").exists():
        return ""
    path = os.path.relpath(place[0] / "report.md", folder).replace(os.sep, "/")
    return f"{path}#{place[1]}"


def format_part(result: PartResult | None) -> str:
    """Return the figure of a part with its interval: of the fresh seeds, or of the pilots until then."""
    if result is None:
        return ""
    shown = result.estimate or result.pilot
    text = result.figure if shown is None else format_estimate(result.part, shown)
    return f"{text} (pilot)" if shown is not None and result.estimate is None else text


def format_estimate(part: Part, found: Estimate) -> str:
    """Return a difference, or for a target the value itself, with the interval."""
    values = [found.mean, found.low, found.high]
    form = f"{{:+.{DIGITS.get(part.unit, 3)}f}}"
    if part.rule in ("target", "sign"):
        values = [part.target - value if part.measure.lower else part.target + value for value in values]
        values[1:] = sorted(values[1:])
        form = "{:.3f}"
    mean, low, high = (form.format(value) for value in values)
    unit = f" {part.unit}" if part.unit else ""
    if part.rule == "log-rank" and not math.isnan(found.p):  # a test that has no interval
        return f"{mean}{unit}, p = {found.p:.2g}"
    return f"{mean} [{low}, {high}]{unit}" if found.has_interval else f"{mean}{unit}"


def _count(result: PartResult | None) -> str:
    shown = result and (result.estimate or result.pilot)
    return str(shown.n) if shown else ""


def _describe_count(result: PartResult | None) -> str:
    is_pilot = result is not None and result.estimate is None
    return f"n = {_count(result)}{', pilot' if is_pilot else ''}" if _count(result) else ""


def forest_rows(rows: Sequence[Row]) -> list[ForestRow]:
    """Return the rows of the forest plot, in the order of the table."""
    return [
        ForestRow(
            label=f"{row.claim.number} {row.claim.claim}",
            detail=row.deciding.part.label if row.deciding else "",
            marks=_marks(row.deciding), text=format_part(row.deciding).removesuffix(" (pilot)"),
            n=_describe_count(row.deciding), verdict=row.verdict,
            is_stand_in=bool(row.claim.stands_for),
        )
        for row in rows
    ]  # fmt: skip


def _marks(result: PartResult | None) -> list[Mark]:
    if result is None or not result.part.margin:
        return []
    margin = result.part.margin
    another = next((one for name, one in result.controls.items() if "another" in name), None)
    shapes: list[tuple[Any, Estimate | None]] = [
        ("square", result.estimate or result.pilot), ("hollow", result.equal_lr), ("triangle", another),
    ]  # fmt: skip
    marks = []
    for shape, one in shapes:
        if one is not None:
            is_pilot = shape == "square" and result.estimate is None
            marks.append(Mark(shape, one.mean / margin, one.low / margin, one.high / margin, is_pilot))
    effect = result.part.effect
    return marks if effect is None else [*marks, Mark("diamond", effect / margin)]


def lr_chart(plan: Plan, variants: Sequence[str], titles: Sequence[str]) -> Markup:
    """Return the outcome against the lr, side by side: as it is set, and as an effective lr."""
    series: dict[str, list[Series]] = {"learning rate": [], "effective learning rate": []}
    for style, name in enumerate(variants):
        variant = plan.study.variant(name)
        lrs = plan.grid(variant)
        ratio = settled_step(variant.optimizer, variant.options) / settled_step("sgdm", {})
        scores = [plan.tuning_score(variant, lr) for lr in lrs]
        values = [math.nan if score is None else score for score in scores]
        for label, factor in zip(series, (1.0, ratio), strict=True):
            series[label].append(Series(name, [lr * factor for lr in lrs], values, style=style))
    panels = [
        line_chart(lines, title, label, plan.study.label, log_x=True)
        for title, (label, lines) in zip(titles, series.items(), strict=True)
    ]
    seeds = ", ".join(map(str, plan.study.tuning_seeds))
    caption = f"{plan.experiment.name}: {plan.study.title}. Pilot runs, tuning seed {seeds}."
    title = f"{plan.study.label} against the learning rate"
    return render("stacked.svg.j2", panels=panels, title=title, caption=caption)


def build_pages(
    rows: Sequence[Row], evidence: Evidence, picture: Mapping[str, Any], folder: Path
) -> dict[str, str]:
    """Return the content of every file, by name. Nothing is written here."""
    experiment, preset, study = str(picture.get("source", "//")).split("/")
    plan = evidence.plans.get((experiment, preset, study))
    table, sentence = table_rows(rows, evidence, folder), headline(rows)
    forest = forest_plot(forest_rows(rows), "Differences on the paper's claims", sentence)
    charts = {"forest.svg": forest}
    if plan is not None:
        charts["lr.svg"] = lr_chart(plan, picture["variants"], picture["titles"])
    shared = {"headline": sentence, "damaged": evidence.damaged}
    context: dict[str, Any] = {
        **shared,
        "rows": table,
        "charts": charts,
        "notes": TEXTS["claims"],
        "table": parts_table(rows),
        "controls": controls_table(rows),
        "hypotheses": judged_hypotheses(evidence),
    }
    details = {
        **shared,
        "claims": [_details(row) for row in rows],
        "hypotheses": [asdict(one) for one in context["hypotheses"]],
    }
    return {
        "claims.md": render_text("claims.md.j2", **context),
        "claims.html": render("claims.html.j2", title="The paper's claims", **context),
        "claims.json": json.dumps(without_nan(details), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        **{name: render_svg(chart) for name, chart in charts.items()},
    }


def parts_table(rows: Sequence[Row]) -> TableData:
    """Return every comparison behind the verdicts, with the tests that check the t-test."""
    header = [
        "#",
        "Part",
        "Verdict",
        "Ours (95 % interval)",
        "n",
        "Margin",
        "p (t)",
        "p (Wilcoxon)",
        "Diverged (p)",
    ]
    cells = []
    for row in rows:
        for one in row.parts:
            found = one.estimate or one.pilot
            if found is not None:
                p, signed_rank, mcnemar = (
                    "" if math.isnan(value) else f"{value:.2g}"
                    for value in (found.p, found.wilcoxon, found.mcnemar)
                )
                failures = " and ".join(map(str, found.failures)) if any(found.failures) else ""
                failures += f" ({mcnemar})" if mcnemar else ""
                margin = "" if one.part.rule in ("sign", "log-rank") else f"{one.part.margin:.3g}"
                figures = [format_part(one), str(found.n), margin, p, signed_rank, failures]
                cells.append([str(row.claim.number), one.part.label, one.verdict, *figures])
    return TableData(header, cells, is_prose=True)


def controls_table(rows: Sequence[Row]) -> TableData:
    """Return TAM against every control that was run for a part."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for one in row.parts:
            for name, found in one.controls.items():
                number, figure = str(row.claim.number), format_estimate(one.part, found)
                # Parts that differ only in what TAM is compared with share their controls.
                cells.setdefault((number, name, figure), [number, one.part.label, name, figure, str(found.n)])
    return TableData(
        ["#", "Part", "Control", "TAM minus control (95 % interval)", "n"], [*cells.values()], is_prose=True
    )


def _details(row: Row) -> dict[str, Any]:
    """Return everything known of a claim, for machines."""
    return {
        "number": row.claim.number, "claim": row.claim.claim, "stands_for": row.claim.stands_for,
        "counts": row.claim.counts, "section": row.claim.section, "paper": row.claim.paper,
        "verdict": row.verdict, "why": row.why, "ours": format_part(row.deciding),
        "parts": [
            {
                "label": one.part.label, "rule": one.part.rule, "variant": one.part.variant,
                "against": one.part.against, "margin": one.part.margin, "unit": one.part.unit,
                "registered_n": one.part.n, "verdict": one.verdict, "why": one.why,
                "text": format_part(one), "figure": one.figure, "p": one.p,
                **{key: None if value is None else asdict(value) for key, value in
                   (("estimate", one.estimate), ("pilot", one.pilot), ("equal_lr", one.equal_lr))},
                "controls": {name: asdict(value) for name, value in one.controls.items()},
            }
            for one in row.parts
        ],
    }  # fmt: skip
