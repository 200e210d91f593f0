"""The optimizers that the lab knows by name: those of `tam.registry`, and those it only studies.

- `rule.py`: the rules, for a stack of runs
- `variants.py`: the same as an optimizer of one network
- `schedule_free.py`: schedule-free AdamW for a stack of runs, by its authors' package
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import AdamW

from tam import registry
from tam.lab.optimizers.rule import Rule
from tam.lab.optimizers.variants import TAMVariant
from tam.optimizers import AdaTAMW
from tam.options import two_betas
from tam.registry import OptimizerInfo

SCHEDULE_FREE = "schedule-free-adamw"
STUDIED: Mapping[str, OptimizerInfo] = {
    info.name: info
    for info in (
        OptimizerInfo("tam-variant", "TAM variant", TAMVariant, None, ()),
        # The others train in populations, whose steps `Rule` describes. The classes say which lr they share.
        OptimizerInfo("adatamw-variant", "AdaTAMW variant", AdaTAMW, None, ()),
        OptimizerInfo("c-adamw", "C-AdamW", AdamW, None, ()),
        OptimizerInfo("hypergradient-adamw", "AdamW with hypergradient descent", AdamW, None, ()),
        OptimizerInfo(SCHEDULE_FREE, "Schedule-free AdamW", AdamW, None, ()),
    )
}
ONLY_IN_POPULATIONS = STUDIED.keys() - {"tam-variant"}


def get(name: str) -> OptimizerInfo:
    """Return the optimizer of this name.

    Raises:
        ValueError: If there is none.
    """
    if name.lower() in STUDIED:
        return STUDIED[name.lower()]
    try:
        return registry.get(name)
    except ValueError as error:
        raise ValueError(f"{error}, {', '.join(STUDIED)}") from error


def rule_of(name: str, options: Mapping[str, Any]) -> Rule:
    """Return the rule of an optimizer with these options.

    Raises:
        ValueError: If the lab has no rule for it, or an option has a wrong value.
        TypeError: If the rule has no such option.
    """
    name, own = get(name).name, dict(options)
    adatamw = {"adaptive": True}
    adamw = {"adaptive": True, "torque": False, "bias_correction": True}
    fixed_by_name: dict[str, dict[str, Any]] = {
        "sgdm": {"torque": False}, "tam": {}, "tam-variant": {},
        "adatamw": adatamw, "adatamw-variant": adatamw,
        "adamw": adamw, "c-adamw": {**adamw, "cautious": True}, "hypergradient-adamw": adamw,
        SCHEDULE_FREE: {"adaptive": True, "torque": False},
    }  # fmt: skip
    if name not in fixed_by_name:
        raise ValueError(f"the lab has no rule for the optimizer {name!r}")
    fixed = dict(fixed_by_name[name])
    if "adaptive" in fixed:
        betas = own.pop("betas", (0.9, 0.999))
        two_betas("betas", betas)
        fixed["momentum"], fixed["beta2"] = betas
        own.setdefault("weight_decay", 0.01)  # AdamW's and AdaTAMW's default
    if name == "hypergradient-adamw":
        fixed["hypergradient"] = own.pop("hyper_lr", 0.02)
    return Rule(**fixed, **own)
