"""Masked-LM fine-tuning through Hugging Face's Trainer: a trial of the paper's section on language models.

What is drawn (order, masks, dropout) depends on the seed and the step alone, so that a run that was killed
ends as if nothing had been, and all arms of a seed see the same. Of all epochs the network with the least
validation perplexity is kept, and evaluated on MTEB's tasks.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

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
from tam.lab.models import parameters
from tam.lab.models.language import load_model, load_tokenizer, transformers, where
from tam.lab.store import LabError, TrialFolder, digest_of
from tam.lab.trial import Progress, resolved, told

MASKED = 0.15  # of the tokens; of these 8 in 10 become [MASK], 1 another token, 1 stays
IGNORED = -100  # the label of a token that is not to be predicted


@dataclass(frozen=True)
class Config:
    """All that determines a trial. With 0 epochs the network is evaluated as it is."""

    model: str | None  # on the hub; or NAME#DIGEST, or "tiny"; none is known yet where a preset waits for one
    optimizer: str
    lr: float
    seed: int
    epochs: int
    data: str = "wikitext-2"
    block: int = 512  # tokens
    batch: int = 8  # blocks, on each rank
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
    if config.model is None or (config.model != "tiny" and "#" not in config.model):
        load_tokenizer(where(config.model, Path()))  # a folder was looked into when it was given
    text.check(config.data, data_folder)
    tasks.check(config.tasks, data_folder)


# ---------------------------------------------------------------------- text


@dataclass(frozen=True)
class Blocks:
    """Text as tokens in blocks of one length."""

    ids: Tensor  # [blocks, length]
    special: Tensor  # whether the tokenizer has put it there

    def __len__(self) -> int:
        return len(self.ids)


def tokenized(config: Config, tokenizer: Any, root: Path, data_folder: Path) -> dict[str, Blocks]:
    """Each part's lines, tokenised and put end to end; what does not fill a block at the end is left out."""
    lines = text.read(config.data, data_folder)
    said = "\n".join(line for part in lines.values() for line in part)
    key = digest_of(f"{config.block} {tokenizer.backend_tokenizer.to_str()} {said}".encode())
    kept = root / f"tokens-{key}.pt"
    found = _kept(kept)
    if found is None:
        found = {part: _tokens(tokenizer, some) for part, some in lines.items()}
        part = kept.with_name(f".{kept.name}.{time.time_ns()}.part")
        torch.save(found, part)  # another trial may do the same at the same time
        part.replace(kept)
    blocks = {}
    for name, both in found.items():
        count = both.shape[1] // config.block
        if count < config.batch:
            tokens = f"{config.data}, {name}: {both.shape[1]} tokens"
            raise LabError(f"{tokens} make no {config.batch} blocks of {config.block}")
        rows = both[:, : count * config.block].view(2, count, config.block)
        blocks[name] = Blocks(rows[0].long(), rows[1].bool())
    return blocks


def _kept(path: Path) -> dict[str, Tensor] | None:
    try:
        return dict(torch.load(path, weights_only=True))
    except FileNotFoundError:
        return None
    except Exception as error:  # torch raises whatever its reader meets
        raise LabError(f"{path} is damaged: remove it, and it is made again") from error


def _tokens(tokenizer: Any, lines: Sequence[str]) -> Tensor:
    """[2, tokens]: which they are, and whether they are the tokenizer's own."""
    found = tokenizer(list(lines), return_special_tokens_mask=True, truncation=False, verbose=False)
    return torch.tensor(
        [
            [i for row in found["input_ids"] for i in row],
            [i for row in found["special_tokens_mask"] for i in row],
        ],
        dtype=torch.int32,
    )


class Passes(Dataset[dict[str, Any]]):
    """All epochs as one sequence of blocks, batch after batch; one that is not full is left out."""

    def __init__(self, blocks: Blocks, config: Config, steps: int, width: int) -> None:
        self.blocks, self.seed, self.batch = blocks, config.seed, config.batch
        self.length, self.count = steps * width, config.epochs * steps * width
        self.orders: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, Any]:
        epoch, at = divmod(place, self.length)
        if epoch not in self.orders:
            generator = torch.Generator().manual_seed(self.seed * 100003 + epoch)
            self.orders = {epoch: torch.randperm(len(self.blocks), generator=generator)}
        row = self.orders[epoch][at]
        draw = (self.seed << 32) + place // self.batch
        return {"ids": self.blocks.ids[row], "special": self.blocks.special[row], "draw": draw}


