"""Fine-tuning language models with AdaTAMW (the paper's section 4.2): WikiText, then MTEB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from statistics import mean, stdev
from typing import Any

from tam.lab import comparison, llm, variants
from tam.lab.embedding import local, score
from tam.lab.embedding import tasks as tasks_of
from tam.lab.experiment import Arm, Curve, Experiment, Plan, Study, Table
from tam.lab.outcome import outcomes, twins

CHOICES = {
    "outcome": "validation perplexity of the best epoch, by which lrs are chosen, too; test perplexity is "
    "that of the same network. Verdicts are of perplexity; the scores on MTEB, of which the paper speaks, "
    "have their differences seed by seed, and no verdict.",
    "text": "WikiText-2, tokenised, lines put end to end in blocks of 512 tokens; the paper does not say "
    "which WikiText. <unk> stands for rare words in it.",
    "batch": "8 blocks: Hugging Face's default; on several ranks they share it.",
    "lr": "the paper's grid. At equal lr AdaTAMW's settled steps are 5 times AdamW's, and its first ones "
    "larger still: beside it run AdaTAMW over a fifth of the grid, AdamW over five times it, and AdaTAMW "
    "with bias correction over a fifth.",
    "settings": "Hugging Face's defaults: weight decay 0, gradients clipped at norm 1, linear decay to 0, no "
    "warm-up.",
    "masks": "15% of the tokens; drawn from seed and step, as are the order and dropout. Those of the "
    "validation text are always the same; perplexity is that of all its masked tokens.",
    "embedding": "the mean of the last layer's states: the paper does not say.",
    "head": "where a model has no masked-LM head, it begins tied to the embeddings and otherwise new.",
    "precision": "bfloat16 autocast on GPUs, float32 on CPUs; parameters and state are float32.",
}
GRID = (5e-6, 1e-5, 5e-5)
EPOCHS = (3, 5, 10)
MODELS = {
    "BERT-base": "bert-base-uncased", "BERT-large": "bert-large-uncased",
    "DeBERTa-base": "microsoft/deberta-base", "DeBERTa-large": "microsoft/deberta-large",
    "RoBERTa-base": "roberta-base", "RoBERTa-large": "roberta-large",
}  # fmt: skip
LOCAL = (
    "STSBenchmark", "SICK-R", "BIOSSES", "Banking77Classification", "EmotionClassification",
    "TwentyNewsgroupsClustering", "SciFact",
)  # fmt: skip
NO_DECAY: dict[str, Any] = {"weight_decay": 0.0}  # Hugging Face's; the optimizers' own is another
ADAMW, ADATAMW = "AdamW", "AdaTAMW"
FIFTH, FIVE_TIMES = "AdaTAMW, a fifth of the lrs", "AdamW, five times the lrs"
CORRECTED = "AdaTAMW, bias correction, a fifth of the lrs"
UNTUNED = "not fine-tuned"


def arms(grid: tuple[float, ...] = GRID) -> tuple[Arm, ...]:
    fifth, five = tuple(lr / 5 for lr in grid), tuple(lr * 5 for lr in grid)
    return (
        Arm(ADAMW, "adamw", grid, NO_DECAY),
        Arm(ADATAMW, "adatamw", grid, NO_DECAY, against=(FIVE_TIMES,)),
        Arm(FIFTH, "adatamw", fifth, NO_DECAY),
        Arm(FIVE_TIMES, "adamw", five, NO_DECAY),
        Arm(CORRECTED, "adatamw", fifth, {**NO_DECAY, "bias_correction": True}),
        Arm(UNTUNED, "adamw", grid[:1], NO_DECAY, {"epochs": 0}, versus=""),
    )


def study(name: str, model: str | None, epochs: int, **workload: Any) -> Study:
    return Study(
        f"{name}-{epochs}",
        f"{name}, {epochs} epochs",
        {"model": model, "epochs": epochs, "tasks": LOCAL, **workload},
        arms(),
        baseline=ADAMW,
        seeds=(0, 1, 2),
        tuning_seeds=(100,),
        outcome="perplexity",
        label="validation perplexity",
        test_label="test perplexity",
        higher=False,
        margin=0.05,
        digits=3,
        choices={
            "the paper says": "on MTEB AdaTAMW is similar to AdamW or better in at least 28 of the 42 "
            "configurations of each family of models; it reports no perplexity."
        },
    )


def fair(epochs: int) -> Study:
    """One range of effective lr for all: arms that differ in their lrs alone come to the same."""
    made = study("encoder", None, epochs)
    kept = tuple(replace(made.arm(name), against=()) for name in (ADAMW, ADATAMW, CORRECTED))
    found = variants.fair(replace(made, arms=kept), middle=1e-5)
    return replace(found, arms=(*found.arms, made.arm(UNTUNED)))


def smoke() -> tuple[Study, ...]:
    small = {"data": "generated", "block": 32, "batch": 8}
    choices = {
        "text": "generated, 400 lines, and a random BERT of two layers: to show that everything runs.",
        "lr": "one.",
    }
    found = []
    for epochs in (1, 2):
        made = study("tiny", "tiny-bert", epochs, **{**small, "tasks": (local.GENERATED,)})
        few = tuple(replace(arm, lrs=arm.lrs[-1:]) for arm in made.arms)
        found.append(replace(made, arms=few, seeds=(0, 1), tuning_seeds=(), choices=choices, small=True))
    return tuple(found)


# ---------------------------------------------------------------------- the comparison on MTEB


PAIRS = ((ADATAMW, ADAMW), (FIFTH, ADAMW), (ADATAMW, FIVE_TIMES), (CORRECTED, ADAMW))


def _distinct(plan: Plan) -> list[tuple[str, str]]:
    """The comparisons of PAIRS, each once: two arms with one lr are the same runs."""
    again = twins(plan)
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for other, baseline in PAIRS:
        found.setdefault((again.get(other, other), again.get(baseline, baseline)), (other, baseline))
    return list(found.values())


def scores(plan: Plan, name: str) -> dict[str, dict[int, float]]:
    """Of an arm, by task and seed."""
    found: dict[str, dict[int, float]] = {}
    for outcome in (one for one in outcomes(plan) if one.arm.name == name):
        for seed, folder in outcome.folders.items():
            for task, value in score.found(folder.path / "mteb").items():
                found.setdefault(task, {})[seed] = value
    return found


def of_its_model(plan: Plan) -> list[Plan]:
    """The studies of the preset with the plan's model: one for each number of epochs."""
    same = {key: plan.study.workload[key] for key in ("model", "tasks")}
    presets = plan.experiment.presets[plan.preset]
    studies = [one for one in presets if one.workload["model"] in (None, same["model"])]
    return [
        Plan(plan.experiment, replace(one, workload={**one.workload, **same}), plan.root, plan.preset)
        for one in studies
    ]


