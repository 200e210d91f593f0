"""Hugging Face's Trainer: s, d and |g| in its logs."""

from __future__ import annotations

import warnings
from typing import Any

from tam._extras import missing
from tam.integrations import complaint, has_readings, may_have_readings, readings

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise missing("tam.integrations.transformers", "transformers", error) from error


class TorqueCallback(TrainerCallback):
    """Adds `tam/alignment`, `tam/damping` and `tam/grad_norm` to the Trainer's training logs.

    They are read when the Trainer logs, and at no other step. The Trainer calls the reporters of
    `report_to` before the callbacks it is given; `TorqueCallback.attach(trainer)` puts this one before them.
    With `Trainer(callbacks=[TorqueCallback()])` the log history and the callbacks behind it have the
    readings, the reporters have not.
    """

    def __init__(self) -> None:
        self._before_reporters = False

    @classmethod
    def attach(cls, trainer: Trainer) -> TorqueCallback:
        """Puts the trainer's TorqueCallback, a new one where it has none, before its reporters."""
        found = trainer.pop_callback(cls)
        callback = found if isinstance(found, cls) else cls()
        callback._before_reporters = True
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not may_have_readings(kwargs["optimizer"]):
            raise TypeError(complaint(kwargs["optimizer"]))
        if args.report_to and not self._before_reporters:
            warnings.warn(
                f"TorqueCallback comes after the reporters {args.report_to}, which will not see its keys: "
                "call TorqueCallback.attach(trainer) before training",
                stacklevel=2,
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs, optimizer = kwargs["logs"], kwargs["optimizer"]
        if "loss" not in logs or not has_readings(optimizer):  # evaluations and the summary have no loss
            return
        found = {name: value.item() for name, value in readings(optimizer).items()}
        logs.update(found)
        state.log_history[-1].update(found)  # the Trainer has copied its logs there already
