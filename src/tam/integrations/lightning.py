"""Lightning: s, d and |g| in its logs."""

from __future__ import annotations

from typing import Any

from tam._extras import missing
from tam.integrations import complaint, has_readings, may_have_readings, readings

try:
    from lightning import Callback, LightningModule, Trainer
except ImportError as error:
    raise missing("tam.integrations.lightning", "lightning", error) from error


class TorqueCallback(Callback):
    """Logs `tam/alignment`, `tam/damping` and `tam/grad_norm` on the steps on which the Trainer logs.

    With several optimizers the names end in an optimizer's index, as in `tam/alignment/1`, and
    optimizers without an alignment are left out.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(may_have_readings(optimizer) for optimizer in trainer.optimizers):
            raise TypeError(complaint(*trainer.optimizers))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning's own callbacks ask here, too; there is no public name.
        if not trainer._logger_connector.should_update_logs:
            return
        for i, optimizer in enumerate(trainer.optimizers):
            if has_readings(optimizer):
                suffix = f"/{i}" if len(trainer.optimizers) > 1 else ""
                # Tensors: the host waits for them where a logger wants numbers, not here.
                found = {name + suffix: value for name, value in readings(optimizer).items()}
                pl_module.log_dict(found, on_step=True, on_epoch=False)
