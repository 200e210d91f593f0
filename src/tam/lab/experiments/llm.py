"""Fine-tuning language models with AdaTAMW (the paper's section 4.2): WikiText, then MTEB."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from statistics import mean
from typing import Any

from tam.lab import comparison, llm, variants
from tam.lab.charts import table
from tam.lab.embedding import local, score
from tam.lab.experiment import Arm, Curve, Experiment, Plan, Study
from tam.lab.outcome import Outcome, outcomes

CHOICES = {
    "outcome": "validation perplexity of the best epoch, by which lrs are chosen, too; test perplexity is "
    "that of the same network.",
    "text": "WikiText-2, tokenised, lines put end to end in blocks of 512 tokens; the paper does not say "
    "which WikiText. <unk> stands for rare words in it.",
    "batch": "8 blocks: Hugging Face's default.",
    "lr": "the paper's grid. At equal lr AdaTAMW's settled steps are 5 times AdamW's, and its first ones "
    "larger still: beside it run AdaTAMW over a fifth of the grid, AdamW over five times it, and AdaTAMW "
    "with bias correction over a fifth.",
    "settings": "Hugging Face's defaults: weight decay 0, gradients clipped at norm 1, linear decay to 0, no "
    "warm-up.",
    "masks": "15% of the tokens; drawn from seed and step, as are the order and dropout. Those of the "
    "validation text are always the same.",
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
    )


def smoke() -> tuple[Study, ...]:
    small = {"data": "generated", "block": 32, "batch": 8}
    choices = {
        "text": "generated, 400 lines, and a random BERT of two layers: to show that everything runs.",
        "lr": "one.",
    }
    found = []
    for epochs in (1, 2):
        made = study("tiny", "tiny", epochs, **{**small, "tasks": (local.GENERATED,)})
        few = tuple(replace(arm, lrs=arm.lrs[-1:]) for arm in made.arms)
        found.append(replace(made, arms=few, seeds=(0, 1), tuning_seeds=(), choices=choices, small=True))
    return tuple(found)


# ---------------------------------------------------------------------- the comparison on MTEB


PAIRS = ((ADATAMW, ADAMW), (FIFTH, ADAMW), (ADATAMW, FIVE_TIMES), (CORRECTED, ADAMW))


def scores(outcome: Outcome) -> dict[str, float]:
    """The mean over the seeds, by task, of those all its trials have."""
    found = [score.found(folder.path / "mteb") for folder in outcome.folders.values()]
    shared = [task for task in found[0] if all(task in one for one in found)] if found else []
    return {task: mean(one[task] for one in found) for task in shared}


def of_its_model(plan: Plan) -> list[Plan]:
    """The studies of the preset with the plan's model: one for each number of epochs."""
    same = {key: plan.study.workload[key] for key in ("model", "tasks")}
    name = plan.study.name.rpartition("-")[0]
    studies = [one for one in plan.experiment.presets[plan.preset] if one.name.rpartition("-")[0] == name]
    return [
        Plan(plan.experiment, replace(one, workload={**one.workload, **same}), plan.root, plan.preset)
        for one in studies
    ]


def rows_of(plan: Plan, other: str, baseline: str) -> list[comparison.Row]:
    """Our runs of the plan's model as the paper's tables have theirs."""
    categories = {row.dataset: row.category for row in comparison.read(comparison.MTEB)}
    columns = {baseline: comparison.BASELINE, other: comparison.OTHER}
    found: dict[str, dict[tuple[str, int], Fraction]] = {}
    for one in of_its_model(plan):
        for outcome in outcomes(one):
            if outcome.arm.name in columns:
                for task, value in scores(outcome).items():
                    key = (columns[outcome.arm.name], int(one.study.workload["epochs"]))
                    found.setdefault(task, {})[key] = Fraction(value)
    model = str(plan.study.workload["model"]).partition("#")[0]
    return [comparison.Row(model, categories.get(task, "others"), task, by) for task, by in found.items()]


def _is_first(plan: Plan) -> bool:
    """Of its model: what is said of all its epochs is said there."""
    return plan.study.name == of_its_model(plan)[0].study.name


def figures(plan: Plan) -> list[str]:
    """The scores; and, once a model, the paper's figures from its tables, and from our runs."""
    found = {outcome.arm.name: scores(outcome) for outcome in outcomes(plan)}
    tasks = list(dict.fromkeys(task for one in found.values() for task in one))
    body = [
        [name, *(f"{one[task]:.2f}" if task in one else "" for task in tasks)] for name, one in found.items()
    ]
    drawn = [table(["MTEB, main score", *tasks], body)] if tasks else []
    if _is_first(plan):
        for other, baseline in PAIRS:
            rows = rows_of(plan, other, baseline)
            drawn += [f"<h4>{other} beside {baseline}</h4>", *comparison.figures(rows)] if rows else []
        drawn += ["<h4>The paper's tables</h4>", *comparison.figures(comparison.read(comparison.MTEB))]
    return drawn


def compared(plan: Plan) -> list[str]:
    """Scores in words, what the comparisons come to, and where the paper's tables do not say what it says."""
    lines = []
    for outcome in outcomes(plan):
        told = ", ".join(f"{task} {value:.2f}" for task, value in scores(outcome).items())
        lines += [f"{outcome.arm.name} on MTEB: {told} (n = {len(outcome.folders)})."] if told else []
    if not _is_first(plan):
        return lines
    for other, baseline in PAIRS:
        for share in comparison.shares(rows_of(plan, other, baseline)):
            if share.n:
                told = f"better on {share.counts['better']}, within 0.2% or better on {share.counts['0.2']}"
                lines.append(f"{other} beside {baseline}, {share.epochs} epochs: {told} of {share.n} tasks.")
    said = comparison.claims(comparison.read(comparison.MTEB))
    return [*lines, *(f"The paper's tables beside its text: {claim}" for claim in said)]


EXPERIMENT = Experiment(
    "llm",
    "Fine-tuning language models (the paper's section 4.2)",
    llm.run,
    llm.config_of,
    {
        "paper": tuple(study(name, model, n) for name, model in MODELS.items() for n in EPOCHS),
        "encoder": tuple(study("encoder", None, n) for n in EPOCHS),
        "fair": tuple(variants.fair(study("encoder", None, n), middle=1e-5) for n in EPOCHS),
        "quick": tuple(replace(study("encoder", None, n), seeds=(0,)) for n in (1,)),
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
)
