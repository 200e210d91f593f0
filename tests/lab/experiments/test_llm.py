"""Masked-LM fine-tuning: the Trainer's run against a loop written out, kills, data and mistakes."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tam
from tam.lab.core.errors import DataError, LabError
from tam.lab.core.plan import Plan
from tam.lab.core.results import load_results
from tam.lab.core.runner import run
from tam.lab.core.selection import Selection, select_plans
from tam.lab.core.store import TrialFolder
from tam.lab.data import text
from tam.lab.experiments.llm import checkpoints, report_extras, studies, tokens, variants
from tam.lab.experiments.llm import trial as llm
from tam.lab.experiments.llm.mteb import local_data, scoring
from tam.lab.models import language
from tests.lab.commands.helpers import tam_lab
from tests.lab.engines.test_engines import PATHS, RunLocation
from tests.lab.experiments.test_tokens import labels_of_all

pytest.importorskip("transformers")
CPU = torch.device("cpu")


def config(**more: Any) -> llm.Config:
    given = {
        "model": "tiny-bert", "optimizer": "adatamw", "lr": 1e-3, "seed": 0, "epochs": 2, "data": "generated",
        "block": 32, "batch": 8, "options": {"weight_decay": 0.0}, "test": True,
    }  # fmt: skip
    return llm.Config(**{**given, **more})


class Killed(BaseException):
    """Ends a run, as if its process were killed."""


def train(
    root: Path, one: llm.Config, kill_at: int | None = None, save_every: float = 1e9, folder: Any = None
) -> TrialFolder:
    """Run a trial, or as many steps of it."""
    torch.set_num_threads(1)
    folder = folder or TrialFolder(root, one)
    before_step = llm.Training.before_step

    def counted(self: llm.Training, step: int) -> None:
        if step == kill_at:
            raise Killed
        before_step(self, step)

    with folder.at_work(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.Training, "before_step", counted)
        with suppress(Killed):
            list(llm.run(one, folder, root, CPU, save_every))
    return folder  # type: ignore[no-any-return]


def result_of(folder: TrialFolder) -> dict[str, Any]:
    result = folder.read_result()
    assert result is not None
    return result


@pytest.mark.parametrize("optimizer", ["adamw", "adatamw"])
def test_a_trial_is_a_plain_training(optimizer: str, tmp_path: Path) -> None:
    """Order, masks, dropout, clipping and the linear decay, all written out."""
    folder = train(tmp_path, config(optimizer=optimizer, seed=3))
    tokenizer = language.load_tokenizer(language.locate_model("tiny-bert", tmp_path))
    blocks = tokens.load_blocks("generated", tokenizer, 32, 8, tmp_path, tmp_path)["train"]
    model = language.load_model(language.locate_model("tiny-bert", tmp_path), 3)[0].train()
    made: Any = {"adamw": torch.optim.AdamW, "adatamw": tam.AdaTAMW}[optimizer]
    own = made(model.parameters(), lr=1e-3, weight_decay=0.0)
    masks, steps = tokens.MaskingCollator(tokenizer), len(blocks) // 8
    for epoch in range(2):
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(3 * 100003 + epoch))
        losses = []
        for k in range(steps):
            step = epoch * steps + k
            rows = [
                tokens.Row(
                    blocks.ids[i], blocks.special[i], tokens.draw_seed(3, 8 * step + lane, tokens.MASKS)
                )
                for lane, i in enumerate(order[8 * k : 8 * k + 8])
            ]
            torch.manual_seed(tokens.draw_seed(3, step * 1009, tokens.DROPOUT))
            batch = masks(rows)
            loss = model(batch["input_ids"], labels=labels_of_all(batch)).loss  # all tokens have logits
            own.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            own.param_groups[0]["lr"] = 1e-3 * (2 * steps - step) / (2 * steps)
            own.step()
            losses.append(loss.item())
        assert folder.metrics()[epoch]["loss"] == pytest.approx(sum(losses) / steps, rel=1e-6)
    parts = tokens.load_blocks("generated", tokenizer, 32, 8, tmp_path, tmp_path)
    assert folder.metrics()[-1]["perplexity"] == pytest.approx(
        plain_perplexity(model, masks, parts["valid"]), rel=1e-5
    )
    options = result_of(folder)["settings"]["options"]
    assert options["weight_decay"] == 0.0 and "initial_lr" not in options  # as they were before training


@torch.no_grad()
def plain_perplexity(model: Any, masks: tokens.MaskingCollator, blocks: tokens.Blocks) -> float:
    """Of all masked tokens, block by block."""
    total, count = 0.0, 0
    model.eval()
    for i in range(len(blocks)):
        draw = tokens.draw_seed(0, i, tokens.EVALUATION)
        batch = masks([tokens.Row(blocks.ids[i], blocks.special[i], draw)])
        labels = labels_of_all(batch)
        logits = model(batch["input_ids"]).logits.double()
        chosen = labels != tokens.IGNORED
        total += float(torch.nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="sum"))
        count += int(chosen.sum())
    return math.exp(total / count)


@pytest.mark.parametrize("steps", [10, 30, 40])
def test_a_killed_trial_ends_with_the_same_bits(steps: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", config(epochs=3))
    train(tmp_path / "parts", config(epochs=3), steps, save_every=0.0)
    again = train(tmp_path / "parts", config(epochs=3), save_every=0.0)
    assert_same_end(again, whole)


def assert_same_end(ours: TrialFolder, theirs: TrialFolder) -> None:
    """The same metrics, result, network and files."""
    assert ours.metrics() == theirs.metrics()
    for key in ("perplexity", "test", "at", "epochs"):
        assert result_of(ours)[key] == result_of(theirs)[key]
    files = ["alignment.pt", "config.json", "lock", "metrics.jsonl", "model", "result.json"]
    for folder in (ours, theirs):
        assert sorted(path.name for path in folder.path.iterdir() if path.name != "mteb") == files
    for name in ("model/model.safetensors", "alignment.pt"):
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial of two epochs that was killed, with checkpoints after 20 and 23 of 46 steps."""
    root = tmp_path_factory.mktemp("stopped")
    folder = train(root, config(), 30, save_every=0.0)
    assert [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(folder.path)] == [23, 20]
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrialFolder:
    return train(tmp_path_factory.mktemp("whole"), config())


