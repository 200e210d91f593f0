"""Hugging Face's Trainer trains with the optimizers, resumes them to the bit and logs their readings."""

from __future__ import annotations

import doctest
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tam
from tests.helpers import assert_same, params_of, tensors

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback

from tam.integrations import readings, unwrap
from tam.integrations.transformers import TorqueCallback, optimizer_for

TEXT = (
    "A gradient that keeps along the momentum counts fully, one at a right angle to it counts half, "
    "and one against it counts nothing. The average of the cosine decides, not the cosine of one step, "
    "so that a single batch of odd examples does not turn the path of the training around. "
)
LENGTH, MASK = 16, 0
NAMES = {"tam/alignment", "tam/damping", "tam/grad_norm"}
SPREAD = {"tam/alignment_min", "tam/alignment_max"}


class Characters(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of the text with every fifth character masked, which one depending on the window alone."""

    def __len__(self) -> int:
        return len(TEXT) - LENGTH

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.tensor([ord(c) for c in TEXT[i : i + LENGTH]])
        masked = (torch.arange(LENGTH) + i) % 5 == 0
        return {"input_ids": ids.masked_fill(masked, MASK), "labels": ids.masked_fill(~masked, -100)}


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Any:
    """accelerate has one state for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def model() -> BertForMaskedLM:
    set_seed(0)
    config = BertConfig(
        vocab_size=128,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
    )
    return BertForMaskedLM(config)


def trainer(folder: Path, options: dict[str, Any] | None = None, **given: Any) -> Trainer:
    """A Trainer of 6 steps that logs every second one, with AdaTAMW where nothing else is given."""
    arguments = {
        "output_dir": str(folder),
        "max_steps": 6,
        "logging_steps": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **(options or {}),
    }
    if "optimizers" not in given:
        given = {"optimizer_cls_and_kwargs": (tam.AdaTAMW, {"lr": 2e-3, "bias_correction": True}), **given}
    return Trainer(
        given.pop("model", None) or model(),
        args=TrainingArguments(**arguments),
        train_dataset=Characters(),
        **given,
    )


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """The training logs, without the evaluations and the summary."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_a_class_and_its_options(tmp_path: Path) -> None:
    options = {"max_steps": 60, "logging_steps": 10}
    chosen = (tam.AdaTAMW, {"lr": 4e-3, "weight_decay": 0.5, "bias_correction": True})
    job = trainer(tmp_path, options, optimizer_cls_and_kwargs=chosen)
    job.train()
    optimizer = unwrap(job.optimizer)
    assert isinstance(job.optimizer, AcceleratedOptimizer) and type(optimizer) is tam.AdaTAMW
    # The decay is the Trainer's, lr is not.
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [4e-3, 4e-3]
    assert optimizer.alignment.shape == () and abs(float(optimizer.alignment)) > 0.01
    assert len({id(optimizer.state[p]["alignment"]) for p in params_of(optimizer)}) == 1
    assert logged(job)[-1]["loss"] < logged(job)[0]["loss"] - 0.3


def decay_groups(job: Trainer, net: BertForMaskedLM, weight_decay: float) -> list[dict[str, Any]]:
    """Groups as the Trainer makes them: no weight decay for biases and norms."""
    decayed = job.get_decay_parameter_names(net)
    return [
        {
            "params": [p for name, p in net.named_parameters() if (name in decayed) == is_decayed],
            "weight_decay": weight_decay if is_decayed else 0.0,
        }
        for is_decayed in (True, False)
    ]


def test_an_optimizer_and_a_scheduler_do_the_same(tmp_path: Path) -> None:
    by_class = trainer(tmp_path)
    by_class.train()
    net = model()
    optimizer = tam.AdaTAMW(decay_groups(by_class, net, 0.1), lr=2e-3, bias_correction=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 6))
    by_object = trainer(tmp_path, model=net, optimizers=(optimizer, scheduler))
    by_object.train()
    assert unwrap(by_object.optimizer) is optimizer
    assert_same(optimizer, unwrap(by_class.optimizer))


@pytest.mark.parametrize("beta1, alignment", [(0.9, 0.0), (0.8, 0.0), (0.9, 0.75)])
def test_optimizer_for_makes_the_adatamw_that_matches(tmp_path: Path, beta1: float, alignment: float) -> None:
    options = {
        "max_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.3,
        "adam_beta1": beta1,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-6,
    }
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **options)
    pair = optimizer_for(arguments, scope="group", alignment=alignment)
    by_arguments = trainer(tmp_path, options, optimizer_cls_and_kwargs=pair)
    by_arguments.train()
    net, factor = model(), 2 * (1 - beta1) / (1 + alignment)
    intended = tam.AdaTAMW(
        decay_groups(by_arguments, net, 0.3 / factor),
        lr=1e-2 * factor,
        betas=(beta1, 0.99),
        eps=1e-6,
        bias_correction=True,
        scope="group",
    )
    by_object = trainer(tmp_path, options, model=net, optimizers=(intended, None))
    by_object.train()
    made = unwrap(by_arguments.optimizer)
    assert type(made) is tam.AdaTAMW
    assert all(
        torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(tensors(made), tensors(intended), strict=True)
    )
    assert [group["initial_lr"] for group in made.param_groups] == pytest.approx([1e-2 * factor] * 2)
    # A step decays by lr times weight_decay, which is that of AdamW.
    decays = [group["initial_lr"] * group["weight_decay"] for group in made.param_groups]
    assert decays == pytest.approx([1e-2 * 0.3, 0.0])


def test_optimizer_for_reads_the_arguments_when_the_optimizer_is_made(tmp_path: Path) -> None:
    """A search of hyperparameters changes them after the Trainer is made."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, learning_rate=1e-3, optim="paged_adamw_32bit")
    job = trainer(tmp_path, optimizer_cls_and_kwargs=optimizer_for(arguments))
    arguments.learning_rate = 5e-2
    assert [group["lr"] for group in job.create_optimizer().param_groups] == pytest.approx([1e-2] * 2)


def test_optimizer_for_resumes_its_own_run_and_refuses_adamws(tmp_path: Path) -> None:
    """The scheduler of AdamW's checkpoint would bring AdamW's learning rates back."""
    options = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", "learning_rate": 1e-3}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **options)
    own, theirs = tmp_path / "own", tmp_path / "adamw"
    whole = trainer(own, options, optimizer_cls_and_kwargs=optimizer_for(arguments))
    whole.train()
    resumed = trainer(own, options, optimizer_cls_and_kwargs=optimizer_for(arguments))
    resumed.train(resume_from_checkpoint=str(own / "checkpoint-2"))
    assert_same(unwrap(resumed.optimizer), unwrap(whole.optimizer))
    trainer(theirs, options, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-3})).train()
    job = trainer(theirs, options, optimizer_cls_and_kwargs=optimizer_for(arguments))
    with pytest.raises(ValueError, match=r"learning rates\. Convert the checkpoint"):
        job.train(resume_from_checkpoint=str(theirs / "checkpoint-2"))