def pairs_of(plan: Plan, other: str, baseline: str) -> dict[str, dict[int, tuple[float, float]]]:
    """By task and seed, the scores of both arms, where both have one."""
    ours, theirs = scores(plan, other), scores(plan, baseline)
    found = {
        task: {seed: (ours[task][seed], theirs[task][seed]) for seed in sorted(ours[task].keys() & by.keys())}
        for task, by in theirs.items()
        if task in ours
    }
    return {task: pairs for task, pairs in found.items() if pairs}


def rows_of(plan: Plan, other: str, baseline: str) -> list[comparison.Row]:
    """Our runs of the plan's model as the paper's tables have theirs."""
    categories = {row.dataset: row.category for row in comparison.read(comparison.MTEB)}
    found: dict[str, dict[tuple[str, int], Fraction]] = {}
    for one in (one for one in of_its_model(plan) if (other, baseline) in _distinct(one)):
        epochs = int(one.study.workload["epochs"])
        for task, pairs in pairs_of(one, other, baseline).items():
            ours, theirs = (Fraction(mean(column)) for column in zip(*pairs.values(), strict=True))
            found.setdefault(task, {})[comparison.OTHER, epochs] = ours
            found[task][comparison.BASELINE, epochs] = theirs
    model = str(plan.study.workload["model"]).partition("#")[0]
    return [comparison.Row(model, categories.get(task, "others"), task, by) for task, by in found.items()]


def _is_first(plan: Plan) -> bool:
    """Of its model: what is said of all its epochs is said there."""
    return plan.study.name == of_its_model(plan)[0].study.name


def _mean_told(by_seed: Mapping[int, float]) -> str:
    if not by_seed:
        return ""
    spread = f" ± {stdev(by_seed.values()):.2f}" if len(by_seed) > 1 else ""
    return f"{mean(by_seed.values()):.2f}{spread} (n = {len(by_seed)})"


def _difference_told(pairs: Mapping[int, tuple[float, float]]) -> str:
    """The mean over the seeds, and all of them."""
    found = [ours - theirs for ours, theirs in pairs.values()]
    each = ", ".join(f"{one:+.2f}" for one in found) if len(found) > 1 else f"seed {min(pairs)} alone"
    return f"{mean(found):+.2f} ({each})"


