"""Masked-LM fine-tuning through Hugging Face's Trainer: a trial of the paper's section on language models.

What is drawn (order, masks, dropout) depends on the seed and the step alone, so that a run that was killed
ends as if nothing had been, and all arms of a seed see the same. Of all epochs the network with the least
validation perplexity is kept, and evaluated on MTEB's tasks.
"""

from __future__ import annotations

import io
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tam import registry
from tam.lab.damping import (
    check_damping,
    check_length,
    given_alignment,
    keep_alignment,
    replace_alignment,
    watched,
)
from tam.lab.data import text
from tam.lab.embedding import score, tasks
from tam.lab.handed import handed
from tam.lab.making import make_optimizer
from tam.lab.masked import Backward, Loss, quicken
from tam.lab.models import parameters
from tam.lab.models.language import check_block, load_model, load_tokenizer, transformers, where
from tam.lab.ranks import Ranks
from tam.lab.store import LabError, TrialFolder, digest_of, write_whole
from tam.lab.tokens import (
    DROPOUT,
    IGNORED,
    MEASURED,
    Masks,
    Passes,
    Row,
    check_size,
    drawn_from,
    most_tokens,
    tokenized,
)
from tam.lab.trial import Progress, resolved, told


@dataclass(frozen=True)
class Config:
    """All that determines a trial. With 0 epochs the network is evaluated as it is."""

    model: str | None  # on the hub; or NAME#DIGEST, or "tiny-bert"; None in a preset that waits for one
    optimizer: str
    lr: float
    seed: int
    epochs: int
    data: str = "wikitext-2"
    block: int = 512  # tokens
    batch: int = 8  # blocks, on all ranks together
    tasks: tuple[str, ...] = ()  # of MTEB
    options: dict[str, Any] = field(default_factory=dict)
    damping: str | None = None
    damping_of: str | None = None
    test: bool = False  # whether the test text is read, and the tasks are run, once, at the end

    def __post_init__(self) -> None:
        registry.get(self.optimizer)
        if self.epochs < 0 or min(self.block, self.batch) < 1:
            raise ValueError("epochs must not be negative, block and batch at least 1")
        check_damping(self)


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**{**options, "tasks": tuple(options.get("tasks", ()))}))


def check(trial: dict[str, Any], data_folder: Path) -> None:
    """Raises where model, text or tasks are not there."""
    config = Config(**trial)
    if config.model is None or (config.model != "tiny-bert" and "#" not in config.model):
        check_block(where(config.model, Path()), config.block)  # a folder is noted, with the results
    for part, lines in text.check(config.data, data_folder).items():
        # The tokens themselves are not known before a trial has its tokenizer.
        check_size(f"{config.data}, {part}", most_tokens(lines), part, config.block, config.batch)
    tasks.check(config.tasks, data_folder)


# ---------------------------------------------------------------------- training


def arguments(config: Config, folder: Path, device: torch.device, steps: int, ranks: int) -> Any:
    """Hugging Face's defaults but for what the lab does itself: precision, evaluations, checkpoints, logs."""
    return transformers().TrainingArguments(
        output_dir=str(folder / "checkpoints"), max_steps=max(steps, 1), seed=config.seed,
        learning_rate=config.lr, per_device_train_batch_size=config.batch // ranks,
        use_cpu=device.type == "cpu", remove_unused_columns=False,
        disable_tqdm=True, report_to=[], logging_strategy="no", save_strategy="no", eval_strategy="no",
        save_total_limit=2, logging_nan_inf_filter=False,  # which waits for the device at every step
    )  # fmt: skip


class Watch:
    """What a run has shown so far."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []  # of the epoch's steps, on the device
        self.alignments: list[Tensor] = []
        self.past: list[Tensor] = []  # s of the epochs before
        self.best, self.at = math.inf, 0  # the least perplexity, and the epoch it is of
        self.seconds = 0.0

    def end_epoch(self) -> tuple[Tensor, float | None]:
        """The epoch's mean loss, and that of s if there is one."""
        loss = torch.stack(self.losses).double().mean()
        s = torch.stack(self.alignments).float().cpu() if self.alignments else None
        self.past += [] if s is None else [s]
        self.losses, self.alignments = [], []
        return loss, None if s is None else float(s.double().mean())

    def state_dict(self, ranks: Ranks) -> dict[str, Any]:
        """As it stands, in the middle of an epoch, too; of the losses, which ranks differ in, everyone's."""
        kept = {"past": torch.cat(self.past)} if self.past else {}
        kept |= {"losses": ranks.gather(torch.stack(self.losses)).cpu()} if self.losses else {}
        kept |= {"alignments": torch.stack(self.alignments).cpu()} if self.alignments else {}
        return {**kept, "best": self.best, "at": self.at, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any], ranks: Ranks) -> None:
        self.past = [state["past"]] if "past" in state else []
        if "losses" in state:
            every = state["losses"].to(ranks.device)
            self.losses = list(every[ranks.rank] if len(every) == ranks.count else every.mean(0))
        self.alignments = list(state["alignments"].to(ranks.device)) if "alignments" in state else []
        self.best, self.at, self.seconds = state["best"], state["at"], state["seconds"]


