"""What a report shows of fine-tuned networks besides perplexity: their scores on MTEB."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import mean
from typing import TypeVar

from tam.lab.core.plan import Plan
from tam.lab.core.study import Table
from tam.lab.experiments.llm.mteb.scoring import DIFFERENCES
from tam.lab.experiments.llm.paper_tables import comparison, page
from tam.lab.experiments.llm.paper_tables.claims import check_claims
from tam.lab.experiments.llm.variants import PAIRS
from tam.lab.report.statistics import summarise

Scores = dict[str, dict[int, float]]  # by task and seed
PairedScores = dict[str, dict[int, tuple[float, float]]]  # of a variant and its baseline
T = TypeVar("T")


def scores_by_variant(plan: Plan) -> dict[str, Scores]:
    scores_by_name: dict[str, Scores] = {}
    for outcome in plan.outcomes():
        scores = scores_by_name.setdefault(outcome.variant.name, {})
        for seed, record in outcome.records.items():
            for task, stored in record.scores.items():
                scores.setdefault(task, {})[seed] = float(stored["score"])
    return scores_by_name


def paired_scores(plan: Plan) -> dict[tuple[str, str], PairedScores]:
    """Return the scores of the comparisons of PAIRS, for tasks and seeds that both variants have.

    Each comparison is there once: two variants with the same lr are the same runs.
    """
    scores, same_as = scores_by_variant(plan), plan.duplicates()
    pairs: dict[tuple[str, ...], tuple[str, str]] = {}
    for pair in PAIRS:
        pairs.setdefault(tuple(same_as.get(name, name) for name in pair), pair)
    paired: dict[tuple[str, str], PairedScores] = {}
    for variant, baseline in pairs.values():
        ours, by_task = scores.get(variant, {}), paired.setdefault((variant, baseline), {})
        for task, theirs in scores.get(baseline, {}).items():
            if seeds := sorted(ours.get(task, {}).keys() & theirs.keys()):
                by_task[task] = {seed: (ours[task][seed], theirs[seed]) for seed in seeds}
    return paired


def plans_of_model(plan: Plan) -> list[Plan]:
    """Return the studies of the preset with the plan's model: one for each number of epochs."""
    same = {key: plan.study.workload[key] for key in ("model", "tasks")}
    return [
        Plan(plan.experiment, replace(study, workload={**study.workload, **same}), plan.results, plan.preset)
        for study in plan.experiment.presets[plan.preset]
        if study.workload["model"] in (None, same["model"])
    ]


def rows_of_model(plan: Plan, variant: str, baseline: str) -> list[comparison.Row]:
    """Return our runs of the plan's model in the form of the paper's tables."""
    categories = {row.dataset: row.category for row in comparison.read_rows(comparison.MTEB)}
    scores: dict[str, dict[tuple[str, int], Fraction]] = {}
    for one in plans_of_model(plan):
        epochs = int(one.study.workload["epochs"])
        for task, by_seed in paired_scores(one).get((variant, baseline), {}).items():
            ours, theirs = (Fraction(mean(column)) for column in zip(*by_seed.values(), strict=True))
            both = {(comparison.OTHER, epochs): ours, (comparison.BASELINE, epochs): theirs}
            scores.setdefault(task, {}).update(both)
    model = str(plan.study.workload["model"]).partition("#")[0]
    return [comparison.Row(model, categories.get(task, "others"), task, by) for task, by in scores.items()]


def tables(plan: Plan) -> list[Table]:
    """Return the scores on MTEB, and their differences, seed by seed."""
    same_as = plan.duplicates()
    scores = {name: by_task for name, by_task in scores_by_variant(plan).items() if name not in same_as}
    scored = {task for by_task in scores.values() for task in by_task}
    planned = [task for task in plan.study.workload["tasks"] if task in scored]
    tasks = [*planned, *sorted(scored - {*planned})]  # `tam lab score --tasks` can add some
    pairs = {" minus ".join(pair): by_task for pair, by_task in paired_scores(plan).items()}
    means = _table("MTEB, main score", scores, tasks, _format_mean)
    return [*means, *_table("", pairs, tasks, _format_difference), *_share_tables(plan)]


