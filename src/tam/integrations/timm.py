"""timm: the optimizers by name. Importing this module registers "tam", "adatam" and "adatamw" with timm.

Examples:
    >>> import timm.optim, torch
    >>> import tam.integrations.timm
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = timm.optim.create_optimizer_v2(model, "tam", lr=0.2, weight_decay=1e-4)
    >>> type(optimizer).__name__
    'TAM'
"""

from __future__ import annotations

from tam._extras import missing
from tam.optimizers import TAM, AdaTAM, AdaTAMW

try:
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry  # there is no public name
except ImportError as error:
    raise missing("tam.integrations.timm", "timm", error) from error

# `has_eps` and `has_betas` say which options of timm's scripts the class takes; timm drops the others.
for info in (
    OptimInfo("tam", TAM, "SGD with torque-aware momentum", has_eps=False, has_momentum=True),
    OptimInfo("adatam", AdaTAM, "Adam with torque-aware momentum", has_betas=True),
    OptimInfo("adatamw", AdaTAMW, "AdaTAM with decoupled weight decay", has_betas=True),
):
    default_registry.register(info)
