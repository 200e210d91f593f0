"""Masked-LM fine-tuning through Hugging Face's Trainer: a trial of the paper's section on language models.

Order, masks and dropout depend on the seed and the step alone. So a run that was killed ends like one that
was not, and all variants of a seed see the same draws. The network of the epoch with the lowest validation
perplexity is kept and evaluated on MTEB's tasks.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tam.lab.core.config import TrialConfig, effective_settings
from tam.lab.core.errors import LabError
from tam.lab.core.store import TrialFolder, digest_of, digest_of_folder, remove_path
from tam.lab.data import text
from tam.lab.engines.torchrun import Ranks
from tam.lab.experiments.llm import checkpoints, tokens
from tam.lab.experiments.llm.masked import BackwardPass, MaskedLoss, compile_layers
from tam.lab.experiments.llm.mteb import scoring
from tam.lab.models import count_parameters, language
from tam.lab.models.language import locate_model, transformers
from tam.lab.training.damping_control import load_source_alignment
from tam.lab.training.factory import make_optimizer
from tam.lab.training.loop import Progress, StepRecorder

EVALUATION_BATCH = 32  # blocks
CLOCK_STEPS = 20  # from one look at the clock to the next: ranks must agree on it


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """Everything that determines a trial. With 0 epochs the network is evaluated as it is."""

    model: str | None  # on the hub, NAME#DIGEST or "tiny-bert"; None: the preset needs --model
    data: str = "wikitext-2"
    block: int = 512  # tokens
    batch: int = 8  # blocks, on all ranks together
    tasks: tuple[str, ...] = ()  # of MTEB

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 0 or min(self.block, self.batch) < 1:
            raise ValueError("epochs must be at least 0, block and batch at least 1")


def check(config: Config, data_folder: Path) -> None:
    """Raise an error if the model, the text or the tasks are missing."""
    if config.model is None or (config.model != language.TINY and "#" not in config.model):
        language.load_tokenizer(locate_model(config.model, Path()), config.block)
    for part, lines in text.read(config.data, data_folder).items():
        # The number of tokens is not known yet: there can be one per byte, and two around a line.
        count = sum(len(line.encode()) + 2 for line in lines)
        tokens.check_token_count(count, config.data, part, config.block, config.batch)
    scoring.check_tasks(config.tasks, data_folder)


def trainer_arguments(config: Config, folder: Path, device: torch.device, steps: int, ranks: int) -> Any:
    """Return Hugging Face's defaults, except for what the lab does: precision, evaluation, saving, logs."""
    return transformers().TrainingArguments(
        output_dir=str(folder / checkpoints.FOLDER), max_steps=max(steps, 1), seed=config.seed,
        learning_rate=config.lr, per_device_train_batch_size=config.batch // ranks,
        use_cpu=device.type == "cpu", remove_unused_columns=False,
        disable_tqdm=True, report_to=[], logging_strategy="no", save_strategy="no", eval_strategy="no",
        save_total_limit=2, logging_nan_inf_filter=False,  # the filter waits for the device at every step
    )  # fmt: skip