def _table(
    corner: str, columns: Mapping[str, Mapping[str, T]], tasks: Sequence[str], form: Callable[[T], str]
) -> list[Table]:
    """Return one row per task, without empty columns; no table if all of them are empty."""
    columns = {name: by_task for name, by_task in columns.items() if by_task}
    cells = [[form(of[task]) if task in of else "" for of in columns.values()] for task in tasks]
    rows = [[task, *row] for task, row in zip(tasks, cells, strict=True)]
    return [Table([corner, *columns], rows)] if columns else []


def _format_mean(by_seed: Mapping[int, float]) -> str:
    return f"{summarise([*by_seed.values()]).format(2)} (n = {len(by_seed)})"


def _format_difference(pairs: Mapping[int, tuple[float, float]]) -> str:
    values = [ours - theirs for ours, theirs in pairs.values()]
    each = ", ".join(f"{value:+.2f}" for value in values) if len(values) > 1 else f"seed {min(pairs)} alone"
    return f"{mean(values):+.2f} ({each})"


def figures(plan: Plan, styles: Mapping[str, int]) -> Sequence[str]:
    """Return the paper's figures: once per model from our runs, once per preset from its tables."""
    charts = []
    if plan.study.name == plans_of_model(plan)[0].study.name:  # all epochs of a model are shown there
        for pair in PAIRS:
            rows = rows_of_model(plan, *pair)
            charts += page.figures(rows, *pair) if rows else []
    if plan.study.name == plan.experiment.presets[plan.preset][0].name:
        paper = comparison.read_rows(comparison.MTEB)
        charts += page.figures(paper, "The paper's AdaTAMW", "its AdamW")
    return charts


def lines(plan: Plan) -> list[str]:
    """Return what the comparisons on MTEB come to, and where the paper's tables contradict its text."""
    lines = _text_lines(plan)
    if plan.study.name == plans_of_model(plan)[0].study.name:  # all epochs of a model are shown there
        lines += [
            f"The data of {task} differs from MTEB's: {DIFFERENCES[task]}."
            for task in plan.study.workload["tasks"]
            if not DIFFERENCES.get(task, "none").startswith("none")
        ]
    if plan.study.name == plan.experiment.presets[plan.preset][0].name:
        start = "The paper compared with its own tables"
        claims = check_claims(comparison.read_rows(comparison.MTEB))
        agree = sum(claim.agrees is True for claim in claims)
        counts = f"of its {len(claims)} sentences on them {agree} agree"
        lines.append(f"{start} (`tam lab paper mteb`): {counts}.")
        lines += [f"{start}: {claim}" for claim in claims if claim.agrees is False]
    return lines


def _text_lines(plan: Plan) -> list[str]:
    """Return which text was learned from, since it has no official digest, and which weights were new."""
    results = [record.result for outcome in plan.outcomes() for record in outcome.records.values()]
    texts = sorted({(result["text"], result["blocks"]) for result in results})
    new = sorted({name for result in results for name in result.get("new", [])})
    lines = []
    if texts:
        described = "; ".join(f"{blocks} blocks (digest {digest})" for digest, blocks in texts)
        warning = " They differ: the trials cannot be compared." if len(texts) > 1 else ""
        lines.append(f"Text to train on: {described}.{warning}")
    if new:
        lines.append(f"Weights the model did not have, which begin new or tied: {', '.join(new)}.")
    return lines


def _share_tables(plan: Plan) -> list[Table]:
    """Return on how many tasks a variant is better than its baseline, once for all epochs of a model."""
    rows, plans = [], plans_of_model(plan)
    if plan.study.name != plans[0].study.name:
        return []
    plan_by_epochs = {one.study.workload["epochs"]: one for one in plans}
    for pair in PAIRS:
        for share in (one for one in comparison.shares(rows_of_model(plan, *pair)) if one.n):
            by_task = paired_scores(plan_by_epochs[share.epochs])[pair]
            counts = sorted({len(by_seed) for by_seed in by_task.values()})
            seeds = " to ".join(map(str, counts))
            better, similar = (f"{share.counts[key]} of {share.n}" for key in ("better", "0.2"))
            rows.append([pair[0], pair[1], str(share.epochs), better, similar, seeds])
    header = ["variant", "compared with", "epochs", "better", "within 0.2 % or better", "seeds"]
    return [Table(header, rows, "Tasks on which the mean score is better.")] if rows else []
