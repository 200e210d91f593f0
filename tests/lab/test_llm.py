"""Masked-LM fine-tuning: the Trainer's run against a loop written out, kills, data and mistakes."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tam
from tam.lab import llm, tokens
from tam.lab.data import DataError, text
from tam.lab.embedding import local, score
from tam.lab.experiment import Plan
from tam.lab.experiments import llm as experiment
from tam.lab.models import language
from tam.lab.runner import Selection, plans, run
from tam.lab.store import LabError, TrialFolder
from tests.lab.test_engines import PATHS, Place
from tests.lab.test_tokens import labels_of_all

pytest.importorskip("transformers")
CPU = torch.device("cpu")


def config(**more: Any) -> dict[str, Any]:
    given = {
        "model": "tiny-bert", "optimizer": "adatamw", "lr": 1e-3, "seed": 0, "epochs": 2, "data": "generated",
        "block": 32, "batch": 8, "options": {"weight_decay": 0.0}, "test": True,
    }  # fmt: skip
    return llm.config_of(**{**given, **more})


def train(root: Path, one: dict[str, Any], steps: int | None = None, save_every: float = 1e9) -> TrialFolder:
    torch.set_num_threads(1)
    folder = TrialFolder(root, one)
    with folder.at_work():
        running = llm.run(one, folder, root, CPU, save_every)
        for _ in itertools.islice(running, steps):
            pass
        running.close()  # type: ignore[attr-defined]
    return folder


@pytest.mark.parametrize("optimizer", ["adamw", "adatamw"])
def test_a_trial_is_a_plain_training(optimizer: str, tmp_path: Path) -> None:
    """Order, masks, dropout, clipping and the linear decay, all written out."""
    folder = train(tmp_path, config(optimizer=optimizer, seed=3))
    tokenizer = language.load_tokenizer(language.where("tiny-bert", tmp_path))
    blocks = tokens.tokenized("generated", tokenizer, 32, 8, tmp_path, tmp_path)["train"]
    model = language.load_model(language.where("tiny-bert", tmp_path), 3)[0].train()
    made: Any = {"adamw": torch.optim.AdamW, "adatamw": tam.AdaTAMW}[optimizer]
    own = made(model.parameters(), lr=1e-3, weight_decay=0.0)
    masks, steps = tokens.Masks(tokenizer), len(blocks) // 8
    for epoch in range(2):
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(3 * 100003 + epoch))
        losses = []
        for k in range(steps):
            step = epoch * steps + k
            rows = [
                tokens.Row(
                    blocks.ids[i], blocks.special[i], tokens.drawn_from(3, 8 * step + lane, tokens.MASKS)
                )
                for lane, i in enumerate(order[8 * k : 8 * k + 8])
            ]
            torch.manual_seed(tokens.drawn_from(3, step * 1009, tokens.DROPOUT))
            batch = masks(rows)
            loss = model(batch["input_ids"], labels=labels_of_all(batch)).loss  # all tokens have logits
            own.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            own.param_groups[0]["lr"] = 1e-3 * (2 * steps - step) / (2 * steps)
            own.step()
            losses.append(loss.item())
        assert folder.metrics()[epoch]["loss"] == pytest.approx(sum(losses) / steps, rel=1e-6)
    parts = tokens.tokenized("generated", tokenizer, 32, 8, tmp_path, tmp_path)
    assert folder.metrics()[-1]["perplexity"] == pytest.approx(
        plain_perplexity(model, masks, parts["valid"]), rel=1e-5
    )
    assert folder.result is not None
    assert folder.result["settings"]["options"]["weight_decay"] == 0.0


@torch.no_grad()
def plain_perplexity(model: Any, masks: tokens.Masks, blocks: tokens.Blocks) -> float:
    """Of all masked tokens, block by block."""
    total, count = 0.0, 0
    model.eval()
    for i in range(len(blocks)):
        draw = tokens.drawn_from(0, i, tokens.MEASURED)
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
    assert again.metrics() == whole.metrics()
    assert again.result is not None and whole.result is not None
    for key in ("perplexity", "test", "at"):
        assert again.result[key] == whole.result[key]
    left = [sorted(path.name for path in folder.path.iterdir()) for folder in (again, whole)]
    names = ["alignment.pt", "config.json", "lock", "metrics.jsonl", "model", "result.json"]
    assert left[0] == left[1] == names


def test_a_checkpoint_that_is_not_whole_is_not_begun_from(tmp_path: Path) -> None:
    folder = train(tmp_path, config(epochs=3), 30, save_every=0.0)
    kept = sorted((folder.path / "checkpoints").glob("checkpoint-*"))
    assert len(kept) == 2  # after 20 steps, and after the first epoch
    for path in kept:
        (path / llm.WHOLE).unlink()  # as if it had been killed before the last file
    again = train(tmp_path, config(epochs=3))
    assert not list(again.path.glob("model-*"))
    assert [row["epoch"] for row in again.metrics()] == [1, 2, 3]
    assert again.metrics() == train(tmp_path / "other", config(epochs=3)).metrics()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", llm.WHOLE])
def test_from_a_checkpoint_that_is_damaged_to_the_one_before(name: str, tmp_path: Path) -> None:
    folder = train(tmp_path, config(), 30, save_every=0.0)
    kept = sorted((folder.path / "checkpoints").glob("checkpoint-*"), key=llm.step_of)
    (kept[-1] / name).write_bytes((kept[-1] / name).read_bytes()[:-10])
    whole = train(tmp_path / "whole", config())
    steps = llm.run(config(), folder, tmp_path, CPU, 1e9)
    with folder.at_work():
        assert 46 - llm.step_of(kept[-1]) < sum(one is None for one in steps) <= 46 - llm.step_of(kept[0])
    assert folder.metrics() == whole.metrics()


def test_of_a_trial_that_is_run_again_the_new_network_is_kept(tmp_path: Path) -> None:
    first = train(tmp_path, config())
    assert first.result is not None
    other, _ = language.load_model(str(first.path / "model"), 0)
    torch.nn.init.zeros_(other.bert.encoder.layer[0].output.dense.weight)
    other.save_pretrained(first.path / "model")  # as if it had come of other rounding
    (first.path / "result.json").unlink()
    again = train(tmp_path, config())
    assert again.result is not None and again.result["test"] == first.result["test"]
    assert not list(again.path.glob("model-*"))


def test_d_replaced_by_its_own_sequence_is_the_same_run(tmp_path: Path) -> None:
    source = train(tmp_path, config())
    same, mean = (train(tmp_path, config(damping=how, damping_of=source.key)) for how in ("same", "mean"))
    assert same.metrics() == source.metrics() != mean.metrics()


def test_the_best_epoch_counts_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"valid": iter([2.0, 1.0, 3.0, 2.0, 1.0]), "test": iter([7.0])}
    monkeypatch.setattr(llm.Training, "perplexity", lambda self, part: next(told[part]))
    folder = train(tmp_path, config(epochs=3))
    assert folder.result is not None
    assert (folder.result["perplexity"], folder.result["at"], folder.result["test"]) == (1.0, 2, 7.0)
    shorter = train(tmp_path / "part", config(epochs=3), 2 * 23 + 2)  # it is stopped after its second epoch
    kept, other = (
        language.load_model(str(path), 0)[0].state_dict()
        for path in (folder.path / "model", shorter.path / "model-002")
    )
    assert all(torch.equal(kept[key], other[key]) for key in kept)


def test_a_run_that_diverges_ends_with_that(tmp_path: Path) -> None:
    folder = train(tmp_path, config(lr=1e30, optimizer="adamw"))
    assert folder.result is not None and folder.result["diverged"] and "test" not in folder.result
    assert not (folder.path / "model").exists()


KILLED = """
import os, sys, torch
from pathlib import Path
from tam.lab import llm
from tam.lab.embedding import score
from tam.lab.store import TrialFolder
from tests.lab.test_llm import config
place, root = sys.argv[1], Path(sys.argv[2])
owner, name = {"keep": (llm.Training, "keep_model"), "save": (llm.Training, "save"),
               "tidy": (llm.Training, "tidy"), "evaluate": (score, "evaluate")}[place]
