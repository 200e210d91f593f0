"""Beyond the paper: the scope of the cosine, weight decay inside it, and larger batches."""

from __future__ import annotations

from typing import Any

from tam.lab.core import presets
from tam.lab.core.study import Study, Variant
from tam.lab.experiments.images.studies import CHOICES, NOTES, TUNED, image_experiment, image_study, variants

DECAY: dict[str, Any] = {"weight_decay": 5e-4}
SCOPE_VARIANTS = (
    Variant("SGDM", "sgdm", (0.1,), DECAY),
    Variant("TAM, global", "tam", (0.2,), {**DECAY, "scope": "global"}),
    Variant("TAM, group", "tam", (0.2,), {**DECAY, "scope": "group"}, {"grouped": True}),
    Variant("TAM, tensor", "tam", (0.2,), {**DECAY, "scope": "tensor"}),
    # The cosine uses the gradient with its decay, like code that adds the decay before the rule.
    Variant("TAM, decay inside", "tam", (0.2,), DECAY, {"decay_in_cosine": True}),
)
SCOPE_TITLE = "What one cosine is taken over: ResNet18 on CIFAR-10, weight decay 5e-4"
SCOPE = image_study("scope", SCOPE_TITLE, SCOPE_VARIANTS, baseline="TAM, global")


def batch_study(size: int) -> Study:
    """Return a study of larger batches. Gradients are less noisy and the cosine is larger: lr is searched."""
    grid = tuple(0.1 * 10 ** (i / 2) for i in range(-1, 3))
    compared = variants(5e-4, {"sgdm": grid, "tam": tuple(2 * lr for lr in grid)})
    title = f"Batches of {size}: ResNet18 on CIFAR-10, weight decay 5e-4"
    return image_study(f"batch{size}", title, compared, batch=size, **TUNED)


EXPERIMENT = image_experiment(
    name="beyond",
    title="Beyond the paper: scopes, weight decay in the cosine, batch sizes",
    presets=presets.presets((SCOPE, *map(batch_study, (512, 2048, 8192)))),
    choices={**CHOICES, **NOTES["beyond"]},
)
