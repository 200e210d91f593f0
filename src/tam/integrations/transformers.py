"""Hugging Face's Trainer: AdaTAMW from its TrainingArguments, and s, d and |g| in its logs."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.optimizer import Optimizer, ParamsT

from tam._extras import missing
from tam.integrations import has_readings, may_have_readings, no_readings_error, readings
from tam.optimizers import AdaTAMW

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise missing("tam.integrations.transformers", "transformers", error) from error

# What the Trainer gives its AdamW, and the TrainingArguments that it comes from.
_ADAMW_ARGUMENTS = {
    "lr": "learning_rate", "betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}  # fmt: skip


class _MatchingAdamW(AdaTAMW):
    """Makes the AdaTAMW that matches an AdamW. It is a class because the Trainer calls no function.

    The conversion cannot be done earlier: the Trainer puts `weight_decay` of its arguments into the groups,
    and a search of hyperparameters changes the arguments.
    """

    def __new__(  # type: ignore[misc]
        cls, params: ParamsT, training_arguments: TrainingArguments, **options: Any
    ) -> AdaTAMW:
        args = training_arguments
        optimizer = AdaTAMW.matching_adamw(
            params, lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon,
            weight_decay=args.weight_decay, **options,
        )  # fmt: skip
        optimizer.register_load_state_dict_pre_hook(_refuse_foreign)
        return optimizer


def _refuse_foreign(optimizer: Optimizer, checkpoint: dict[str, Any]) -> None:
    """Raise for a checkpoint of AdamW: the Trainer would load its scheduler, too, with AdamW's rates."""
    if any("smoothing" not in group for group in checkpoint["param_groups"]):
        raise ValueError(
            "the Trainer's checkpoint is of another optimizer, and its scheduler has that optimizer's "
            "learning rates. Convert the checkpoint (docs/guides/transformers.md shows how), or start from "
            "its weights"
        )


def optimizer_for(
    training_arguments: TrainingArguments, **options: object
) -> tuple[type[AdaTAMW], dict[str, object]]:
    """Return AdaTAMW for `Trainer(optimizer_cls_and_kwargs=...)`, to match the AdamW of the arguments.

    The hyperparameters of AdamW are `learning_rate`, `adam_beta1`, `adam_beta2`, `adam_epsilon` and
    `weight_decay` of the arguments. `AdaTAMW.matching_adamw` converts them when the Trainer makes the
    optimizer: a fifth of the lr and 5 times the weight decay, with `bias_correction=True`. Biases and norms
    have no weight decay, as with the Trainer's AdamW.

    Args:
        training_arguments: the arguments that the Trainer gets. They are read when it makes the optimizer
        options: AdaTAMW's own options, such as `scope` or `max_grad_norm`, and `alignment`, the $s^*$ of the
            conversion (0 by default)

    Returns:
        The pair for the Trainer. The optimizer that it makes loads no checkpoint of AdamW: that would bring
        AdamW's learning rates back with the scheduler.

    Raises:
        TypeError: if an option is one of the hyperparameters that the arguments give
        ValueError: if `optim` of the arguments is not an AdamW: no rule converts its learning rate

    Examples:
        >>> import tempfile, torch
        >>> from transformers import Trainer, TrainingArguments
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = TrainingArguments(folder, learning_rate=1e-3, weight_decay=0.1, use_cpu=True)
        ...     pair = optimizer_for(args, max_grad_norm=1.0)
        ...     trainer = Trainer(torch.nn.Linear(2, 1), args, optimizer_cls_and_kwargs=pair)
        >>> optimizer = trainer.create_optimizer()
        >>> [(round(group["lr"], 6), round(group["weight_decay"], 6)) for group in optimizer.param_groups]
        [(0.0002, 0.5), (0.0002, 0.0)]
    """
    args = training_arguments
    if not args.optim.startswith(("adamw", "paged_adamw")):
        given = getattr(args.optim, "value", args.optim)
        raise ValueError(
            f'optim must be an AdamW, such as "adamw_torch", got "{given}": no rule converts its learning '
            "rate. Give the Trainer "
            'optimizer_cls_and_kwargs=(tam.AdaTAMW, {"lr": ...}) instead'
        )
    for name in options:
        if name in _ADAMW_ARGUMENTS:
            raise TypeError(f"{name} comes from the TrainingArguments: set {_ADAMW_ARGUMENTS[name]} there")
    return _MatchingAdamW, {"training_arguments": args, **options}


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
