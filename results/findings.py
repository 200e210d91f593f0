"""Write docs/results/: claims and every page with a template, computed from the packed results."""

from __future__ import annotations

import re
from pathlib import Path

from experiment_pages import ExperimentPages
from figures import Figures
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.report.claim_pages import build_pages, headline, judged_hypotheses, table_rows
from tam.lab.report.claims import paper_claims, read_claims
from tam.lab.report.evidence import Evidence, load_evidence
from tam.lab.report.ladder_charts import loss_chart
from tam.lab.report.render import render_svg
from tam.lab.report.verdicts import judge_claims

RESULTS = Path(__file__).parent
DOCS = RESULTS.parent / "docs" / "results"


def build() -> dict[Path, str]:
    """Return the content of every file."""
    claims, picture = read_claims(paper_claims())
    evidence = load_evidence([RESULTS])
    rows = judge_claims(claims, evidence)
    pages = build_pages(rows, evidence, picture, DOCS / "claims")
    context = {
        **Figures(evidence, rows).functions(),
        "headline": headline(rows),
        "rows": table_rows(rows, evidence, DOCS),
        "h": {one.number: one for one in judged_hypotheses(evidence)},
        "lab": ExperimentPages(evidence, rows, DOCS),
    }
    environment = Environment(loader=FileSystemLoader(DOCS), undefined=StrictUndefined, trim_blocks=True)
    templates = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md.j2"))]
    texts = {
        DOCS / name.removesuffix(".j2"): tidy(environment.get_template(name).render(context))
        for name in templates
    }
    files = {DOCS / "claims" / name: content for name, content in pages.items() if name != "claims.html"}
    return {**files, **texts, DOCS / "claims" / "ladder.svg": ladder_picture(evidence)}


def tidy(text: str) -> str:
    """Return a page without the empty lines that tags of a template leave."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


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
