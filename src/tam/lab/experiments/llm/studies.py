"""Fine-tuning language models with AdaTAMW (the paper's section 4.2): WikiText, then MTEB.

A process runs one trial at a time, whatever `--together` says: the Trainer cannot be interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tam.lab.core import presets
from tam.lab.core.errors import LabError
from tam.lab.core.registry import Experiment, ReportExtras, RunOption
from tam.lab.core.study import Curve, Metric, Study
from tam.lab.experiments.llm import report_extras as extras
from tam.lab.experiments.llm import trial
from tam.lab.experiments.llm.mteb.local_data import GENERATED, READERS
from tam.lab.experiments.llm.paper_tables.claims import check_two_thirds
from tam.lab.experiments.llm.variants import ADAMW, ADATAMW, CORRECTED, UNTUNED, make_variants
from tam.lab.models.language import TINY, register_model

CHOICES = {
    "outcome": "validation perplexity of the best epoch, by which lrs are chosen, too; test perplexity is "
    "that of the same network. Verdicts are of perplexity; the scores on MTEB, of which the paper speaks, "
    "have their differences seed by seed, and no verdict.",
    "text": "WikiText-2, tokenised, lines put end to end in blocks of 512 tokens; the paper does not say "
    "which WikiText. <unk> stands for rare words in it.",
    "batch": "8 blocks: Hugging Face's default; on several ranks they share it.",
    "lr": "the paper's grid. At equal lr AdaTAMW's settled steps are 5 times AdamW's, and its first ones "
    "larger still: next to it run AdaTAMW over a fifth of the grid, AdamW over five times it, and AdaTAMW "
    "with bias correction over a fifth.",
    "settings": "Hugging Face's defaults: weight decay 0, gradients clipped at norm 1, linear decay to 0, no "
    "warm-up.",
    "masks": "15% of the tokens; drawn from seed and step, as are the order and dropout. Those of the "
    "validation text are always the same; perplexity is that of all its masked tokens.",
    "embedding": "the mean of the last layer's states: the paper does not say.",
    "head": "where a model has no masked-LM head, it begins tied to the embeddings and otherwise new.",
    "precision": "bfloat16 autocast on GPUs, float32 on CPUs; parameters and state are float32.",
}
PAPER = (
    "on MTEB AdaTAMW is similar to AdamW or better in at least 28 of the 42 configurations of each family of "
    "models; it reports no perplexity."
)
EPOCHS = (3, 5, 10)
MODELS = {
    "BERT-base": "bert-base-uncased", "BERT-large": "bert-large-uncased",
    "DeBERTa-base": "microsoft/deberta-base", "DeBERTa-large": "microsoft/deberta-large",
    "RoBERTa-base": "roberta-base", "RoBERTa-large": "roberta-large",
}  # fmt: skip
TASKS = tuple(task for task in READERS if task != GENERATED)


def study(name: str, model: str | None, epochs: int, **workload: Any) -> Study:
    return Study(
        f"{name}-{epochs}",
        f"{name}, {epochs} epochs",
        {"model": model, "epochs": epochs, "tasks": TASKS, **workload},
        make_variants(), baseline=ADAMW, seeds=(0, 1, 2), tuning_seeds=(100,), outcome="perplexity",
        label="validation perplexity", test_label="test perplexity", higher=False, margin=0.05, digits=3,
        choices={"the paper says": PAPER},
    )  # fmt: skip


def fair(epochs: int) -> Study:
    """Return the study with one range of effective lr for all. There FIFTH and FIVE_TIMES are duplicates."""
    whole = study("encoder", None, epochs)
    variants = tuple(replace(whole.variant(name), against=()) for name in (ADAMW, ADATAMW, CORRECTED))
    tuned = presets.fair(replace(whole, variants=variants), middle=1e-5)
    return replace(tuned, variants=(*tuned.variants, whole.variant(UNTUNED)))


def smoke() -> tuple[Study, ...]:
    workload = {"data": "generated", "block": 32, "batch": 8, "tasks": (GENERATED,)}
    choices = {
        "text": "generated, 400 lines, and a random BERT of two layers: to show that everything runs.",
        "lr": "one.",
    }
    studies = []
    for epochs in (1, 2):
        whole = study("tiny", TINY, epochs, **workload)
        variants = tuple(replace(variant, lrs=variant.lrs[-1:]) for variant in whole.variants)
        studies.append(
            replace(whole, variants=variants, seeds=(0, 1), tuning_seeds=(), choices=choices, small=True)
        )
    return tuple(studies)


def resolve_model(model: str, out: Path, data_folder: Path) -> dict[str, str]:
    return {"model": register_model(model, out)}


def resolve_tasks(names: str, out: Path, data_folder: Path) -> dict[str, list[str]]:
    """Return the setting `tasks` for NAME,NAME."""
    return {"tasks": [name.strip() for name in names.split(",") if name.strip()]}


def override(study: Study, overrides: Mapping[str, Any]) -> Study:
    """Return the study with the model and tasks of the options. A model is part of the title."""
    model, title = overrides.get("model"), study.title
    if model is not None:
        if study.workload["model"] is not None:
            raise LabError(f"the study {study.name} has a model of its own: --model is for others")
        title = f"{model.partition('#')[0]}, {title}"
    return replace(study, title=title, workload={**study.workload, **overrides})


EXPERIMENT = Experiment(
    name="llm",
    title="Fine-tuning language models (the paper's section 4.2)",
    config=trial.Config,
    run=trial.run,
    presets={
        "paper": tuple(study(name, model, n) for name, model in MODELS.items() for n in EPOCHS),
        "encoder": tuple(study("encoder", None, n) for n in EPOCHS),
        "fair": tuple(fair(n) for n in EPOCHS),
        "quick": (replace(study("encoder", None, 1), seeds=(0,)),),
        "smoke": smoke(),
    },
    choices=CHOICES,
    curves=(
        Curve("loss", "Training loss", "cross-entropy, epoch mean"),
        Curve("perplexity", "Validation perplexity", "perplexity"),
        Curve("alignment", "Alignment s", "s, epoch mean"),
    ),
    metrics=(Metric("loss"), Metric("perplexity", higher_is_better=False), Metric("alignment", "+.3f")),
    options=(
        RunOption(name="model", help="The model to fine-tune: a folder, or a name on Hugging Face's hub.",
                  metavar="NAME=FOLDER|NAME", resolve=resolve_model),
        RunOption(name="tasks", help="Tasks of MTEB, '' for none. `tam lab score` can add some later.",
                  metavar="NAME,...", resolve=resolve_tasks),
    ),
    override=override, check=trial.check, claims=(10,), computed={"mteb-shares": check_two_thirds},
    runs_on_ranks=True, one_per_process=True,
    extras=ReportExtras(figures=extras.figures, lines=extras.lines, tables=extras.tables),
)  # fmt: skip