@pytest.mark.parametrize("name, field", [("lr", "learning_rate"), ("weight_decay", "weight_decay")])
def test_optimizer_for_takes_hyperparameters_from_the_arguments_alone(
    tmp_path: Path, name: str, field: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{name} comes from .*: set {field} there$"):
        optimizer_for(TrainingArguments(str(tmp_path), use_cpu=True), **{name: 0.1})


def test_optimizer_for_refuses_arguments_of_another_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'optim must be an AdamW.* got "adafactor"'):
        optimizer_for(TrainingArguments(str(tmp_path), use_cpu=True, optim="adafactor"))


@pytest.mark.parametrize("attached", [False, True])
def test_readings_are_in_the_log_history(tmp_path: Path, attached: bool) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 3, "max_grad_norm": 0.0}
    callbacks = None if attached else [TorqueCallback()]
    job = trainer(tmp_path, options, callbacks=callbacks, eval_dataset=Characters())
    if attached:
        TorqueCallback.attach(job)
    job.train()
    training = logged(job)
    assert [entry["step"] for entry in training] == [2, 4, 6]
    for entry in training:
        assert entry.keys() >= NAMES and not entry.keys() & SPREAD
        assert entry["tam/damping"] == pytest.approx((1 + entry["tam/alignment"]) / 2)
        assert entry["tam/grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-5)
    assert len({entry["tam/alignment"] for entry in training}) == 3
    assert {name: training[-1][name] for name in NAMES} == {
        name: value.item() for name, value in readings(job.optimizer).items()
    }
    others = [entry for entry in job.state.log_history if "loss" not in entry]
    assert any("eval_loss" in entry for entry in others)
    assert not any(entry.keys() & NAMES for entry in others)


def test_attach_keeps_the_callback_there_is(tmp_path: Path) -> None:
    callback = TorqueCallback()
    job = trainer(tmp_path, callbacks=[callback])
    assert TorqueCallback.attach(job) is callback
    assert [type(c) for c in job.callback_handler.callbacks].count(TorqueCallback) == 1


class Counting(tam.AdaTAMW):
    reads = 0

    @property
    def grad_norm(self) -> Tensor:
        Counting.reads += 1
        return super().grad_norm


def test_nothing_is_read_on_other_steps(tmp_path: Path) -> None:
    Counting.reads = 0
    job = trainer(
        tmp_path,
        {"logging_steps": 3},
        optimizer_cls_and_kwargs=(Counting, {"lr": 1e-3}),
        callbacks=[TorqueCallback()],
    )
    job.train()
    assert Counting.reads == 2


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("how", ["attach", "order"])
def test_readings_reach_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, recwarn: pytest.WarningsRecorder
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    if how == "attach":
        job = trainer(tmp_path, {"report_to": ["tensorboard"]})
        TorqueCallback.attach(job)
    else:
        job = trainer(tmp_path, callbacks=[TorqueCallback(), TensorBoardCallback()])
    job.train()
    board = scalars(tmp_path / "board")
    for name in NAMES:
        expected = [(entry["step"], pytest.approx(entry[name], rel=1e-6)) for entry in logged(job)]
        assert board[f"train/{name}"] == expected
    assert not any("attach" in str(w.message) for w in recwarn)


def test_warns_where_a_reporter_comes_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    job = trainer(tmp_path, {"report_to": ["tensorboard"]}, callbacks=[TorqueCallback()])
    with pytest.warns(UserWarning, match=r"\['tensorboard'\].*TorqueCallback\.attach\(trainer\)"):
        job.train()
    assert "train/loss" in scalars(tmp_path / "board")
    assert not any("tam/" in tag for tag in scalars(tmp_path / "board"))
    assert all(entry.keys() >= NAMES for entry in logged(job))


@pytest.mark.parametrize("scope", ["group", "tensor"])
def test_several_segments_are_logged_with_their_spread(tmp_path: Path, scope: str) -> None:
    chosen = (tam.AdaTAMW, {"lr": 1e-3, "scope": scope})
    job = trainer(tmp_path, callbacks=[TorqueCallback()], optimizer_cls_and_kwargs=chosen)
    job.train()
    s = unwrap(job.optimizer).alignment
    assert len(s) == (2 if scope == "group" else len(params_of(job.optimizer)))
    last = logged(job)[-1]
    assert last["tam/alignment"] == pytest.approx(float(s.mean()))
    assert (last["tam/alignment_min"], last["tam/alignment_max"]) == (float(s.min()), float(s.max()))
    assert last["tam/alignment_min"] < last["tam/alignment"] < last["tam/alignment_max"]


def test_an_optimizer_without_alignment_is_named(tmp_path: Path) -> None:
    chosen = (torch.optim.AdamW, {"lr": 1e-3})
    job = trainer(tmp_path, callbacks=[TorqueCallback()], optimizer_cls_and_kwargs=chosen)
    with pytest.raises(TypeError, match=r"must be a TAM, .*, got AdamW$"):
        job.train()
    assert job.state.global_step == 0


@pytest.mark.parametrize("cls", [tam.TAM, tam.AdaTAMW])
def test_resume_is_exact(tmp_path: Path, cls: type[tam.TAM | tam.AdaTAMW]) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1}
    given: dict[str, Any] = {"callbacks": [TorqueCallback()], "optimizer_cls_and_kwargs": (cls, {"lr": 1e-2})}
    whole = trainer(tmp_path, options, **given)
    whole.train()
    half = trainer(tmp_path, options, **given)
    half.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert half.state.global_step == 6
    a, b = unwrap(whole.optimizer), unwrap(half.optimizer)
    assert a is not b
    assert_same(a, b)
    assert float(a.alignment) == float(b.alignment) != 0
    assert [{name: entry[name] for name in NAMES} for entry in logged(whole)] == [
        {name: entry[name] for name in NAMES} for entry in logged(half)
    ]