before, calls = getattr(owner, name), []
def dies(*arguments):
    calls.append(1)
    if len(calls) == 2 or place == "evaluate":
        if place == "keep":
            (root / "trials" / folder.key / ".model.part").mkdir()
        os.kill(os.getpid(), 9)
    return before(*arguments)
setattr(owner, name, dies)
torch.set_num_threads(1)
folder = TrialFolder(root, config(epochs=3, lr=2e-4))
with folder.at_work():
    for _ in llm.run(folder.config, folder, root, torch.device("cpu"), 0.0):
        pass
"""


@pytest.mark.parametrize("place", ["keep", "save", "tidy", "evaluate"])
def test_one_that_is_killed_anywhere_ends_as_another(place: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": PATHS}
    command = [sys.executable, "-c", KILLED, place, str(tmp_path / "killed")]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=240).returncode == -9
    one = config(epochs=3, lr=2e-4)  # every epoch is better than the one before
    again, whole = train(tmp_path / "killed", one), train(tmp_path / "whole", one)
    assert again.metrics() == whole.metrics()
    assert again.result is not None and whole.result is not None
    for key in ("perplexity", "test", "at", "epochs"):
        assert again.result[key] == whole.result[key]
    assert sorted(p.name for p in again.path.iterdir()) == sorted(p.name for p in whole.path.iterdir())


def test_without_epochs_the_network_is_measured_as_it_is(tmp_path: Path) -> None:
    folder = train(tmp_path, config(epochs=0))
    assert folder.result is not None and folder.result["epochs"] == 0 and not folder.result["diverged"]
    kept, _ = language.load_model(str(folder.path / "model"), 0)
    begun, _ = language.load_model(language.where("tiny-bert", tmp_path), 0)
    assert all(torch.equal(p, q) for p, q in zip(kept.parameters(), begun.parameters(), strict=True))


def test_tasks_without_embeddings_are_the_networks_to_encode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mteb")
    trial, asked = train(tmp_path, config(epochs=0)).path, []
    score.embed(str(trial / "model"), [local.GENERATED], tmp_path, trial / "embeddings", CPU)
    monkeypatch.setattr(score, "score", lambda *given: asked.append((given[1], *given[5:])))
    score.evaluate(trial, [local.GENERATED, "STS12"], tmp_path, CPU)
    assert asked == [([local.GENERATED], trial / "embeddings"), (["STS12"],)]
    shutil.rmtree(trial / "model")
    with pytest.raises(LabError, match="neither its network nor embeddings for STS12"):
        score.evaluate(trial, [local.GENERATED, "STS12"], tmp_path, CPU)
    assert asked[2:] == asked[:1]


def test_hugging_faces_defaults_are_those_the_report_names() -> None:
    from transformers import TrainingArguments

    found = TrainingArguments(use_cpu=True)
    assert found.weight_decay == 0 and found.max_grad_norm == 1 and found.warmup_steps == 0
    assert found.lr_scheduler_type == "linear" and found.per_device_train_batch_size == 8
    assert found.adam_beta1 == 0.9 and found.adam_beta2 == 0.999 and found.adam_epsilon == 1e-8
    made = llm.arguments(llm.Config(**config()), Path("here"), CPU, 10, 2)
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
    assert folder.result is not None and folder.result["steps"] > 0


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
    with pytest.raises(DataError, match=r"wiki\.train\.tokens is missing"):
        llm.check(config(data="wikitext-2"), tmp_path)
    with pytest.raises(DataError, match="must be one of wikitext-2"):
        llm.check(config(data="wikitext-3"), tmp_path)
    with pytest.raises(LabError, match="no-such-model"):
        llm.check(config(model="no-such-model"), tmp_path)
    with pytest.raises(LabError, match="is no folder"):
        language.note(f"mine={tmp_path / 'nowhere'}", tmp_path)
    with pytest.raises(LabError, match="NoSuchTask"):
        llm.check(config(tasks=("NoSuchTask",)), tmp_path)
    with pytest.raises(LabError, match="64 positions: a block of 80"):
        train(tmp_path, config(block=80))
    (tmp_path / "embedding").mkdir()
    with pytest.raises(DataError, match="sts-test"):
        llm.check(config(tasks=("STSBenchmark",)), tmp_path)
    with pytest.raises(LabError, match="which model"):
        run(Selection("llm", "encoder"), Place(tmp_path, tmp_path), 1, lambda event: None)
    with pytest.raises(LabError, match="too short for 512 blocks of 32"):
        train(tmp_path, config(batch=512))
    with pytest.raises(LabError, match="have models of their own"):
        plans(Selection("llm", "paper", given={"model": "mine"}), tmp_path)


def test_a_folder_without_a_tokenizer_or_weights(tmp_path: Path) -> None:
    folder = language.make_tiny(tmp_path / "tiny-bert")
    assert language.note(str(folder), tmp_path / "lab").startswith("tiny-bert#")
    with pytest.raises(LabError, match="mine=: nothing is no folder"):
        language.note("mine=", tmp_path / "lab")
    with pytest.raises(LabError, match="which name"):
        language.note(f"={folder}", tmp_path / "lab")
    name = language.note(f"mine={folder}", tmp_path / "lab")
    for about in ("README.md", ".gitattributes"):  # as a folder of the hub has them: the network is the same
        (folder / about).write_text("about it")
    assert language.note(f"mine={folder}", tmp_path / "lab") == name
    assert name.startswith("mine#") and language.where(name, tmp_path / "lab") == str(folder)
    with pytest.raises(LabError, match="give it with --model mine=FOLDER"):
        language.where(name, tmp_path / "elsewhere")
    (folder / "model.safetensors").rename(tmp_path / "weights")
    with pytest.raises(LabError, match="has no weights"):
        language.note(f"mine={folder}", tmp_path / "lab")
    (folder / "model.safetensors").write_bytes((tmp_path / "weights").read_bytes()[:-1])
    with pytest.raises(LabError, match=r"model\.safetensors cannot be read"):
        language.note(f"mine={folder}", tmp_path / "lab")
    weights = {key.replace("bert.", "b."): x for key, x in load_file(tmp_path / "weights").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LabError, match=r"has no weights for bert\."):
        language.load_model(str(folder), 0)
    (tmp_path / "weights").rename(folder / "model.safetensors")
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(LabError, match="tokenizer"):
        language.note(f"mine={folder}", tmp_path / "lab")


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
    command += ["--arm", "AdaTAMW", "--seeds", "1", "--tasks", "", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = plans(Selection("llm", "smoke", ("tiny-2",), ("AdaTAMW",), 1, given={"tasks": []}), tmp_path)
    (trial,) = plan.reported(plan.study.arm("AdaTAMW")) or []
    ours = TrialFolder(tmp_path, trial)
    assert ours.result is not None and ours.result["ranks"] == 2
    theirs = train(tmp_path / "one", trial)
    for mine, other in zip(ours.metrics(), theirs.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=0.05)
        assert mine["perplexity"] == pytest.approx(other["perplexity"], rel=0.03)


RANKS = """
import itertools, os, sys, torch
import torch.distributed as dist
from pathlib import Path
from tam.lab import llm
from tam.lab.store import TrialFolder
from tests.lab.test_llm import config
torch.set_num_threads(1)
dist.init_process_group("gloo")
root, found = Path(sys.argv[1]), []
before = llm.Training.end_epoch
def end_epoch(self, epoch):
    found.append(torch.stack(self.watch.losses).double().mean())
    return before(self, epoch)
