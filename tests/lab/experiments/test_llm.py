"""Masked-LM fine-tuning: the Trainer's run against a loop written out, data and mistakes."""

from __future__ import annotations

import math
import shutil
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
from tam.lab.experiments.llm import report_extras, studies, tokens, variants
from tam.lab.experiments.llm import trial as llm
from tam.lab.experiments.llm.mteb import local_data, scoring
from tam.lab.models import language
from tests.lab.engines.test_engines import RunLocation
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
    perplexities = {"valid": iter([2.0, 1.0, 3.0, 2.0, 1.0]), "test": iter([7.0])}
    monkeypatch.setattr(llm.Training, "perplexity", lambda self, part: next(perplexities[part]))
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


def test_variants_that_are_the_same_runs_are_compared_once(tmp_path: Path) -> None:
    """AdaTAMW's and that over a fifth of the lrs, in the first study alone; in the second AdamW's two."""
    changed, lr = [], variants.GRID[-1]
    result = {"perplexity": 9.0, "diverged": False, "text": "", "blocks": 1, "epochs": 0}
    for study, name in zip(
        (studies.smoke(1), studies.smoke(2)), (variants.FIFTH, variants.FIVE_TIMES), strict=True
    ):
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
    shares = report_extras.tables(both[0])[-1]
    assert shares.header[-1] == "seeds" and {row[-1] for row in shares.rows} == {"2"}
    compared = {(row[0], row[1]): [] for row in shares.rows}
    for row in shares.rows:
        compared[row[0], row[1]].append(row[2])
    assert [epochs for (name, _), epochs in compared.items() if name == variants.FIFTH] == [["2"]]
    assert [epochs for (_, other), epochs in compared.items() if other == variants.FIVE_TIMES] == [["1"]]