def first_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, TrialFolder]:
    """Continue a trial to its end. Return the step it continued at."""
    steps: list[int] = []
    counted = llm.StepRecorder.continue_at
    monkeypatch.setattr(
        llm.StepRecorder, "continue_at", lambda self, step: (steps.append(step), counted(self, step))[1]
    )
    folder = train(root, config())
    return (steps or [0])[0], folder


FILES = (
    "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth",
    "training_args.bin", "config.json", "lab-*.pt",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("name", FILES)
def test_after_a_flipped_bit_a_trial_continues_from_the_checkpoint_before(
    name: str, stopped: Path, whole: TrialFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped, tmp_path / "lab")
    newest = checkpoints.list_checkpoints(tmp_path / "lab/trials" / config().key)[0]
    (path,) = newest.glob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    step, folder = first_step(tmp_path / "lab", monkeypatch)
    assert step == 20
    assert_same_end(folder, whole)


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("damage", ["cut", "missing", "added", "renamed", "best network"])
def test_other_damage_to_a_checkpoint(
    damage: str, stopped: Path, whole: TrialFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped, tmp_path / "lab")
    trial = tmp_path / "lab/trials" / config().key
    newest, expected = checkpoints.list_checkpoints(trial)[0], 20
    if damage == "cut":
        (newest / "trainer_state.json").write_text("{")
    elif damage == "missing":  # as if it had been killed before the last file
        next(newest.glob("lab-*.pt")).unlink()
    elif damage == "added":
        (newest / "more.json").write_text("{}")
    elif damage == "renamed":
        newest.rename(newest.with_name("checkpoint-40"))
    else:
        path = next(trial.glob("model-*")) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    step, folder = first_step(tmp_path / "lab", monkeypatch)
    assert step == expected
    assert_same_end(folder, whole)


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_without_an_intact_checkpoint_a_trial_starts_again(
    stopped: Path, whole: TrialFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped, tmp_path / "lab")
    for path in checkpoints.list_checkpoints(tmp_path / "lab/trials" / config().key):
        (path / "optimizer.pt").write_bytes(b"")
    step, folder = first_step(tmp_path / "lab", monkeypatch)
    assert step == 0
    assert_same_end(folder, whole)


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("link", [False, True])
def test_files_and_links_where_folders_are_expected(
    link: bool, stopped: Path, whole: TrialFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped, tmp_path / "lab")
    trial, target = tmp_path / "lab/trials" / config().key, tmp_path / "theirs"
    target.mkdir()
    (target / "file").write_text("theirs")
    for name in ("model", "embeddings", "model-007", "checkpoints/checkpoint-43"):
        if link:
            (trial / name).symlink_to(target)
        else:
            (trial / name).write_text("a file")
    step, folder = first_step(tmp_path / "lab", monkeypatch)
    assert step == 23 and [path.name for path in target.iterdir()] == ["file"]
    assert_same_end(folder, whole)


def test_epochs_are_reported_while_the_trainer_runs(tmp_path: Path) -> None:
    folder, reported = TrialFolder(tmp_path, config()), []

    def report(progress: Any) -> None:
        assert folder.read_result() is None
        reported.append((progress.epoch, progress.epochs, progress.metrics))

    folder.report_progress = report
    train(tmp_path, config(), folder=folder)
    assert reported == [(row["epoch"], 2, row) for row in folder.metrics()]


def test_of_a_trial_that_is_run_again_the_new_network_is_kept(tmp_path: Path) -> None:
    first = train(tmp_path, config())
    test = result_of(first)["test"]
    other, _ = language.load_model(str(first.path / "model"), 0)
    torch.nn.init.zeros_(other.bert.encoder.layer[0].output.dense.weight)
    other.save_pretrained(first.path / "model")  # as if it had come of other rounding
    (first.path / "result.json").unlink()
    again = train(tmp_path, config())
    assert result_of(again)["test"] == test
    assert not list(again.path.glob("model-*"))


def test_d_replaced_by_its_own_sequence_is_the_same_run(tmp_path: Path) -> None:
    source = train(tmp_path, config())
    same, mean = (train(tmp_path, config(damping=how, damping_of=source.key)) for how in ("same", "mean"))
    assert same.metrics() == source.metrics() != mean.metrics()


def test_the_best_epoch_counts_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"valid": iter([2.0, 1.0, 3.0, 2.0, 1.0]), "test": iter([7.0])}
    monkeypatch.setattr(llm.Training, "perplexity", lambda self, part: next(told[part]))
    folder = train(tmp_path, config(epochs=3))
    assert [result_of(folder)[key] for key in ("perplexity", "at", "test")] == [1.0, 2, 7.0]
    shorter = train(tmp_path / "part", config(epochs=3), 2 * 23)  # it is stopped after its second epoch
    kept, other = (
        language.load_model(str(path), 0)[0].state_dict()
        for path in (folder.path / "model", shorter.path / "model-002")
    )
    assert all(torch.equal(kept[key], other[key]) for key in kept)