def tables(plan: Plan) -> list[Table]:
    """The scores on MTEB, and their differences, seed by seed."""
    again = twins(plan)
    found = {arm.name: scores(plan, arm.name) for arm in plan.study.arms if arm.name not in again}
    scored = {task for one in found.values() for task in one}
    asked = [task for task in plan.study.workload["tasks"] if task in scored]
    names = [*asked, *sorted(scored - {*asked})]  # `tam lab mteb --tasks` may have added some
    arms = [name for name, one in found.items() if one]
    rows = [[task, *(_mean_told(found[name].get(task, {})) for name in arms)] for task in names]
    pairs = {pair: made for pair in _distinct(plan) if (made := pairs_of(plan, *pair))}
    differences = [
        [task, *(_difference_told(made[task]) if task in made else "" for made in pairs.values())]
        for task in names
    ]
    both = (["MTEB, main score", *arms], rows), (["", *(" minus ".join(pair) for pair in pairs)], differences)
    return [(header, body) for header, body in both if len(header) > 1]


def figures(plan: Plan) -> list[str]:
    """Once a model, the paper's figures from our runs; once, from its tables."""
    drawn = []
    if _is_first(plan):
        for other, baseline in PAIRS:
            rows = rows_of(plan, other, baseline)
            drawn += comparison.figures(rows, other, baseline) if rows else []
    if plan.study.name == plan.experiment.presets[plan.preset][0].name:
        paper = comparison.read(comparison.MTEB)
        drawn += comparison.figures(paper, "The paper's AdaTAMW", "its AdamW")
    return drawn


def _texts(plan: Plan) -> list[str]:
    """What was learned from, which has no official digest."""
    found = {
        (result["text"], result["blocks"])
        for outcome in outcomes(plan)
        for folder in outcome.folders.values()
        if (result := folder.result) is not None
    }
    told = "; ".join(f"{blocks} blocks (digest {digest})" for digest, blocks in sorted(found))
    warning = " They differ: the trials cannot be compared." if len(found) > 1 else ""
    return [f"Text to train on: {told}.{warning}"] if found else []


def _new(plan: Plan) -> list[str]:
    """The weights a model did not bring."""
    results = [folder.result or {} for one in outcomes(plan) for folder in one.folders.values()]
    names = sorted({name for result in results for name in result.get("new", [])})
    return [f"Weights the model did not have, which begin new or tied: {', '.join(names)}."] if names else []


def compared(plan: Plan) -> list[str]:
    """What the comparisons on MTEB come to, and where the paper's tables do not say what it says."""
    lines = [*_texts(plan), *_new(plan)]
    if not _is_first(plan):
        return lines
    for other, baseline in PAIRS:
        studies = {one.study.workload["epochs"]: one for one in of_its_model(plan)}
        for share in comparison.shares(rows_of(plan, other, baseline)):
            if share.n:
                told = f"better on {share.counts['better']}, within 0.2% or better on {share.counts['0.2']}"
                seeds = _seeds_told(studies[share.epochs], other, baseline)
                setting = f"{other} beside {baseline}, {share.epochs} epochs, means of {seeds}"
                lines.append(f"{setting}: {told} of {share.n} tasks.")
    lines += [
        f"The data of {task} is not quite MTEB's: {tasks_of.DIFFERENCES[task]}."
        for task in plan.study.workload["tasks"]
        if not tasks_of.DIFFERENCES.get(task, "none").startswith("none")
    ]
    if plan.study.name == plan.experiment.presets[plan.preset][0].name:
        said = comparison.claims(comparison.read(comparison.MTEB))
        agrees = [claim.agrees for claim in said]
        judged = f"of its {len(said)} sentences on them {agrees.count(True)} agree"
        lines.append(f"The paper beside its own tables (`tam lab paper mteb`): {judged}.")
        lines += [f"The paper beside its own tables: {claim}" for claim in said if claim.agrees is False]
    return lines


def _seeds_told(plan: Plan, other: str, baseline: str) -> str:
    counts = sorted({len(pairs) for pairs in pairs_of(plan, other, baseline).values()})
    return f"{' to '.join(map(str, counts))} seed{'' if counts == [1] else 's'}"


EXPERIMENT = Experiment(
    "llm",
    "Fine-tuning language models (the paper's section 4.2)",
    llm.run,
    llm.config_of,
    {
        "paper": tuple(study(name, model, n) for name, model in MODELS.items() for n in EPOCHS),
        "encoder": tuple(study("encoder", None, n) for n in EPOCHS),
        "fair": tuple(fair(n) for n in EPOCHS),
        "quick": (replace(study("encoder", None, 1), seeds=(0,)),),
        "smoke": smoke(),
    },
    CHOICES,
    (
        Curve("loss", "Training loss", "cross-entropy, epoch mean"),
        Curve("perplexity", "Validation perplexity", "perplexity"),
        Curve("alignment", "Alignment s", "s, epoch mean"),
    ),
    figures,
    llm.check,
    ranks=True,
    says=compared,
    tables=tables,
)