llm.Training.end_epoch = end_epoch
def train(name, steps=None):
    folder = TrialFolder(root / name, config())
    folder.writes = dist.get_rank() == 0
    folder.path.mkdir(parents=True, exist_ok=True)
    running = llm.run(config(), folder, root, torch.device("cpu"), 0.0)
    for _ in itertools.islice(running, steps):
        pass
    running.close()
    dist.barrier()
    return folder.metrics()
whole = train("whole")
every = [torch.empty(2, dtype=torch.float64) for _ in range(2)]
dist.all_gather(every, torch.stack(found))
for row, both in zip(whole, torch.stack(every, 1), strict=True):
    assert both[0] != both[1] and abs(row["loss"] - float(both.mean())) < 1e-9, (row, both)
train("parts", 43)  # it was saved after 40 steps, in the middle of the second epoch
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
    from tam.lab import report

    run(Selection("llm", "smoke"), Place(tmp_path, tmp_path), 2, lambda event: None)
    report.write(tmp_path, tmp_path / "report.md")
    report.write(tmp_path, tmp_path / "report.html")
    told = (tmp_path / "report.md").read_text()
    assert "| MTEB, main score | AdamW | AdaTAMW |" in told and "|  | AdaTAMW minus AdamW | " in told
    assert "Does not agree" in told and "AdaTAMW beside AdamW, 2 epochs, means of 2 seeds: " in told