class Fixed(Dataset[dict[str, Any]]):
    """Blocks in their order, with masks that are always the same: to measure by."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"ids": self.blocks.ids[row], "special": self.blocks.special[row], "draw": (1 << 62) + row}


class Masks:
    """Makes a batch: what is masked is drawn from its number."""

    def __init__(self, tokenizer: Any) -> None:
        self.mask, self.size = int(tokenizer.mask_token_id), len(tokenizer)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        ids, special = (torch.stack([row[key] for row in rows]) for key in ("ids", "special"))
        generator = torch.Generator().manual_seed(int(rows[0]["draw"]))
        chance, how = (torch.rand(ids.shape, generator=generator) for _ in range(2))
        other = torch.randint(self.size, ids.shape, generator=generator)
        chosen = (chance < MASKED) & ~special
        shown = torch.where(how < 0.8, self.mask, torch.where(how < 0.9, other, ids))
        labels = torch.where(chosen, ids, IGNORED)
        attention = torch.ones_like(ids)
        return {"input_ids": torch.where(chosen, shown, ids), "attention_mask": attention, "labels": labels}


# ---------------------------------------------------------------------- training


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def arguments(config: Config, folder: Path, device: torch.device, steps: int) -> Any:
    """Hugging Face's defaults but for what the lab does itself: evaluations, checkpoints, logs."""
    return transformers().TrainingArguments(
        output_dir=str(folder / "checkpoints"), max_steps=max(steps, 1), seed=config.seed,
        learning_rate=config.lr, per_device_train_batch_size=config.batch,
        per_device_eval_batch_size=config.batch, use_cpu=device.type == "cpu", bf16=device.type == "cuda",
        prediction_loss_only=True, remove_unused_columns=False, disable_tqdm=True, report_to=[],
        logging_strategy="no", save_strategy="no", eval_strategy="no", save_total_limit=2,
    )  # fmt: skip