def test_a_run_that_diverges_ends_with_that(tmp_path: Path) -> None:
    folder = train(tmp_path, config(lr=1e30, optimizer="adamw"))
    assert result_of(folder)["diverged"] and "test" not in result_of(folder)
    assert not (folder.path / "model").exists()


KILLED = """
import os, sys, torch
from pathlib import Path
from tam.lab.experiments.llm import trial as llm
from tam.lab.experiments.llm.mteb import scoring
from tam.lab.core.store import TrialFolder
from tests.lab.experiments.test_llm import config
place, root = sys.argv[1], Path(sys.argv[2])
owner, name = {"keep": (llm.Training, "keep_model"), "save": (llm.Training, "complete_checkpoint"),
               "tidy": (llm.Training, "remove_other_models"), "score": (scoring, "score_trial")}[place]
before, calls = getattr(owner, name), []
def dies(*arguments):
    calls.append(1)
    if len(calls) == 2 or place == "score":
        if place == "keep":
            (folder.path / ".model.part").mkdir()
        os.kill(os.getpid(), 9)
    return before(*arguments)
setattr(owner, name, dies)
torch.set_num_threads(1)
one = config(epochs=3, lr=2e-4)
folder = TrialFolder(root, one)
with folder.at_work():
    list(llm.run(one, folder, root, torch.device("cpu"), 0.0))
"""


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("place", ["keep", "save", "tidy", "score"])
def test_one_that_is_killed_anywhere_ends_like_another(place: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": PATHS}
    command = [sys.executable, "-c", KILLED, place, str(tmp_path / "killed")]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=240).returncode == -9
    one = config(epochs=3, lr=2e-4)  # every epoch is better than the one before
    assert_same_end(train(tmp_path / "killed", one), train(tmp_path / "whole", one))


