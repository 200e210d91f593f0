"""Write results/README.md, one report per folder and a few charts from the packed results."""

from __future__ import annotations

from pathlib import Path

from tam.lab.core.results import PACKED_FILE
from tam.lab.core.selection import PresetGroup, load_groups
from tam.lab.report import build_report, render_markdown
from tam.lab.report.evidence import REGISTERED
from tam.lab.report.model import Tally
from tam.lab.report.render import render_svg

ROOT = Path(__file__).parent
CHARTS = ("images", "online")  # the folders whose first chart is written as a picture
COLUMNS = (
    "folder", "what was run", "trials", "seeds per variant", "hardware, torch",
    "TAM or AdaTAM at an equal effective lr",
)  # fmt: skip
HEADER = """\
# Published results

Each folder holds the trials of one experiment in a packed file, and a report. `tam lab report FOLDER -o
report.html` writes the page with all charts. `tam lab unpack` gives the run folder back. `make results`
writes this page and the reports. [What the runs have shown](../docs/results/findings.md) says what they mean.

The last column counts comparisons by their 95 % intervals. They are exploratory: `tam lab verdicts` judges
the paper's claims.

"""


def main() -> None:
    """Write all pages."""
    rows, charts = [], []
    for packed in sorted(ROOT.glob(f"**/{PACKED_FILE}")):
        folder, name = packed.parent, packed.parent.relative_to(ROOT).as_posix()
        groups = load_groups(packed)
        plans = [plan for group in groups for plan in group.plans]
        # Registered comparisons have no figures before all of their seeds are run.
        if any(plan.preset.startswith(REGISTERED) and plan.to_run() for plan in plans):
            rows.append([name, *describe_runs(groups), "no report before all registered seeds are run"])
            continue
        report = build_report(groups)
        (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
        rows.append([f"[{name}]({name}/report.md)", *describe_runs(groups), describe_tally(report.tally)])
        if name in CHARTS:
            section = next(section for section in report.sections if section.charts)
            (folder / "chart.svg").write_text(render_svg(section.charts[0]), encoding="utf-8")
            notes = f"\nRuns that it leaves out: {' '.join(section.undrawn)}\n" if section.undrawn else ""
            charts.append(f"![{section.title}]({name}/chart.svg)\n\n{section.title}\n{notes}")
    table = "".join(f"| {' | '.join(row)} |\n" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows))
    (ROOT / "README.md").write_text("\n".join([HEADER + table, *charts]), encoding="utf-8")


def describe_runs(groups: list[PresetGroup]) -> list[str]:
    """Return the columns on what was run, how often and on what."""
    results = groups[0].plans[0].results
    titles = "; ".join(dict.fromkeys(group.plans[0].experiment.title for group in groups))
    presets = ", ".join(f"`{group.plans[0].preset}`" for group in groups)
    outcomes = [one for group in groups for plan in group.plans for one in plan.outcomes()]
    seeds = sorted({len(one.records) for one in outcomes if one.records}) or [0]
    machines = [record.result["machine"] for record in results]
    hardware = "; ".join(sorted({f"{one['hardware']}, {one['torch']}" for one in machines}))
    spread = " to ".join(dict.fromkeys(map(str, (seeds[0], seeds[-1]))))
    return [f"{titles}: {presets}", str(len(results.records)), spread, hardware]


def describe_tally(tally: Tally) -> str:
    """Return how often TAM or AdaTAM differs at an equal effective learning rate."""
    if not tally.total:
        return "not compared"
    return f"{tally.ahead} ahead, {tally.behind} behind, {tally.unclear} not distinguishable"


if __name__ == "__main__":
    main()
