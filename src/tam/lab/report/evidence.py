"""All results that verdicts rest on, from several folders and packed files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tam.lab.core.plan import SAME_AS_BASELINE, Outcome, Plan
from tam.lab.core.results import PACKED_FILE, RUNS_FILE, Results, add_record, load_existing_results
from tam.lab.core.selection import select_plans, selections_of
from tam.lab.report.claims import Part
from tam.lab.report.sections import section_anchor

REGISTERED = "registered"  # how the presets of registered comparisons begin


@dataclass
class Evidence:
    """Results of several places, merged, with the studies they were run for."""

    results: Results = field(default_factory=Results)
    plans: dict[tuple[str, str, str], Plan] = field(default_factory=dict)  # by experiment, preset, study
    damaged: list[str] = field(default_factory=list)
    origins: dict[str, Path] = field(default_factory=dict)  # the folder or file of each trial

    def registered(self, study: str) -> dict[str, Outcome]:
        """Return the outcomes of EXPERIMENT/STUDY in the registered presets, by variant."""
        return _merge(self._registered_plans(study))

    def _registered_plans(self, study: str) -> list[Plan]:
        return [
            plan
            for (experiment, preset, name), plan in self.plans.items()
            if f"{experiment}/{name}" == study and preset.startswith(REGISTERED)
        ]

    def pilot(self, source: str, study: str) -> dict[str, Outcome]:
        """Return the outcomes of EXPERIMENT/PRESET/STUDY without the seeds of the registered study."""
        experiment, preset, name = source.split("/")
        plan = self.plans.get((experiment, preset, name))
        fresh = {seed for one in self._registered_plans(study) for seed in one.whole.seeds}
        return {
            variant: replace(outcome, records={k: v for k, v in outcome.records.items() if k not in fresh})
            for variant, outcome in _merge([plan] if plan else []).items()
        }

    def plans_of(self, sources: Sequence[str]) -> Iterator[Plan]:
        """Return all plans of EXPERIMENT/PRESET."""
        return (plan for (name, preset, _), plan in self.plans.items() if f"{name}/{preset}" in sources)

    def place_of(self, part: Part) -> tuple[Path, str] | None:
        """Return the folder of the results that a part is judged by, and the anchor of its report section."""
        plans = sorted(self._registered_plans(part.study), key=_size, reverse=True)
        if not any(one.records for one in self.registered(part.study).values()) and part.pilot:
            experiment, preset, name = part.pilot.split("/")
            plans = [plan for key, plan in self.plans.items() if key == (experiment, preset, name)]
        for plan in plans:
            for record in (record for one in plan.outcomes() for record in one.records.values()):
                origin = self.origins[record.key]
                return origin if origin.is_dir() else origin.parent, section_anchor(plan)
        return None

    def needed_controls(self, part: Part) -> list[str]:
        """Return the controls that a part must beat: not constant damping where it is the baseline itself."""
        needed = list(part.controls)
        for plan in self._registered_plans(part.study):
            d = plan.mean_damping(plan.study.variant(part.variant))
            if d is not None and abs(2 * d - 1) <= SAME_AS_BASELINE:
                needed = [name for name in needed if "constant damping" not in name]
        return needed


def _merge(plans: Sequence[Plan]) -> dict[str, Outcome]:
    """Return each variant's outcome from the plan that has most of its trials."""
    merged: dict[str, Outcome] = {}
    for outcome in (outcome for plan in plans for outcome in plan.outcomes()):
        name = outcome.variant.name
        if name not in merged or len(outcome.records) > len(merged[name].records):
            merged[name] = outcome
    return merged


def load_evidence(paths: Sequence[Path]) -> Evidence:
    """Read run folders, packed files, or folders that hold packed files somewhere inside."""
    evidence, sources = Evidence(), [source for path in paths for source in find_results(path)]
    selections = []
    for source in sources:
        results = load_existing_results(source)
        selections += selections_of(results)
        evidence.damaged += [str(error) for error in results.damaged.values()]
        for record in results:
            add_record(evidence.results, evidence.origins, record, source)
    for selection in sorted(selections, key=lambda one: one.controls):  # more variants last
        whole = replace(selection, variants=(), seeds=None)
        for plan in select_plans(whole, evidence.results):
            key = (selection.experiment, selection.preset, plan.study.name)
            if key not in evidence.plans or _size(plan) >= _size(evidence.plans[key]):
                evidence.plans[key] = plan
    return evidence


def find_results(path: Path) -> list[Path]:
    """Return the results at a path: itself, or all packed files inside a folder."""
    if path.is_dir() and not (path / RUNS_FILE).exists() and not (path / PACKED_FILE).exists():
        packed = sorted(path.rglob(PACKED_FILE))
        if packed:
            return packed
    return [path]


def _size(plan: Plan) -> int:
    return sum(len(outcome.records) for outcome in plan.outcomes())