class Watch:
    """What a run has shown so far: losses and s of every step, the metrics and the best network."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.alignments: list[Tensor] = []
        self.best = math.inf
        self.at = 0  # the epoch of the best
        self.seconds = 0.0

    def state_dict(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        columns = {"losses": _stacked(self.losses), "alignments": _stacked(self.alignments)}
        return {**columns, "best": self.best, "at": self.at, "seconds": self.seconds, "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        self.losses, self.alignments = list(state["losses"]), list(state["alignments"])
        self.best, self.at, self.seconds = state["best"], state["at"], state["seconds"]
        return list(state["rows"])


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values).float().cpu() if values else torch.zeros(0)


class Training:
    """A Trainer on the lab's draws, and what it does besides."""

    def __init__(
        self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float
    ) -> None:
        self.config, self.folder, self.save_every = config, folder, save_every
        root = folder.path.parent.parent
        found = where(config.model, root)
        self.tokenizer = load_tokenizer(found)
        self.blocks = tokenized(config, self.tokenizer, root, data_folder)
        width = config.batch * ranks()
        self.steps = len(self.blocks["train"]) // width  # of an epoch
        if self.steps == 0:
            raise LabError(f"{len(self.blocks['train'])} blocks make no batch of {width}")
        self.model = load_model(found, config.seed)
        options = {"fused": True} if device.type == "cuda" and config.optimizer == "adamw" else {}
        self.optimizer = make_optimizer(config, self.model.parameters(), config.lr, **options)
        self.given = given_alignment(config, folder)
        check_length(self.given, self.steps * config.epochs)
        if self.given is not None:
            self.given = self.given.to(device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)
        self.watch = Watch()
        self.begin = self.saved = time.monotonic()
        self.trainer = self._make_trainer(width, device)

    def _make_trainer(self, width: int, device: torch.device) -> Any:
        package, watch = transformers(), self.watch

        class InOrder(package.Trainer):  # type: ignore[misc, name-defined]
            """Takes the blocks as they come, and keeps every step's loss."""

            def get_train_dataloader(self) -> Any:
                size = self.args.per_device_train_batch_size
                return self.accelerator.prepare(
                    DataLoader(self.train_dataset, size, collate_fn=self.data_collator)
                )

            def training_step(self, *given: Any, **more: Any) -> Any:
                loss = super().training_step(*given, **more)
                watch.losses.append(loss.detach())
                return loss

        config = self.config
        trainer = InOrder(
            model=self.model,
            args=arguments(config, self.folder.path, device, config.epochs * self.steps),
            data_collator=Masks(self.tokenizer),
            train_dataset=Passes(self.blocks["train"], config, self.steps, width),
            eval_dataset=Fixed(self.blocks["valid"]),
            optimizers=(self.optimizer, None),
        )
        trainer.remove_callback(package.PrinterCallback)
        # A masked-LM head takes the mean of its own batch; the Trainer would multiply it by the ranks.
        trainer.model_accepts_loss_kwargs = False
        if trainer.args.device.type != device.type or trainer.args.n_gpu > 1:
            raise LabError(
                "the Trainer takes all GPUs it sees: start with CUDA_VISIBLE_DEVICES, or by torchrun"
            )
        return trainer

    # ------------------------------------------------------------------ what the Trainer's callbacks do

    def before_step(self, step: int) -> None:
        """Dropout is drawn from the step, whatever was drawn before."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed((self.config.seed << 32) + step * 1009 + rank)

    def before_update(self) -> None:
        s = watched(self.optimizer)
        if self.given is not None and s:
            replace_alignment(s, self.given, self.taken)

    def after_update(self) -> None:
        s = watched(self.optimizer)
        if s:
            self.watch.alignments.append(torch.stack(s).mean().clone())
        self.taken += 1

    def evaluated(self, step: int, loss: float) -> Progress:
        """The metrics of an epoch; the network is kept where it is the best so far."""
        epoch = step // self.steps
        mine = torch.stack(self.watch.losses[-self.steps :]).double().mean()
        row = {"epoch": epoch, "loss": float(mine), "perplexity": math.exp(min(loss, 700.0))}
        if self.watch.alignments:
            row["alignment"] = float(torch.stack(self.watch.alignments[-self.steps :]).double().mean())
        self.folder.log(row)
        if row["perplexity"] < self.watch.best:
            self.watch.best, self.watch.at = row["perplexity"], epoch
            self.keep_model()
        return Progress(epoch, self.config.epochs, row)

    def keep_model(self) -> None:
        """The network as it is now, in place of the one kept before."""
        if not self.folder.writes:
            return
        made, kept = self.folder.path / ".model.part", self.folder.path / "model"
        shutil.rmtree(made, ignore_errors=True)
        self.model.save_pretrained(made)
        self.tokenizer.save_pretrained(made)
        shutil.rmtree(kept, ignore_errors=True)
        made.replace(kept)

    # ------------------------------------------------------------------ checkpoints

    def save_is_due(self) -> bool:
        due = torch.tensor(float(time.monotonic() - self.saved > self.save_every))
        if dist.is_initialized():  # all save, or none
            due = due.to(self.taken.device)
            dist.broadcast(due, 0)
        return bool(due)

    def save(self, step: int) -> None:
        """What the Trainer's checkpoint lacks; it comes last, and tells that the checkpoint is whole."""
        if self.folder.writes:
            self.watch.seconds += time.monotonic() - self.begin
            self.begin = time.monotonic()
            path = self.folder.path / "checkpoints" / f"checkpoint-{step}" / WHOLE
            torch.save(self.watch.state_dict(self.folder.rows), path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        self.saved = time.monotonic()

    def load(self) -> str | None:
        """The last checkpoint that is whole, if any; others are removed."""
        whole, rows = None, []
        for path in sorted(
            (self.folder.path / "checkpoints").glob("checkpoint-*"), key=_step_of, reverse=True
        ):
            if whole is None and (path / WHOLE).exists():
                whole = path
                state = torch.load(path / WHOLE, weights_only=True)
                rows = self.watch.load_state_dict(state)
                self.taken.fill_(_step_of(path))
            elif whole is None and self.folder.writes:
                shutil.rmtree(path)
        self.folder.begin_with(rows)
        return None if whole is None else str(whole)


WHOLE = "lab.pt"


def _step_of(checkpoint: Path) -> int:
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
            if state.global_step % training.steps == 0:
                control.should_evaluate = True
                last = state.global_step >= state.max_steps
                control.should_save = not last and training.save_is_due()
            give(None)

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
            progress = training.evaluated(state.global_step, metrics["eval_loss"])
            give(progress)
            if not math.isfinite(progress.metrics["loss"]):
                control.should_training_stop = True

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
    trainer = training.trainer

    def train(give: Callable[[Any], None]) -> None:
        callback = _callback(training, give)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.remove_callback(callback)

    if settings.epochs > 0:
        yield from handed(train)
    else:
        training.watch.best = _perplexity(trainer, None)
        training.keep_model()
    result = _result(training, trainer, device)
    if settings.test:
        if dist.is_initialized():
            dist.barrier()  # rank 0 has written it
        training.model.load_state_dict(load_model(str(folder.path / "model"), 0).state_dict())
        result["test"] = _perplexity(trainer, Fixed(training.blocks["test"]))
    if folder.writes and settings.test and settings.tasks:
        evaluate(folder.path, settings.tasks, data_folder, device)
    if training.watch.alignments and len(training.watch.alignments) == training.steps * settings.epochs:
        keep_alignment(folder, _stacked(training.watch.alignments))
    seconds = training.watch.seconds + time.monotonic() - training.begin
    folder.finish(result, seconds, device)
    if folder.writes:
        shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)
        if not settings.test:
            shutil.rmtree(folder.path / "model", ignore_errors=True)


def _perplexity(trainer: Any, data: Any) -> float:
    return math.exp(min(trainer.evaluate(data)["eval_loss"], 700.0))


def _result(training: Training, trainer: Any, device: torch.device) -> dict[str, Any]:
    rows, config = training.folder.rows, training.config
    loss = rows[-1]["loss"] if rows else math.nan
    return {
        "perplexity": training.watch.best, "at": training.watch.at, "epochs": len(rows), "loss": loss,
        "diverged": config.epochs > 0 and not math.isfinite(loss), "steps": training.steps * config.epochs,
        "ranks": ranks(), "parameters": parameters(training.model),
        "settings": resolved(config, training.optimizer),
    }  # fmt: skip


def evaluate(trial: Path, tasks: Sequence[str], data_folder: Path, device: torch.device) -> None:
    """The tasks' scores; where mteb is not installed, the embeddings they can be had from elsewhere."""
    model, embeddings = str(trial / "model"), trial / "embeddings"
    if importlib.util.find_spec("mteb") is None:
        score.embed(model, tasks, data_folder, embeddings, device)
    else:
        kept = embeddings if embeddings.exists() else None
        score.score(model, tasks, data_folder, trial / "mteb", device, kept)