class Training:
    """A Trainer on the lab's draws, the state of the trial, and the files it leaves."""

    def __init__(
        self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float
    ) -> None:
        self.config, self.folder, self.save_every = config, folder, save_every
        self.ranks = Ranks(device)
        if config.batch % self.ranks.count:
            raise LabError(f"a batch of {config.batch} cannot be shared by {self.ranks.count} ranks")
        root = folder.path.parent.parent
        if self.ranks.rank == 0:
            locate_model(config.model, root)  # writes files on this rank alone
        self.ranks.wait()
        source = locate_model(config.model, root)
        self.tokenizer = language.load_tokenizer(source, config.block)
        shape = config.block, config.batch
        self.blocks = tokens.load_blocks(config.data, self.tokenizer, *shape, root, data_folder)
        self.steps_per_epoch = len(self.blocks["train"]) // config.batch
        self.steps = self.steps_per_epoch * config.epochs
        self.collate = tokens.MaskingCollator(self.tokenizer)
        self.model, self.new_weights = language.load_model(source, config.seed)
        self.model.train()
        fused = {"fused": True} if device.type == "cuda" and config.optimizer == "adamw" else {}
        self.optimizer = make_optimizer(config, self.model.parameters(), config.lr, **fused)
        self.settings = effective_settings(config, self.optimizer)
        source_alignment = load_source_alignment(config, folder, self.optimizer)
        self.recorder = StepRecorder(  # it measures the loss
            self.steps, device, source_alignment, source_name=config.damping_of, measurements=1
        )
        self.step_loss = torch.zeros((), device=device)
        self.best_perplexity, self.best_epoch, self.best_digest = math.inf, 0, ""
        self.start = self.last_save = time.monotonic()
        self.loss = MaskedLoss(self.model)
        self.trainer = _make_trainer(self, device)

    def before_step(self, step: int) -> None:
        """Seed dropout from the step, so earlier draws do not matter."""
        torch.manual_seed(tokens.draw_seed(self.config.seed, step * 1009 + self.ranks.rank, tokens.DROPOUT))

    def end_epoch(self, epoch: int) -> float:
        """Log the metrics of an epoch, and keep the network if it is the best one so far. Return the loss."""
        rows = self.recorder.values[(epoch - 1) * self.steps_per_epoch : epoch * self.steps_per_epoch]
        loss = self.ranks.add(rows[:, 0].double().mean())[0] / self.ranks.count  # the same on all ranks
        metrics = {"epoch": epoch, "loss": loss, "perplexity": self.perplexity("valid")}
        alignment = float(rows[:, 1].cpu().double().mean())
        if not math.isnan(alignment):
            metrics["alignment"] = alignment
        self.folder.log(metrics)
        if metrics["perplexity"] < self.best_perplexity:
            self.best_perplexity, self.best_epoch = metrics["perplexity"], epoch
            self.keep_model()
        self.folder.report_progress(Progress(epoch, self.config.epochs, metrics))
        return loss

    def is_save_due(self) -> bool:
        is_due = self.ranks.rank == 0 and time.monotonic() - self.last_save > self.save_every
        return self.ranks.add(float(is_due))[0] > 0  # all ranks save, or none

    def complete_checkpoint(self, step: int) -> None:
        """Add the lab's state to the checkpoint that the Trainer has just written."""
        # The losses differ between ranks: keep everyone's.
        recorded = self.recorder.state_dict()
        values = self.ranks.gather(recorded.pop("values")).cpu()
        segments = {name: tensor.cpu() for name, tensor in recorded.items()}  # the same on all ranks
        self.ranks.wait()  # every rank has written its files
        if self.folder.writes:
            state = {
                **segments, "values": values, "rows": self.folder.rows,
                "seconds": time.monotonic() - self.start, "best": self.best_perplexity,
                "at": self.best_epoch, "best_digest": self.best_digest,
            }  # fmt: skip
            path = self.folder.path / checkpoints.FOLDER / f"checkpoint-{step}"
            checkpoints.complete_checkpoint(path, state)
            self.remove_other_models()
        self.last_save = time.monotonic()

    @torch.no_grad()
    def perplexity(self, part: str) -> float:
        """Return the perplexity of a part's masked tokens: the same ones for every network and rank count."""
        blocks, device = self.blocks[part], self.ranks.device
        total, count = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
        self.model.eval()
        own_rows = [
            tokens.Row(blocks.ids[i], blocks.special[i], tokens.draw_seed(0, i, tokens.EVALUATION))
            for i in range(self.ranks.rank, len(blocks), self.ranks.count)
        ]
        for first in range(0, len(own_rows), EVALUATION_BATCH):
            rows = self.collate(own_rows[first : first + EVALUATION_BATCH])
            batch = {key: value.to(device) for key, value in rows.items()}
            predicted = (batch["labels"] != tokens.IGNORED).sum()
            with torch.compiler.set_stance("force_eager"):  # such a shape comes once per epoch
                loss = self.loss(self.model, batch)
            total += torch.where(predicted > 0, loss.double() * predicted, 0.0)
            count += predicted
        self.model.train()
        loss_sum, predicted_by_all = self.ranks.add(total, count)
        return math.exp(min(loss_sum / predicted_by_all, 700.0)) if predicted_by_all else math.nan

    def model_path(self, epoch: int) -> Path:
        """Return where the best network is: that of an epoch, or with its final name at the end of a run."""
        final = self.folder.path / "model"
        return final if final.exists() else self.folder.path / f"model-{epoch:03d}"

    def keep_model(self) -> None:
        """Write the network. The one before stays until a checkpoint names this one as the best."""
        if self.folder.writes:
            part, path = self.folder.path / ".model.part", self.model_path(self.best_epoch)
            self.model.save_pretrained(part)
            self.tokenizer.save_pretrained(part)
            remove_path(path)  # of a run that was killed
            part.replace(path)
            self.best_digest = digest_of_folder(path)

    def remove_other_models(self) -> None:
        for path in self.folder.path.glob("model-*"):
            if path != self.model_path(self.best_epoch):
                remove_path(path)

    def load(self) -> str | None:
        """Load the newest intact checkpoint and return it. Damaged ones are removed."""
        leftovers = [self.folder.path / name for name in ("model", "embeddings")]  # of an earlier run
        for path in [*leftovers, self.folder.path / checkpoints.FOLDER] if self.folder.writes else []:
            if path.is_symlink() or not path.is_dir():  # a file or a link where a folder is written
                remove_path(path)
        self.ranks.wait()
        checkpoint, rows = None, []
        for path in checkpoints.list_checkpoints(self.folder.path):
            state = checkpoints.read_checkpoint(path)
            if state is not None and self._has_best_model(state["at"], state["best_digest"]):
                checkpoint, rows = str(path), list(state["rows"])
                values: Tensor = state["values"]  # [ranks, steps, 2]
                own = values[self.ranks.rank] if len(values) == self.ranks.count else values.mean(0)
                self.recorder.load_state_dict({**state, "values": own})
                self.best_perplexity, self.best_epoch = state["best"], state["at"]
                self.best_digest = state["best_digest"]
                self.start -= state["seconds"]  # of the runs before a kill
                break
            warnings.warn(f"{path} is damaged: continuing from the checkpoint before it", stacklevel=2)
            if self.folder.writes:
                remove_path(path)
        if checkpoint is None and self.folder.writes:
            for path in leftovers:
                remove_path(path)
        self.folder.begin_with(rows)
        self.ranks.wait()
        return checkpoint

    def _has_best_model(self, epoch: int, digest: str) -> bool:
        """Return whether the best network that a checkpoint names is there and intact. There may be none."""
        path = self.model_path(epoch)
        return epoch == 0 or (path.is_dir() and digest_of_folder(path) == digest)

    def result(self) -> dict[str, Any]:
        rows = self.folder.rows
        last = rows[-1] if rows else {"loss": 0.0, "perplexity": self.best_perplexity}
        is_finite = all(math.isfinite(last[key]) for key in ("loss", "perplexity"))
        return {
            "perplexity": self.best_perplexity if is_finite else math.inf, "at": self.best_epoch,
            "epochs": len(rows), "loss": last["loss"] if rows else None, "diverged": not is_finite,
            "steps": self.steps, "ranks": self.ranks.count, "blocks": len(self.blocks["train"]),
            "text": digest_of(self.blocks["train"].ids.numpy().tobytes()), "new": self.new_weights,
            "parameters": count_parameters(self.model), "settings": self.settings,
            "transformers": transformers().__version__,  # whose defaults these are
        }  # fmt: skip


