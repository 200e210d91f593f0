"""`tam lab list`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tam.lab.commands.options import AsJson
from tam.lab.core.errors import LabError
from tam.lab.core.registry import Experiment, experiment_names, get_experiment
from tam.lab.core.study import Ladder


def list_experiments(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="EXPERIMENT",
            help="Show all studies and variants of this experiment.",
            autocompletion=experiment_names,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the experiments and their presets."""
    experiments, errors = load_experiments() if name is None else ([get_experiment(name)], {})
    entries = [describe(experiment) for experiment in experiments]
    if as_json:
        failed = [{"name": failed_name, "error": error} for failed_name, error in errors.items()]
        print(json.dumps([*entries, *failed], indent=1))
        return
    for entry in entries:
        print(f"{entry['name']}: {entry['title']}")
        if name is None:
            print(f"  presets {', '.join(entry['presets'])}")
            continue
        for preset, studies in entry["presets"].items():
            print(f"  --preset {preset}")
            for study in studies:
                variants = ", ".join(f'"{variant}"' for variant in study["variants"])
                ladder = f" ({study['ladder']})" if "ladder" in study else ""
                size = f"up to {study['trials']} trials{ladder}, {study['length']} {study['unit']}s"
                print(f"    --study {study['study']}: {size}; variants {variants}")
    for failed_name, error in errors.items():
        print(f"{failed_name}: cannot be loaded: {error}")


def load_experiments() -> tuple[list[Experiment], dict[str, str]]:
    """Return all experiments, and what is wrong with those that cannot be loaded."""
    experiments, errors = [], {}
    for name in experiment_names():
        try:
            experiments.append(get_experiment(name))
        except LabError as error:
            errors[name] = str(error.__cause__ or error)
    return experiments, errors


def describe(experiment: Experiment) -> dict[str, Any]:
    """Return what `--json` prints of an experiment."""
    presets = {
        preset: [
            {
                "study": study.name, "title": study.title, "trials": study.trials(),
                "length": study.workload["epochs"], "unit": getattr(experiment.config, "unit", "epoch"),
                "variants": [variant.name for variant in study.variants],
                **({"ladder": describe_ladder(study)} if isinstance(study, Ladder) else {}),
            }
            for study in studies
        ]
        for preset, studies in experiment.presets.items()
    }  # fmt: skip
    return {"name": experiment.name, "title": experiment.title, "presets": presets}


def describe_ladder(study: Ladder) -> str:
    """Return the size of a ladder in words."""
    counts = sorted({len(study.grid(variant)) for variant in study.variants})
    rungs = " to ".join(dict.fromkeys(map(str, (counts[0], counts[-1]))))
    seeds = len(study.seeds)
    return f"a ladder: {rungs} rungs x {seeds} seed{'s' if seeds > 1 else ''} per variant"