class Training:
    """A Trainer on the lab's draws, and what it does besides."""

    def __init__(
        self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float
    ) -> None:
        self.config, self.folder, self.save_every = config, folder, save_every
        self.ranks = Ranks(device)
        if config.batch % self.ranks.count:
            raise LabError(f"a batch of {config.batch} cannot be shared by {self.ranks.count} ranks")
        root = folder.path.parent.parent
        if self.ranks.rank == 0:
            where(config.model, root)  # transformers writes files on this rank alone
        self.ranks.wait()
        found = where(config.model, root)
        self.tokenizer = load_tokenizer(found)
        check_block(found, config.block)
        self.blocks = tokenized(config.data, self.tokenizer, config.block, config.batch, root, data_folder)
        self.text = digest_of(self.blocks["train"].ids.numpy().tobytes())
        self.steps = len(self.blocks["train"]) // config.batch  # of an epoch
        self.masks = Masks(self.tokenizer)
        self.model, self.new = load_model(found, config.seed)
        self.model.train()
        fused = {"fused": True} if device.type == "cuda" and config.optimizer == "adamw" else {}
        self.optimizer = make_optimizer(config, self.model.parameters(), config.lr, **fused)
        self.given = given_alignment(config, folder)
        check_length(self.given, self.steps * config.epochs)
        if self.given is not None:
            self.given = self.given.to(device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)
        self.watch = Watch()
        self.begin = self.saved = time.monotonic()
        self.trainer = self._make_trainer(device)

    def _make_trainer(self, device: torch.device) -> Any:
        package, watch, config = transformers(), self.watch, self.config
        self.loss = Loss(self.model)
        quick = device.type == "cuda" and quicken(self.model)
        # Graphs of one process may share the numbers dropout is drawn from (torch before 2.13).
        alone = self.ranks.count == 1 and self.folder.together == 1
        backward = Backward(self.loss, device, graph=quick and alone)

        class InOrder(package.Trainer):  # type: ignore[misc, name-defined]
            """Takes the blocks as they come, and keeps every step's loss."""

            def get_train_dataloader(self) -> Any:
                size = self.args.per_device_train_batch_size
                return self.accelerator.prepare(
                    DataLoader(self.train_dataset, size, collate_fn=self.data_collator)
                )

            def training_step(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
                watch.losses.append(backward(model, self._prepare_inputs(inputs)))
                return watch.losses[-1]

        steps = config.epochs * self.steps
        trainer = InOrder(
            model=self.model,
            args=arguments(config, self.folder.path, device, steps, self.ranks.count),
            data_collator=self.masks,
            train_dataset=Passes(self.blocks["train"], config.batch, config.epochs, config.seed),
            optimizers=(self.optimizer, None),
        )
        trainer.remove_callback(package.PrinterCallback)
        trainer.model_accepts_loss_kwargs = False  # a masked-LM head takes the mean: nothing is to be counted
        if trainer.args.n_gpu > 1:
            raise LabError(
                "the Trainer takes all GPUs it sees: start with CUDA_VISIBLE_DEVICES, or by torchrun"
            )
        return trainer

    # ------------------------------------------------------------------ what the Trainer's callbacks do

    def before_step(self, step: int) -> None:
        """Dropout is drawn from the step, whatever was drawn before."""
        torch.manual_seed(drawn_from(self.config.seed, step * 1009 + self.ranks.rank, DROPOUT))

    def before_update(self) -> None:
        s = watched(self.optimizer)
        if self.given is not None and s:
            replace_alignment(s, self.given, self.taken)

    def after_update(self) -> None:
        s = watched(self.optimizer)
        if s:
            self.watch.alignments.append(torch.stack(s).mean().clone())
        self.taken += 1

    def end_epoch(self, epoch: int) -> Progress:
        """Its metrics; the network is kept where it is the best so far."""
        loss, s = self.watch.end_epoch()
        mean = self.ranks.add(loss)[0] / self.ranks.count  # all ranks see the same, and do the same
        row = {"epoch": epoch, "loss": mean, "perplexity": self.perplexity("valid")}
        self.folder.log(row if s is None else {**row, "alignment": s})
        if row["perplexity"] < self.watch.best:
            self.watch.best, self.watch.at = row["perplexity"], epoch
            self.keep_model()
        return Progress(epoch, self.config.epochs, row if s is None else {**row, "alignment": s})

    @torch.no_grad()
    def perplexity(self, part: str) -> float:
        """Of the masked tokens of a part, which are the same for every network and number of ranks."""
        blocks, device = self.blocks[part], self.ranks.device
        total, count = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
        self.model.eval()
        mine = range(self.ranks.rank, len(blocks), self.ranks.count)
        for first in range(0, len(mine), EVALUATED):
            rows = mine[first : first + EVALUATED]
            batch = self.masks(
                [Row(blocks.ids[i], blocks.special[i], drawn_from(0, i, MEASURED)) for i in rows]
            )
            batch = {key: value.to(device) for key, value in batch.items()}
            tokens = (batch["labels"] != IGNORED).sum()
            with torch.compiler.set_stance("force_eager"):  # such a shape is met once an epoch
                loss = self.loss(self.model, batch)
            total += torch.where(tokens > 0, loss.double() * tokens, 0.0)
            count += tokens
        self.model.train()
        summed, tokens_of_all = self.ranks.add(total, count)
        return math.exp(min(summed / tokens_of_all, 700.0)) if tokens_of_all else math.nan

    # ------------------------------------------------------------------ what is kept

    def model_of(self, epoch: int) -> Path:
        return self.folder.path / f"model-{epoch:03d}"

    def kept_model(self) -> Path:
        """The best; it has its last name where a run was killed at its end."""
        last = self.folder.path / "model"
        return last if last.exists() else self.model_of(self.watch.at)

    def keep_model(self) -> None:
        """The network as it is now; the one before stays until a checkpoint knows of this one."""
        if self.folder.writes:
            made, kept = self.folder.path / ".model.part", self.model_of(self.watch.at)
            self.model.save_pretrained(made)
            self.tokenizer.save_pretrained(made)
            shutil.rmtree(kept, ignore_errors=True)  # of a run that was killed
            made.replace(kept)

    def save_is_due(self) -> bool:
        mine = self.ranks.rank == 0 and time.monotonic() - self.saved > self.save_every
        return self.ranks.add(float(mine))[0] > 0  # all save, or none

    def save(self, step: int) -> None:
        """What the Trainer's checkpoint lacks; it comes last, and tells that the checkpoint is whole."""
        self.watch.seconds += time.monotonic() - self.begin
        self.begin = time.monotonic()
        watch = self.watch.state_dict(self.ranks)
        self.ranks.wait()  # every rank has written its files
        if self.folder.writes:
            path, buffer = self.folder.path / "checkpoints" / f"checkpoint-{step}", io.BytesIO()
            torch.save({"watch": watch, "rows": self.folder.rows, "sizes": sizes_of(path)}, buffer)
            write_whole(path / WHOLE, buffer.getvalue())
            self.tidy()
        self.saved = time.monotonic()

    def tidy(self) -> None:
        """Removes networks that are not the best."""
        for path in self.folder.path.glob("model-*"):
            if path != self.model_of(self.watch.at):
                shutil.rmtree(path)

    def load(self) -> Path | None:
        """The last checkpoint that is whole, if any; later ones are removed."""
        whole: Path | None = None
        rows: list[dict[str, Any]] = []
        self.ranks.wait()
        for path in sorted(
            (self.folder.path / "checkpoints").glob("checkpoint-*"), key=step_of, reverse=True
        ):
            kept = whole_checkpoint(path) if whole is None else None
            if kept is not None:
                whole, rows = path, list(kept["rows"])
                self.watch.load_state_dict(kept["watch"], self.ranks)
                self.taken.fill_(step_of(path))
            elif whole is None and self.folder.writes:
                shutil.rmtree(path)
        if whole is None and self.folder.writes:
            for name in ("model", "embeddings"):  # of a run before this one, whose result was removed
                shutil.rmtree(self.folder.path / name, ignore_errors=True)
        self.folder.begin_with(rows)
        self.ranks.wait()
        return whole

    def result(self) -> dict[str, Any]:
        rows, config = self.folder.rows, self.config
        last = rows[-1] if rows else {"loss": 0.0, "perplexity": self.watch.best}
        finite = all(math.isfinite(last[key]) for key in ("loss", "perplexity"))
        return {
            "perplexity": self.watch.best if finite else math.inf, "at": self.watch.at, "epochs": len(rows),
            "loss": last["loss"] if rows else None, "diverged": not finite,
            "steps": self.steps * config.epochs, "ranks": self.ranks.count,
            "blocks": len(self.blocks["train"]), "text": self.text, "new": self.new,
            "parameters": parameters(self.model), "settings": resolved(config, self.optimizer),
            "transformers": transformers().__version__,  # whose defaults these are
        }  # fmt: skip


WHOLE = "lab.pt"
EVALUATED = 32  # blocks at once
LOOKS = 20  # steps from one look at the clock to the next: ranks must agree on it


def sizes_of(checkpoint: Path) -> dict[str, int]:
    """Of its files but our own; digests of gigabytes would take longer than many steps."""
    return {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.name != WHOLE}


def whole_checkpoint(checkpoint: Path) -> dict[str, Any] | None:
    """What the lab has kept with it; None where it was not written to its end, or its files are damaged."""
    try:
        kept: dict[str, Any] = torch.load(checkpoint / WHOLE, weights_only=True)
        return kept if kept["sizes"] == sizes_of(checkpoint) else None
    except Exception:  # there is none, or torch's reader meets something else
        return None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def _callback(training: Training, give: Callable[[Any], None]) -> Any:
    package = transformers()

    class Lab(package.TrainerCallback):  # type: ignore[misc, name-defined]
        """The lab's part of a step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            training.before_step(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            training.before_update()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            training.after_update()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            give(None)
            if state.global_step % training.steps == 0:
                progress = training.end_epoch(state.global_step // training.steps)
                give(progress)
                control.should_training_stop |= not math.isfinite(progress.metrics["loss"])
            last = control.should_training_stop or state.global_step >= state.max_steps
            looked = state.global_step % LOOKS == 0 or state.global_step % training.steps == 0
            control.should_save = last or (looked and training.save_is_due())

        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            training.save(state.global_step)

    return Lab()


def run(
    config: dict[str, Any],
    folder: TrialFolder,
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Fine-tunes, from the last checkpoint where there is one; then measures the best network."""
    settings = Config(**config)
    training = Training(settings, folder, data_folder, device, save_every)
    checkpoint = training.load()
    done = 0 if checkpoint is None else step_of(checkpoint)

    def train(give: Callable[[Any], None]) -> None:
        training.trainer.add_callback(_callback(training, give))
        training.trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    if settings.epochs == 0:
        training.trainer.accelerator.prepare(training.model)  # to its device
        training.watch.best = training.perplexity("valid")
        training.keep_model()
    elif done < training.steps * settings.epochs and math.isfinite(_last_loss(folder)):
        yield from handed(train)
    result = training.result()
    if settings.test and not result["diverged"]:
        training.ranks.wait()  # rank 0 has written it
        best = training.kept_model()
        training.model.to(device).load_state_dict(load_model(str(best), 0)[0].state_dict())
        result["test"] = training.perplexity("test")
    _finish(training, result, data_folder, device)


def _last_loss(folder: TrialFolder) -> float:
    return float(folder.rows[-1]["loss"]) if folder.rows else 0.0


def _finish(training: Training, result: dict[str, Any], data_folder: Path, device: torch.device) -> None:
    """The tasks, the files that stay, the result."""
    folder, settings, watch = training.folder, training.config, training.watch
    if not folder.writes:
        return
    training.tidy()
    if not settings.test or result["diverged"]:
        shutil.rmtree(training.kept_model(), ignore_errors=True)
    else:
        training.kept_model().rename(folder.path / "model")
    # On several ranks the others would wait for longer than they are patient: `tam lab mteb` does it then.
    if settings.test and not result["diverged"] and training.ranks.count == 1:
        score.evaluate(folder.path, settings.tasks, data_folder, device)
    if watch.past and not result["diverged"]:
        keep_alignment(folder, torch.cat(watch.past))
    folder.finish(result, watch.seconds + time.monotonic() - training.begin, device)
    shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
