"""Tables of docs/results/experiments/ and reproduce.md: what is declared, stored and not run yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tam.lab.commands.data import sets_needed
from tam.lab.core.ladder_plan import make_plan
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, experiment_names, get_experiment
from tam.lab.core.results import Results, TrialRecord
from tam.lab.core.runner import finished_trials
from tam.lab.core.selection import PresetGroup, load_groups
from tam.lab.data import SETS
from tam.lab.report.claim_pages import format_part
from tam.lab.report.evidence import REGISTERED, Evidence, find_results
from tam.lab.report.verdicts import Row

PAGES = {  # several experiments of a folder share a page
    "images": ("images", "ablations", "dynamics", "beyond"),
    **{
        name: (name,)
        for name in experiment_names()
        if name not in ("images", "ablations", "dynamics", "beyond")
    },
}
SHORT = ("quick", "smoke")  # presets that no page misses


@dataclass(frozen=True)
class ExperimentPages:
    """What the templates of the pages ask for. Every table is Markdown."""

    evidence: Evidence
    rows: Sequence[Row]
    docs: Path

    def experiments(self, page: str) -> list[Experiment]:
        return [get_experiment(name) for name in PAGES[page]]

    def title(self, page: str) -> str:
        """Return what a page is about, without its place in the paper."""
        return f"`{page}`: {self.experiments(page)[0].title.partition(' (')[0]}"

    def index(self) -> str:
        """Return a row per page."""
        lines = []
        for page, names in PAGES.items():
            data = self._data_names(page)
            stored = "; ".join(self._stored_presets(names)) or "none"
            claims = ", ".join(map(str, sorted({row.claim.number for row in self._claims(page)}))) or "none"
            title = self.experiments(page)[0].title.partition(";")[0]
            lines.append([f"[{page}]({page}.md)", title, claims, ", ".join(data) or "none", stored])
        return table(["page", "what", "claims", "data", "stored runs"], lines)

    def claims(self, page: str) -> str:
        """Return the claim rows of a page."""
        lines = [
            [
                str(row.claim.number),
                row.claim.claim + (f" (stand-in for {row.claim.stands_for})" * bool(row.claim.stands_for)),
                row.verdict,
                format_part(row.deciding),
                row.why,
                row.claim.paper,
            ]
            for row in self._claims(page)
        ]
        return table(["#", "Claim", "Verdict", "Ours (95 % interval)", "Why", "Paper"], lines)

    def has_claims(self, page: str) -> bool:
        return bool(self._claims(page))

    def is_stored(self, page: str) -> bool:
        return bool(self._groups(PAGES[page]))

    def _claims(self, page: str) -> list[Row]:
        """Return the claims that the experiments of a page declare or decide."""
        names = PAGES[page]
        declared = {number for one in self.experiments(page) for number in one.claims}
        return sorted(
            (
                row for row in self.rows
                if _sources(row) & {*names} or (not _sources(row) and row.claim.number in declared)
            ),
            key=lambda row: (row.claim.number, bool(row.claim.stands_for)),
        )  # fmt: skip

    def data(self, page: str) -> str:
        """Return the data sets of a page, as words."""
        names = [f"`{name}` ({_size(name)})" for name in self._data_names(page)]
        return ", ".join(names) or "none"

    def _data_names(self, page: str) -> list[str]:
        plans = (
            make_plan(experiment, study, Results())
            for experiment in self.experiments(page)
            for studies in experiment.presets.values()
            for study in studies
        )
        names = dict.fromkeys(name for plan in plans for name in sets_needed(plan))
        return [name for name in names if SETS[name].layouts]  # the others are built in

    def choices(self, page: str) -> str:
        """Return what was chosen where the paper is silent, as a list."""
        seen: dict[str, str] = {}
        for experiment in self.experiments(page):
            seen = {**experiment.choices, **seen}
        return "\n".join(f"- **{name}**: {text.replace('<', '&lt;')}" for name, text in seen.items())

    def stored(self, page: str) -> str:
        """Return the stored runs of a page: how many, how long and on what."""
        lines, keys = [], []
        for group in self._groups(PAGES[page]):
            plans = group.plans
            name, preset = plans[0].experiment.name, plans[0].preset
            records = list(_records(plans).values())
            keys += [one.key for one in records]
            count = str(len(records))
            if preset.startswith(REGISTERED) and any(plan.to_run() for plan in plans):
                count += f" of {len(records) + sum(len(plan.to_run()) for plan in plans)}"
            where = f"{name} `{preset}`" if len(PAGES[page]) > 1 else f"`{preset}`"
            report = self._report(records)
            lines.append([where, count, _seconds(records), _together(records), _hardware(records), report])
        header = ["preset", "trials", "time of a trial (s)", "trained together", "hardware", "report"]
        shared = len(keys) - len(set(keys))
        note = f"\n\nPresets share {shared} trials: {len(set(keys))} in all." if shared else ""
        return table(header, lines) + note if lines else "No runs are stored."

    def _groups(self, names: Sequence[str]) -> list[PresetGroup]:
        """Return what was run of some experiments, packed file by packed file."""
        return [
            group for group in self._stored
            if group.plans[0].experiment.name in names and _records(group.plans)
        ]  # fmt: skip

    @cached_property
    def _stored(self) -> list[PresetGroup]:
        results = self.docs.parent.parent / "results"
        return [group for source in find_results(results) for group in load_groups(source)]

    def _report(self, records: Sequence[TrialRecord]) -> str:
        """Return the links to the reports of the folders that hold these trials."""
        folders = dict.fromkeys(self.evidence.origins[one.key].parent for one in records)
        root = self.docs.parent.parent
        paths = [path.relative_to(root).as_posix() for path in folders if (path / "report.md").exists()]
        links = [f"[{path.removeprefix('results/')}](../../../{path}/report.md)" for path in paths]
        return ", ".join(links) or "none before all seeds are run"

    def not_run(self, page: str) -> str:
        """Return the presets, or studies of a preset, without any stored trial."""
        missing: list[str] = []
        run: dict[tuple[str, str], set[str]] = {}
        for group in self._groups(PAGES[page]):
            for plan in group.plans:
                if _records([plan]):
                    run.setdefault((plan.experiment.name, plan.preset), set()).add(plan.study.name)
        for experiment in self.experiments(page):
            prefix = f"{experiment.name} " if len(PAGES[page]) > 1 else ""
            for preset, studies in experiment.presets.items():
                names_run = run.get((experiment.name, preset), set())
                names = [f"`{study.name}`" for study in studies if study.name not in names_run]
                if preset not in SHORT and names:
                    part = f" ({', '.join(names)})" if names_run else ""
                    missing.append(f"{prefix}`{preset}`{part}")
        return ", ".join(missing)

    def cost(self, experiment: str, presets: Sequence[str], studies: Sequence[str] = ()) -> str:
        """Return the stored trials of some registered studies, and the time they took on one device."""
        plans = [
            plan for (name, preset, study), plan in self.evidence.plans.items()
            if name == experiment and preset in presets and (not studies or study in studies)
        ]  # fmt: skip
        records = list(_records(plans).values())
        if not records:
            return "not run"
        timings = [one.result["timing"] for one in records]
        minutes = sum(one["seconds"] / one.get("together", 1) for one in timings) / 60
        duration = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:.0f} minutes"
        machine = records[0].result["machine"]
        device = (
            f"one core of an {machine['hardware']}"
            if machine["torch"].endswith("+cpu")
            else machine["hardware"]
        )
        return f"{len(records)} trials in {duration} on {device}"

    def _stored_presets(self, names: Sequence[str]) -> Iterator[str]:
        for group in self._groups(names):
            name, preset = group.plans[0].experiment.name, group.plans[0].preset
            yield f"{name + ' ' if len(names) > 1 else ''}`{preset}`: {len(_records(group.plans))}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = (" | ".join(cell or " " for cell in row) for row in (header, ["---"] * len(header), *rows))
    return "\n".join(f"| {line} |" for line in lines)


def _records(plans: Sequence[Plan]) -> dict[str, TrialRecord]:
    """Return the finished trials of some studies, which can share some."""
    return {key: one for plan in plans for key, one in finished_trials(plan).items()}


def _sources(row: Row) -> set[str]:
    """Return the experiments that decide a claim, or would."""
    texts = (text for part in row.claim.parts for text in (part.study, part.computed, *part.pilots))
    return {text.partition("/")[0] for text in texts if text}


def _size(name: str) -> str:
    megabytes = SETS[name].megabytes()
    return f"{megabytes:.0f} MB" if megabytes else "by hand"


def _seconds(records: Sequence[TrialRecord]) -> str:
    """Return the range of the middle 90 % of the times."""
    seconds = sorted(one.result["timing"]["seconds"] for one in records)
    cut = len(seconds) // 20
    low, high = (
        f"{value:.2g}" if value < 100 else f"{value:.0f}" for value in (seconds[cut], seconds[-1 - cut])
    )
    return low if low == high else f"{low} to {high}"


def _together(records: Sequence[TrialRecord]) -> str:
    counts = {one.result["timing"].get("together") for one in records}
    if None in counts:
        return "several"  # the first runs did not record the number
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _hardware(records: Sequence[TrialRecord]) -> str:
    machines = (one.result["machine"] for one in records)
    return "; ".join(sorted({f"{one['hardware']}, torch {one['torch']}" for one in machines}))