def test_without_epochs_the_network_is_measured_as_it_is(tmp_path: Path) -> None:
    folder = train(tmp_path, config(epochs=0))
    assert result_of(folder)["epochs"] == 0 and not result_of(folder)["diverged"]
    kept, _ = language.load_model(str(folder.path / "model"), 0)
    begun, _ = language.load_model(language.locate_model("tiny-bert", tmp_path), 0)
    assert all(torch.equal(p, q) for p, q in zip(kept.parameters(), begun.parameters(), strict=True))


def test_tasks_without_embeddings_are_the_networks_to_encode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mteb")
    trial, asked = train(tmp_path, config(epochs=0)).path, []
    scoring.embed_tasks(str(trial / "model"), [local_data.GENERATED], tmp_path, trial / "embeddings", CPU)
    monkeypatch.setattr(scoring, "score_model", lambda *given: asked.append((given[1], *given[5:])))
    scoring.score_trial(trial, [local_data.GENERATED, "STS12"], tmp_path, CPU)
    assert asked == [([local_data.GENERATED], trial / "embeddings"), (["STS12"],)]
    shutil.rmtree(trial / "model")
    with pytest.raises(LabError, match="neither its network nor embeddings for STS12"):
        scoring.score_trial(trial, [local_data.GENERATED, "STS12"], tmp_path, CPU)
    assert asked[2:] == asked[:1]


def test_hugging_faces_defaults_are_those_the_report_names() -> None:
    from transformers import TrainingArguments

    found = TrainingArguments(use_cpu=True)
    assert found.weight_decay == 0 and found.max_grad_norm == 1 and found.warmup_steps == 0
    assert found.lr_scheduler_type == "linear" and found.per_device_train_batch_size == 8
    assert found.adam_beta1 == 0.9 and found.adam_beta2 == 0.999 and found.adam_epsilon == 1e-8
    made = llm.trainer_arguments(config(), Path("here"), CPU, 10, 2)
    assert made.per_device_train_batch_size == 4  # ranks share a batch
    for key in ("weight_decay", "max_grad_norm", "warmup_steps", "lr_scheduler_type"):
        assert getattr(made, key) == getattr(found, key)


def wikitext(folder: Path, **parts: bytes) -> Path:
    lines = {part: "\n".join(text.generate(80, 0)).encode() for part in text.PARTS} | parts
    for part, content in lines.items():
        path = folder / "wikitext-2" / f"wiki.{part}.tokens"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_wikitext_is_read_from_its_files(tmp_path: Path) -> None:
    found = text.read("wikitext-2", wikitext(tmp_path))
    assert found == {part: text.generate(80, 0) for part in text.PARTS}
    folder = train(tmp_path, config(data="wikitext-2", epochs=1))
    assert result_of(folder)["steps"] > 0


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"train": b" \n\n"}, r"wiki\.train\.tokens is empty"),
        ({"valid": b"caf\xe9 \xff"}, r"wiki\.valid\.tokens cannot be read"),
        ({"train": 50 * b"a b\n"}, "wikitext-2, train: fewer than 256 tokens, too short for 8 blocks of 32"),
        ({"test": b"a few words"}, "wikitext-2, test: fewer than 32 tokens, too short for 1 block of 32"),
    ],
)
def test_text_that_is_none(parts: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, LabError), match=message):
        llm.check(config(data="wikitext-2"), wikitext(tmp_path, **parts))


def test_mistakes_are_told_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it would be asked for long
    with pytest.raises(DataError, match=r"wikitext-2 is incomplete: .*wiki\.train\.tokens"):
        llm.check(config(data="wikitext-2"), tmp_path)
    with pytest.raises(DataError, match="there are wikitext-2"):
        llm.check(config(data="wikitext-3"), tmp_path)
    with pytest.raises(LabError, match="no-such-model"):
        llm.check(config(model="no-such-model"), tmp_path)
    with pytest.raises(LabError, match="a folder that exists"):
        language.register_model(f"mine={tmp_path / 'nowhere'}", tmp_path)
    with pytest.raises(LabError, match="NoSuchTask"):
        llm.check(config(tasks=("NoSuchTask",)), tmp_path)
    with pytest.raises(LabError, match="64 positions: a block of 80"):
        train(tmp_path, config(block=80))
    (tmp_path / "embedding").mkdir()
    with pytest.raises(DataError, match="sts-test"):
        llm.check(config(tasks=("STSBenchmark",)), tmp_path)
    with pytest.raises(LabError, match="needs a model"):
        run(Selection("llm", "encoder"), RunLocation(tmp_path, tmp_path), 1, lambda event: None)
    with pytest.raises(LabError, match="too short for 512 blocks of 32"):
        train(tmp_path, config(batch=512))
    with pytest.raises(LabError, match="has a model of its own"):
        select_plans(Selection("llm", "paper", overrides={"model": "mine"}), load_results(tmp_path))