def test_arms_that_are_the_same_runs_are_compared_once(tmp_path: Path) -> None:
    """AdaTAMW's and that over a fifth of the lrs, in the first study alone; in the second AdamW's two."""
    studies, lr = [], experiment.GRID[-1]
    result = {"perplexity": 9.0, "diverged": False, "text": "", "blocks": 1}
    for study, name in zip(experiment.smoke(), (experiment.FIFTH, experiment.FIVE_TIMES), strict=True):
        arms = tuple(replace(arm, lrs=(lr,)) if arm.name == name else arm for arm in study.arms)
        studies.append(replace(study, arms=arms))
    changed = replace(experiment.EXPERIMENT, presets={"smoke": tuple(studies)})
    both = [Plan(changed, study, tmp_path, "smoke") for study in studies]
    for plan in both:
        for i, arm in enumerate(plan.study.arms):
            for trial in plan.reported(arm) or []:
                folder = TrialFolder(tmp_path, trial)
                if folder.result is None:
                    with folder.at_work():
                        folder.finish(result, 1.0, CPU)
                    (folder.path / "mteb").mkdir()
                    (folder.path / "mteb" / "GeneratedSTS.json").write_text(f'{{"score": {50 + i}}}')
    first, second = (experiment.tables(plan)[1][0][1:] for plan in both)
    usual = [f"{other} minus {baseline}" for other, baseline in experiment.PAIRS]
    assert first == [name for name in usual if not name.startswith(experiment.FIFTH)]
    assert second == [name for name in usual if not name.endswith(experiment.FIVE_TIMES)]
    assert experiment.FIFTH not in experiment.tables(both[0])[0][0]
    told = [line for line in experiment.compared(both[0]) if " beside AdamW" in line]
    fifth, five = (
        f"{experiment.FIFTH} beside AdamW, {{}} epochs, means of 2 seeds",
        "five times the lrs, {} epochs",
    )
    for pattern, epochs in ((fifth, 2), (five, 1)):
        assert sum(pattern.format(epochs) in line for line in told) == 1
        assert not any(pattern.format(3 - epochs) in line for line in told)
