"""Lightning: s, d and |g| in its logs."""

from __future__ import annotations

from tam._extras import missing
from tam.integrations import has_readings, may_have_readings, no_readings_error, readings

try:
    from lightning import Callback, LightningModule, Trainer
except ImportError as error:
    raise missing("tam.integrations.lightning", "lightning", error) from error


class TorqueCallback(Callback):
    """Logs `tam/alignment`, `tam/damping` and `tam/grad_norm` whenever the Trainer logs.

    With several optimizers, the names end in the optimizer's index, like `tam/alignment/1`, and optimizers
    without an alignment are left out. Training raises a `TypeError` if no optimizer has one.

    Examples:
        >>> import torch, tam
        >>> from lightning import LightningModule, Trainer
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...
        ...     def configure_optimizers(self):
        ...         return tam.TAM(self.parameters(), lr=0.1)
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        >>> options = {"accelerator": "cpu", "max_epochs": 1, "enable_checkpointing": False, **quiet}
        >>> trainer = Trainer(callbacks=[TorqueCallback()], log_every_n_steps=2, **options)
        >>> trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 2)))
        >>> sorted(trainer.logged_metrics)
        ['tam/alignment', 'tam/damping', 'tam/grad_norm']
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if no optimizer has an alignment."""
        if not any(may_have_readings(optimizer) for optimizer in trainer.optimizers):
            raise no_readings_error(*trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log the readings if the Trainer logs this step."""
        # Lightning's own callbacks ask here, too; there is no public name.
        if not trainer._logger_connector.should_update_logs:
            return
        for i, optimizer in enumerate(trainer.optimizers):
            if has_readings(optimizer):
                suffix = f"/{i}" if len(trainer.optimizers) > 1 else ""
                # Tensors: the host waits for them when a logger needs numbers, not here.
                values = {name + suffix: value for name, value in readings(optimizer).items()}
                pl_module.log_dict(values, on_step=True, on_epoch=False)