def test_a_folder_without_a_tokenizer_or_weights(tmp_path: Path) -> None:
    folder = language.make_tiny_bert(tmp_path / "tiny-bert")
    assert language.register_model(str(folder), tmp_path / "lab").startswith("tiny-bert#")
    with pytest.raises(LabError, match="mine=: must be NAME=FOLDER"):
        language.register_model("mine=", tmp_path / "lab")
    with pytest.raises(LabError, match="must be NAME=FOLDER"):
        language.register_model(f"={folder}", tmp_path / "lab")
    name = language.register_model(f"mine={folder}", tmp_path / "lab")
    for about in ("README.md", ".gitattributes"):  # as a folder of the hub has them: the network is the same
        (folder / about).write_text("about it")
    assert language.register_model(f"mine={folder}", tmp_path / "lab") == name
    assert name.startswith("mine#") and language.locate_model(name, tmp_path / "lab") == str(folder)
    with pytest.raises(LabError, match="give --model mine=FOLDER"):
        language.locate_model(name, tmp_path / "elsewhere")
    (folder / "model.safetensors").rename(tmp_path / "weights")
    with pytest.raises(LabError, match="has no weights"):
        language.register_model(f"mine={folder}", tmp_path / "lab")
    (folder / "model.safetensors").write_bytes((tmp_path / "weights").read_bytes()[:-1])
    with pytest.raises(LabError, match=r"model\.safetensors cannot be read"):
        language.register_model(f"mine={folder}", tmp_path / "lab")
    weights = {key.replace("bert.", "b."): x for key, x in load_file(tmp_path / "weights").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LabError, match=r"has no weights for bert\."):
        language.load_model(str(folder), 0)
    (tmp_path / "weights").rename(folder / "model.safetensors")
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(LabError, match="tokenizer"):
        language.register_model(f"mine={folder}", tmp_path / "lab")