def test_a_warmup_logs_while_it_has_an_alignment(tmp_path: Path) -> None:
    """And resumes from a checkpoint after its switch."""

    def warmup() -> tuple[BertForMaskedLM, tam.Warmup]:
        net = model()
        return net, tam.Warmup(tam.TAM(net.parameters(), lr=0.05), torch.optim.SGD, 3)

    options = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 1}
    jobs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-4")):
        net, optimizer = warmup()
        job = trainer(
            tmp_path, options, model=net, optimizers=(optimizer, None), callbacks=[TorqueCallback()]
        )
        job.train(resume_from_checkpoint=checkpoint)
        assert optimizer.switched
        assert [entry.keys() >= NAMES for entry in logged(job)] == [True, True, False, False, False, False]
        jobs.append(job)
    assert_same(*(job.optimizer for job in jobs))


def test_clipping_by_the_trainer_and_within_the_step(tmp_path: Path) -> None:
    limit = 0.5
    outside = trainer(tmp_path, {"max_grad_norm": limit}, callbacks=[TorqueCallback()])
    outside.train()
    options = {"lr": 2e-3, "bias_correction": True, "max_grad_norm": limit}
    inside = trainer(
        tmp_path,
        {"max_grad_norm": 0.0},
        callbacks=[TorqueCallback()],
        optimizer_cls_and_kwargs=(tam.AdaTAMW, options),
    )
    inside.train()
    free = trainer(tmp_path, {"max_grad_norm": 0.0})
    free.train()
    for out, within in zip(logged(outside), logged(inside), strict=True):
        assert within["tam/grad_norm"] > limit
        assert out["tam/grad_norm"] == pytest.approx(limit, rel=1e-4)
        assert out["grad_norm"] == pytest.approx(within["tam/grad_norm"], rel=1e-4)
        assert out["tam/alignment"] == pytest.approx(within["tam/alignment"], abs=1e-5)
    a, b, c = (
        torch.cat([p.detach().ravel() for p in params_of(job.optimizer)]) for job in (outside, inside, free)
    )
    assert float((a - b).abs().max()) < 1e-4 < 1e-3 < float((a - c).abs().max())


def test_the_example_of_the_docstring_runs() -> None:
    results = doctest.testmod(importlib.import_module("tam.integrations.transformers"))
    assert results.attempted > 0 and results.failed == 0


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tam.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers.*'\.\[transformers\]'"):
        importlib.import_module("tam.integrations.transformers")
