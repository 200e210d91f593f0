"""Fine-tuning language models with AdaTAMW (the paper's section 4.2): WikiText, then MTEB.

A process runs one trial at a time and ignores `--together`: the Trainer cannot be interleaved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tam.lab.core import controls, presets
from tam.lab.core.errors import LabError
from tam.lab.core.registry import Experiment, ReportExtras, RunOption
from tam.lab.core.study import Curve, Metric, Study, Variant
from tam.lab.core.toml import read_toml
from tam.lab.experiments.llm import report_extras as extras
from tam.lab.experiments.llm import trial
from tam.lab.experiments.llm.mteb.local_data import GENERATED, TASKS
from tam.lab.experiments.llm.paper_tables.claims import check_two_thirds
from tam.lab.experiments.llm.variants import ADAMW, ADATAMW, FIFTH, FIVE_TIMES, NO_DECAY, UNTUNED, VARIANTS
from tam.lab.models.language import TINY, register_model

NOTES = read_toml(Path(__file__).parent / "notes.toml")
EPOCHS = (3, 5, 10)
MODELS = {
    "BERT-base": "bert-base-uncased", "BERT-large": "bert-large-uncased",
    "DeBERTa-base": "microsoft/deberta-base", "DeBERTa-large": "microsoft/deberta-large",
    "RoBERTa-base": "roberta-base", "RoBERTa-large": "roberta-large",
}  # fmt: skip


def study(name: str, model: str | None, epochs: int, **workload: Any) -> Study:
    return Study(
        f"{name}-{epochs}",
        f"{name}, {epochs} epochs",
        {"model": model, "epochs": epochs, "tasks": TASKS, **workload},
        VARIANTS, baseline=ADAMW, seeds=(0, 1, 2), tuning_seeds=presets.TUNING_SEEDS, outcome="perplexity",
        label="validation perplexity", test_label="test perplexity", higher=False, margin=0.05, digits=3,
        choices=NOTES["study_choices"],
    )  # fmt: skip


def fair(epochs: int) -> Study:
    """Return the study with one range of effective lr for all. There FIFTH and FIVE_TIMES are duplicates."""
    whole = study("encoder", None, epochs)
    tuned = presets.fair(presets.without(whole, FIFTH, FIVE_TIMES, UNTUNED), middle=1e-5)
    return replace(tuned, variants=(*tuned.variants, whole.variant(UNTUNED)))


def registered(epochs: int) -> Study:
    """Return the study of claim 10's stand-in in registered.md, with its controls."""
    adamw, adatamw = (
        Variant(ADAMW, "adamw", (5e-5,), NO_DECAY),
        Variant(ADATAMW, "adatamw", (1e-5,), NO_DECAY),
    )
    constant = [one for one in controls.controls(adatamw) if one.damping == "mean"]
    variants = (adamw, adatamw, *constant, controls.another_seeds_damping(adatamw))
    return replace(study("encoder", None, epochs), variants=variants, seeds=(3, 4, 5), tuning_seeds=())


def smoke(epochs: int) -> Study:
    workload = {"data": "generated", "block": 32, "batch": 8, "tasks": (GENERATED,)}
    variants = tuple(replace(variant, lrs=variant.lrs[-1:]) for variant in VARIANTS)
    whole, choices = study("tiny", TINY, epochs, **workload), NOTES["smoke_choices"]
    return replace(whole, variants=variants, seeds=(0, 1), tuning_seeds=(), choices=choices, small=True)


def split_names(names: str) -> list[str]:
    """Return the tasks of NAME,NAME."""
    return [name.strip() for name in names.split(",") if name.strip()]


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
        "registered": tuple(registered(n) for n in EPOCHS),
        "quick": (replace(study("encoder", None, 1), seeds=(0,)),),
        "smoke": (smoke(1), smoke(2)),
    },
    choices=NOTES["choices"],
    curves=(
        Curve("loss", "Training loss", "cross-entropy, epoch mean"),
        Curve("perplexity", "Validation perplexity", "perplexity"),
        Curve("alignment", "Alignment s", "s, epoch mean"),
    ),
    metrics=(Metric("loss"), Metric("perplexity", higher_is_better=False), Metric("alignment", "+.3f")),
    options=(
        RunOption(name="model", help="The model to fine-tune: a folder, or a name on Hugging Face's hub.",
                  metavar="NAME=FOLDER|NAME",
                  resolve=lambda model, out, data_folder: {"model": register_model(model, out)}),
        RunOption(name="tasks", help="Tasks of MTEB, '' for none. `tam lab score` can add some later.",
                  metavar="NAME,...", resolve=lambda names, out, data_folder: {"tasks": split_names(names)}),
    ),
    override=override, data_fields=("data",), check=trial.check, claims=(10,),
    modules=("transformers", "accelerate"),
    computed={"mteb-shares": check_two_thirds}, runs_on_ranks=True, one_per_process=True,
    extras=ReportExtras(figures=extras.figures, lines=extras.lines, tables=extras.tables),
)  # fmt: skip