def _make_trainer(training: Training, device: torch.device) -> Any:
    package, config, ranks = transformers(), training.config, training.ranks
    is_compiled = device.type == "cuda" and compile_layers(training.model)
    backward = BackwardPass(training.loss, device, graph=is_compiled and ranks.count == 1)

    class LabTrainer(package.Trainer):  # type: ignore[misc, name-defined]
        """Takes the blocks in their order, and leaves every step's loss."""

        def get_train_dataloader(self) -> Any:
            size = self.args.per_device_train_batch_size
            loader = DataLoader(self.train_dataset, size, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            training.before_step(self.state.global_step)
            training.step_loss = backward(model, self._prepare_inputs(inputs))
            return training.step_loss

    class LabCallback(package.TrainerCallback):  # type: ignore[misc, name-defined]
        """The lab's part of a step."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            training.recorder.before_step(training.optimizer)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            training.recorder.after_step(training.step_loss)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            is_epoch_end = state.global_step % training.steps_per_epoch == 0
            if is_epoch_end:
                loss = training.end_epoch(state.global_step // training.steps_per_epoch)
                control.should_training_stop |= not math.isfinite(loss)
            is_last = control.should_training_stop or state.global_step >= state.max_steps
            reads_clock = is_epoch_end or state.global_step % CLOCK_STEPS == 0
            control.should_save = is_last or (reads_clock and training.is_save_due())

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            training.complete_checkpoint(state.global_step)

    trainer = LabTrainer(
        model=training.model,
        args=trainer_arguments(config, training.folder.path, device, training.steps, ranks.count),
        data_collator=training.collate,
        train_dataset=tokens.EpochSequence(training.blocks["train"], config),
        optimizers=(training.optimizer, None),
        callbacks=[LabCallback()],
    )
    trainer.remove_callback(package.PrinterCallback)
    trainer.model_accepts_loss_kwargs = False  # a masked-LM head takes the mean: nothing is counted
    if trainer.args.n_gpu > 1:
        raise LabError("the Trainer uses all GPUs it sees: set CUDA_VISIBLE_DEVICES, or start with torchrun")
    return trainer


def run(
    config: Config, folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float = 60.0
) -> Iterator[Progress | None]:
    """Fine-tune from the last checkpoint, then evaluate the best network and write what stays of the trial.

    The Trainer does not return before the end of training. So a process runs one trial at a time, and epochs
    are reported by `folder.report_progress` instead of being yielded.
    """
    training = Training(config, folder, data_folder, device, save_every)
    checkpoint = training.load()
    last_loss = float(folder.rows[-1]["loss"]) if folder.rows else 0.0
    if config.epochs == 0:
        training.trainer.accelerator.prepare(training.model)  # to its device
        training.best_perplexity = training.perplexity("valid")
        training.keep_model()
    elif training.recorder.steps_taken < training.steps and math.isfinite(last_loss):
        training.trainer.train(resume_from_checkpoint=checkpoint)
    yield None
    result = training.result()
    if config.test and not result["diverged"]:
        training.ranks.wait()  # until rank 0 has written it
        best, _ = language.load_model(str(training.model_path(training.best_epoch)), 0)
        training.model.to(device).load_state_dict(best.state_dict())
        result["test"] = training.perplexity("test")
    if not folder.writes:
        return
    training.remove_other_models()
    if not config.test or result["diverged"]:
        remove_path(training.model_path(training.best_epoch))
    else:
        training.model_path(training.best_epoch).rename(folder.path / "model")
        if training.ranks.count == 1:  # the others would time out: `tam lab score` does it then
            scoring.score_trial(folder.path, config.tasks, data_folder, device)
    if not result["diverged"]:
        training.recorder.write_alignment(folder)
    folder.finish(result, time.monotonic() - training.start, device)
    remove_path(folder.path / checkpoints.FOLDER)
