"""Hugging Face's Trainer: s, d and |g| in its logs."""

from __future__ import annotations

import warnings
from typing import Any

from tam._extras import missing
from tam.integrations import has_readings, may_have_readings, no_readings_error, readings

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise missing("tam.integrations.transformers", "transformers", error) from error


class TorqueCallback(TrainerCallback):
    """Adds `tam/alignment`, `tam/damping` and `tam/grad_norm` to the Trainer's training logs.

    The callback reads them only when the Trainer logs, so no other step waits for the device. Attach it with
    `TorqueCallback.attach(trainer)`: the Trainer calls its reporters (`report_to`) before the callbacks it is
    given. With `Trainer(callbacks=[TorqueCallback()])`, the log history has the readings, but the reporters
    do not. Training raises a `TypeError` if the optimizer has no alignment.

    Examples:
        >>> import tempfile, torch, tam
        >>> from transformers import Trainer, TrainingArguments
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...
        ...     def forward(self, x):
        ...         return {"loss": self.layer(x).square().mean()}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, max_steps=4, logging_steps=2, report_to="none", use_cpu=True)
        ...     trainer = Trainer(
        ...         Model(),
        ...         args,
        ...         train_dataset=[{"x": torch.ones(2)}] * 8,
        ...         optimizer_cls_and_kwargs=(tam.TAM, {"lr": 0.1}),
        ...     )
        ...     callback = TorqueCallback.attach(trainer)
        ...     result = trainer.train()  # doctest: +ELLIPSIS
        {...'tam/alignment': ...}
        >>> [log["step"] for log in trainer.state.log_history if "tam/alignment" in log]
        [2, 4]
    """

    def __init__(self) -> None:
        self._precedes_reporters = False

    @classmethod
    def attach(cls, trainer: Trainer) -> TorqueCallback:
        """Put the trainer's TorqueCallback, or a new one, before its reporters.

        Args:
            trainer: the Trainer, before training

        Returns:
            The callback.
        """
        existing = trainer.pop_callback(cls)
        callback = existing if isinstance(existing, cls) else cls()
        callback._precedes_reporters = True
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise if the optimizer has no alignment; warn if the reporters come first."""
        if not may_have_readings(kwargs["optimizer"]):
            raise no_readings_error(kwargs["optimizer"])
        if args.report_to and not self._precedes_reporters:
            warnings.warn(
                f"TorqueCallback comes after the reporters {args.report_to}, which will not see its keys: "
                "call TorqueCallback.attach(trainer) before training",
                stacklevel=2,
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the readings to a log of the training loss."""
        logs, optimizer = kwargs["logs"], kwargs["optimizer"]
        if "loss" not in logs or not has_readings(optimizer):  # evaluations and the summary have no loss
            return
        values = {name: value.item() for name, value in readings(optimizer).items()}
        logs.update(values)
        state.log_history[-1].update(values)  # the Trainer has copied its logs there already