TORCHRUN = "torch.distributed.run --standalone --nproc-per-node 2"
ACCELERATE = (
    "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0"
)


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_on_two_ranks(launcher: str, tmp_path: Path) -> None:
    """As one process, but for the draws of dropout."""
    path = os.pathsep.join([str(Path(tam.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher.split()]
    command += ["-m", "tam", "lab", "run", "llm", "--preset", "smoke", "--study", "tiny-2", "--device", "cpu"]
    command += ["--variant", "AdaTAMW", "--seeds", "1", "--tasks", "", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = select_plans(
        Selection("llm", "smoke", ("tiny-2",), ("AdaTAMW",), 1, overrides={"tasks": []}),
        load_results(tmp_path),
    )
    (trial,) = plan.comparison_trials(plan.study.variant("AdaTAMW")) or []
    ours = TrialFolder(tmp_path, trial)
    assert result_of(ours)["ranks"] == 2
    theirs = train(tmp_path / "one", trial)
    for mine, other in zip(ours.metrics(), theirs.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=0.05)
        assert mine["perplexity"] == pytest.approx(other["perplexity"], rel=0.03)


RANKS = """
import os, sys, torch
import torch.distributed as dist
from pathlib import Path
from tam.lab.experiments.llm import trial as llm
from tam.lab.core.store import TrialFolder
from tests.lab.experiments.test_llm import Killed, config
torch.set_num_threads(1)
dist.init_process_group("gloo")
root, losses, kill_at = Path(sys.argv[1]), [], None
end_epoch, before_step = llm.Training.end_epoch, llm.Training.before_step
def noted(self, epoch):
    n = self.steps_per_epoch
    losses.append(self.recorder.values[(epoch - 1) * n : epoch * n, 0].double().mean())
    return end_epoch(self, epoch)
def counted(self, step):
    if step == kill_at:
        raise Killed
    before_step(self, step)
llm.Training.end_epoch, llm.Training.before_step = noted, counted
def train(name):
    folder = TrialFolder(root / name, config())
    folder.writes = dist.get_rank() == 0
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        list(llm.run(config(), folder, root, torch.device("cpu"), 0.0))
    except Killed:
        pass
    dist.barrier()
    return folder.metrics()
whole = train("whole")
every = [torch.empty(2, dtype=torch.float64) for _ in range(2)]
dist.all_gather(every, torch.stack(losses))
for row, both in zip(whole, torch.stack(every, 1), strict=True):
    assert both[0] != both[1] and abs(row["loss"] - float(both.mean())) < 1e-9, (row, both)
kill_at = 43
train("parts")  # it was saved after 40 steps, in the middle of the second epoch
kill_at = None
assert train("parts") == whole
print("equal", flush=True)
dist.destroy_process_group()
os._exit(0)
"""


def test_on_two_ranks_a_killed_trial_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *TORCHRUN.split(), str(tmp_path / "ranks.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0 and done.stdout.count("equal") == 2, done.stdout + done.stderr


def test_smoke_fine_tunes_scores_and_compares(tmp_path: Path) -> None:
    pytest.importorskip("mteb")
    run(Selection("llm", "smoke"), RunLocation(tmp_path, tmp_path, trials_per_process=4), 2, print)
    code, output = tam_lab("report", tmp_path, "-o", tmp_path / "report.md")
    assert code == 0, output
    text = (tmp_path / "report.md").read_text()
    assert "| MTEB, main score | AdamW | AdaTAMW |" in text and "AdaTAMW minus AdamW |" in text
    assert "Does not agree" in text and "AdaTAMW compared with AdamW, 2 epochs, means of 2 seeds: " in text
    records = list(load_results(tmp_path))
    assert all(record.result["timing"]["together"] == 1 for record in records)
    first, second = (tmp_path / "trials" / record.key for record in records[:2])
    stored = (first / "mteb/GeneratedSTS.json").read_bytes()
    (first / "mteb/GeneratedSTS.json").unlink()
    code, output = tam_lab("score", tmp_path, "--data", tmp_path)
    assert code == 0 and output.count("GeneratedSTS") == len(records)
    assert (first / "mteb/GeneratedSTS.json").read_bytes() == stored
    for name in ("model", "mteb"):
        shutil.rmtree(second / name)
    code, output = tam_lab("score", tmp_path, "--data", tmp_path)
    assert code == 1 and f"1 of {len(records)} networks lack some of their scores" in output


def test_variants_that_are_the_same_runs_are_compared_once(tmp_path: Path) -> None:
    """AdaTAMW's and that over a fifth of the lrs, in the first study alone; in the second AdamW's two."""
    changed, lr = [], variants.GRID[-1]
    result = {"perplexity": 9.0, "diverged": False, "text": "", "blocks": 1, "epochs": 0}
    for study, name in zip(studies.smoke(), (variants.FIFTH, variants.FIVE_TIMES), strict=True):
        changed.append(
            replace(
                study,
                variants=tuple(
                    replace(one, lrs=(lr,)) if one.name == name else one for one in study.variants
                ),
            )
        )
    experiment = replace(studies.EXPERIMENT, presets={"smoke": tuple(changed)})
    for plan in [Plan(experiment, study, load_results(tmp_path), "smoke") for study in changed]:
        for i, variant in enumerate(plan.study.variants):
            for trial in plan.comparison_trials(variant) or []:
                folder = TrialFolder(tmp_path, trial)
                if folder.read_result() is None:
                    with folder.at_work():
                        folder.finish(result, 1.0, CPU)
                    (folder.path / "mteb").mkdir()
                    (folder.path / "mteb" / "GeneratedSTS.json").write_text(f'{{"score": {50 + i}}}')
    both = [Plan(experiment, study, load_results(tmp_path), "smoke") for study in changed]
    first, second = (report_extras.tables(plan)[1][0][1:] for plan in both)
    usual = [f"{other} minus {baseline}" for other, baseline in variants.PAIRS]
    assert first == [name for name in usual if not name.startswith(variants.FIFTH)]
    assert second == [name for name in usual if not name.endswith(variants.FIVE_TIMES)]
    assert variants.FIFTH not in report_extras.tables(both[0])[0][0]
    lines = [line for line in report_extras.lines(both[0]) if " compared with AdamW" in line]
    fifth = f"{variants.FIFTH} compared with AdamW, {{}} epochs, means of 2 seeds"
    for pattern, epochs in ((fifth, 2), ("five times the lrs, {} epochs", 1)):
        assert sum(pattern.format(epochs) in line for line in lines) == 1
        assert not any(pattern.format(3 - epochs) in line for line in lines)
