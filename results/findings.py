"""Write docs/claims/ and docs/findings.md from the packed results. Every number in them is computed here."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tam.lab.report.claim_pages import build_pages, format_estimate, format_part, headline, table_rows
from tam.lab.report.claims import paper_claims, read_claims
from tam.lab.report.comparisons import StudyResults
from tam.lab.report.evidence import load_evidence
from tam.lab.report.statistics import Estimate
from tam.lab.report.verdicts import PartResult, judge_claims

RESULTS = Path(__file__).parent
DOCS = RESULTS.parent / "docs"


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
    context = {"headline": headline(rows), "rows": table_rows(rows, evidence, DOCS), **functions}
    environment = Environment(loader=FileSystemLoader(DOCS), undefined=StrictUndefined, trim_blocks=True)
    findings = environment.get_template("findings.md.j2").render(context) + "\n"
    files = {DOCS / "claims" / name: content for name, content in pages.items() if name != "claims.html"}
    return {**files, DOCS / "findings.md": findings}


def main() -> None:
    for path, content in build().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
