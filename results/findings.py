"""Write docs/results/: claims, findings.md and when-to-use.md, computed from the packed results."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.runner import finished_trials
from tam.lab.report.claim_pages import (
    build_pages,
    format_estimate,
    format_part,
    headline,
    judged_hypotheses,
    table_rows,
)
from tam.lab.report.claims import paper_claims, read_claims
from tam.lab.report.comparisons import StudyResults
from tam.lab.report.evidence import Evidence, load_evidence
from tam.lab.report.ladder_charts import loss_chart
from tam.lab.report.render import render_svg
from tam.lab.report.statistics import Estimate
from tam.lab.report.verdicts import PartResult, judge_claims

RESULTS = Path(__file__).parent
DOCS = RESULTS.parent / "docs" / "results"


def build() -> dict[Path, str]:
    """Return the content of every file."""
    claims, picture = read_claims(paper_claims())
    evidence = load_evidence([RESULTS])
    rows = judge_claims(claims, evidence)
    pages = build_pages(rows, evidence, picture, DOCS / "claims")
    parts = {(row.claim.number, one.part.label): one for row in rows for one in row.parts}

    def part(number: int, label: str) -> str:
        return format_part(parts[number, label]) or "not run"

    def control(number: int, label: str) -> str:
        return text(parts[number, label], next(iter(parts[number, label].controls.values()), None))

    def equal_lr(number: int, label: str) -> str:
        return text(parts[number, label], parts[number, label].equal_lr)

    def text(result: PartResult, found: Estimate | None) -> str:
        return "not run" if found is None else format_estimate(result.part, found)

    def results_of(source: str) -> StudyResults:
        experiment, preset, study = source.split("/")
        return StudyResults(evidence.plans[experiment, preset, study])

    def difference(source: str, variant: str, other: str) -> str:
        results = results_of(source)
        found = results.difference(variant, other)
        return "not run" if found is None else found.format(results.study.digits)

    def outcome(source: str, variant: str) -> str:
        values = results_of(source).outcomes[variant].values(results_of(source).study.outcome)
        return f"{fmean(values.values()):.1f}"

    functions = {
        "difference": difference,
        "outcome": outcome,
        "part": part,
        "control": control,
        "equal_lr": equal_lr,
    }
    pretrain = [plan for (name, preset, _), plan in evidence.plans.items() if name == "pretrain"]
    context = {
        "headline": headline(rows),
        "rows": table_rows(rows, evidence, DOCS),
        "h": {one.number: one for one in judged_hypotheses(evidence)},
        "trials": len({record.key for plan in pretrain for record in finished_trials(plan).values()}),
        **functions,
    }
    environment = Environment(loader=FileSystemLoader(DOCS), undefined=StrictUndefined, trim_blocks=True)
    texts = {
        DOCS / name: environment.get_template(f"{name}.j2").render(context) + "\n"
        for name in ("findings.md", "when-to-use.md")
    }
    files = {DOCS / "claims" / name: content for name, content in pages.items() if name != "claims.html"}
    return {**files, **texts, DOCS / "claims" / "ladder.svg": ladder_picture(evidence)}


def ladder_picture(evidence: Evidence) -> str:
    """Return the losses of AdamW, AdaTAMW and the lowered schedule at every learning rate."""
    plan = evidence.plans["pretrain", "registered", "ladder"]
    assert isinstance(plan, LadderPlan)
    return render_svg(loss_chart(plan, ["AdamW", "AdaTAMW per tensor", "AdamW, lowered schedule"]))


def main() -> None:
    for path, content in build().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
