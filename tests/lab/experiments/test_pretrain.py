"""Pretraining: populations of byte-level GPTs, their controls, their data and what counts as failed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

import tam
from tam.lab.commands.results import load_plans, study_status
from tam.lab.core import runner
from tam.lab.core.alignment import read_alignment
from tam.lab.core.errors import LabError, missing_package
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import load_results
from tam.lab.core.runner import run
from tam.lab.core.selection import Selection, select_plans
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder
from tam.lab.engines.events import Event, Notice, RunLocation
from tam.lab.experiments.pretrain import trial as pretrain
from tam.lab.experiments.pretrain.registered import TORQUE, variants

CPU = torch.device("cpu")
STEPS = 12


def config(**more: Any) -> pretrain.Config:
    given: dict[str, Any] = {
        "size": "tiny", "optimizer": "adatamw", "lr": 0.002, "seed": 0, "epochs": 4, "steps": STEPS,
        "warmup": 3, "context": 16, "batch": 4, "data": "generated", "options": TORQUE,
    }  # fmt: skip
    return pretrain.Config(**{**given, **more})


def variant(key: str, **more: Any) -> pretrain.Config:
    """Return a run of the registered variant with this number."""
    own = variants((0.01,))[key]
    given = {"optimizer": own.optimizer, "options": dict(own.options), "lr": own.lrs[0], **own.settings}
    return config(**{**given, **more})


@pytest.fixture(autouse=True)
def every_epoch_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(pretrain, "SAVE_EVERY", -1.0)
    monkeypatch.setattr(pretrain, "EVALUATED", 16)


def train(root: Path, configs: Sequence[pretrain.Config], count: int | None = None) -> list[TrialFolder]:
    """Train until so many values were yielded. Each of the 4 epochs yields one more than its 3 steps."""
    folders = [TrialFolder(root, one) for one in configs]
    for folder in folders:
        folder.path.mkdir(parents=True, exist_ok=True)
    for _ in itertools.islice(pretrain.run_together(configs, folders, root, CPU, -1.0), count):
        pass
    return folders


def make_population(root: Path, *configs: pretrain.Config) -> pretrain.Population:
    return pretrain.Population(configs, [TrialFolder(root, one) for one in configs], root, CPU)


def facts(folder: TrialFolder) -> tuple[Any, ...]:
    """Return everything that a trial leaves but times and machine."""
    result = folder.read_result() or {}
    files = sorted(path.name for path in folder.path.iterdir())
    return {k: v for k, v in result.items() if k not in ("timing", "machine")}, folder.metrics(), files


MIXED = [
    *(variant(key) for key in ("V1", "V1n", "V3", "V4", "V6", "V7", "V9", "V10", "V11", "V13")),
    variant("V4", seed=1),
]

# ---------------------------------------------------------------------- populations


def test_an_interrupted_population_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", MIXED)
    interrupted = train(tmp_path / "parts", MIXED, 6)  # in the second epoch
    assert all(folder.checkpoint_epoch() == 1 for folder in interrupted)
    for ours, theirs in zip(train(tmp_path / "parts", MIXED), whole, strict=True):
        assert facts(ours) == facts(theirs)  # with the digests of the files
        assert (ours.path / ALIGNMENT_FILE).stat().st_size < 4000  # of this run alone


def test_members_at_different_epochs_catch_up(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", MIXED)
    train(tmp_path / "parts", MIXED[:6], 10)  # in the third epoch
    train(tmp_path / "parts", MIXED[4:8], 5)
    for ours, theirs in zip(train(tmp_path / "parts", MIXED), whole, strict=True):
        result, expected = ours.read_result(), theirs.read_result()
        assert result is not None and expected is not None
        assert result["validation"] == pytest.approx(expected["validation"], abs=1e-4)
        assert [row["loss"] for row in ours.metrics()] == pytest.approx(
            [row["loss"] for row in theirs.metrics()], abs=1e-4
        )
        assert result["timing"]["together"] == len(MIXED)


def test_a_member_that_diverges_is_alone_in_it(tmp_path: Path) -> None:
    wild, tame = train(tmp_path / "both", [variant("V1n", lr=1e30), variant("V4")])
    _, expected = train(tmp_path / "tame", [variant("V1n"), variant("V4")])
    assert facts(tame) == facts(expected)
    result = wild.read_result()
    assert result is not None and result["diverged"] and result["failed"] and math.isnan(result["validation"])
    assert not (wild.path / ALIGNMENT_FILE).exists()


@pytest.mark.parametrize("key", ["V1", "V1n", "V6", "V3", "V4", "V4n"])
def test_a_member_is_a_loop_with_an_optimizer_of_torch_or_the_library(key: str, tmp_path: Path) -> None:
    """With its own seed, schedule and clipping, weight decay on matrices alone, and its own records."""
    one = variant(key, seed=1)
    population = make_population(tmp_path, variant("V9"), one, variant("V10", seed=2))
    network, text = population.network, pretrain.read_bytes("generated", tmp_path, 16)["train"].long()
    params = [torch.nn.Parameter(p) for p in network.init(1)]
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": 1.0, **one.options}
    optimizer = tam.AdaTAMW(groups, **options) if "bias_correction" in options else AdamW(groups, **options)
    losses, norms = [], []
    for step, lr in enumerate(one.schedule().tolist()):
        starts = population.starts[1, step]
        x, y = (torch.stack([text[i + a : i + a + 16] for i in starts])[None] for a in (0, 1))
        optimizer.zero_grad()
        loss = network.losses([p[None] for p in params], x, y, torch.float32).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, math.inf if key.endswith("n") else 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        population.step()
    for own, p in zip(population.stack.params, params, strict=True):
        torch.testing.assert_close(own[1], p, atol=2e-4, rtol=1e-3)
    folder = TrialFolder(tmp_path, one)
    folder.path.mkdir(parents=True)
    population.finish(1, folder)
    records = torch.load(folder.path / pretrain.STEPS_FILE, weights_only=True)
    assert records["loss"].tolist() == pytest.approx(losses, rel=1e-3)
    assert records["grad_norm"].tolist() == pytest.approx(norms, rel=1e-2)


def test_runs_of_a_seed_share_start_and_batches(tmp_path: Path) -> None:
    population = make_population(tmp_path, variant("V1"), variant("V4"), variant("V4", seed=1))
    assert torch.equal(population.starts[0], population.starts[1])
    assert not torch.equal(population.starts[0], population.starts[2])
    for p in population.stack.params:
        assert torch.equal(p[0], p[1]) and (p.ndim == 2 or not torch.equal(p[0], p[2]))
    assert population.starts.max() + 16 < len(population.train)


def test_what_can_train_together() -> None:
    assert pretrain.kind_of(variant("V1")) == pretrain.kind_of(variant("V9", seed=3, lr=0.5))
    for change in ({"steps": 24}, {"context": 8}, {"outliers": 0.1}, {"batch": 2}):
        assert pretrain.kind_of(config(**change)) != pretrain.kind_of(config())
    assert pretrain.most_together(config(size="4.9M", batch=16, context=256)) == 144
    assert pretrain.most_together(config(size="25M", batch=1024, context=4096)) == 1


# ---------------------------------------------------------------------- controls


def replay(root: Path, control: pretrain.Config) -> tuple[Tensor, pretrain.Population]:
    """Return s of every tensor and step as the rule reads it, before its step."""
    population, used = make_population(root, control, variant("V1")), []
    move = population._move

    def record(*arguments: Any) -> None:
        used.append(population.stack.s[0].clone())
        move(*arguments)
        assert torch.equal(population.stack.s[0], used[-1])  # the step leaves it

    population._move = record
    for epoch in range(control.epochs):
        for _ in population.epoch(epoch):
            pass
    return torch.stack(used), population


@pytest.mark.parametrize("key", ["V4", "V9"])
def test_another_seeds_damping_is_replayed_per_tensor_and_step(key: str, tmp_path: Path) -> None:
    (source,) = train(tmp_path, [variant(key, seed=1)])
    stored = read_alignment(source.path / ALIGNMENT_FILE)
    assert stored.shape == (STEPS, 15) and stored.std(0).min() > 0 and stored.std(1).max() > 0
    control = variant(key, damping="another", damping_of=source.key)
    used, _ = replay(tmp_path, control)
    assert torch.equal(used, stored.float())
    own, plain = train(tmp_path, [control, variant(key)])
    assert torch.equal(read_alignment(own.path / ALIGNMENT_FILE), stored)
    assert own.metrics() != plain.metrics()


@pytest.mark.parametrize("key", ["V4", "V7", "V9"])
def test_constant_damping_is_the_mean_of_d(key: str, tmp_path: Path) -> None:
    source = TrialFolder(tmp_path, variant(key))
    source.path.mkdir(parents=True)
    stored = torch.rand(STEPS, 15, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.6
    source.write(ALIGNMENT_FILE, stored)
    used, population = replay(tmp_path, variant(key, damping="mean", damping_of=source.key))
    highest = 0.5 if key == "V7" else 1.0
    d = ((1 + stored) / 2).clamp(max=highest)
    torch.testing.assert_close(((1 + used) / 2).clamp(max=highest), d.mean(0).expand(STEPS, -1))
    factor = population.stack.momentum_factor
    assert factor[1].isnan().all()  # of AdamW, which is no control
    if key == "V9":
        torch.testing.assert_close(factor[0], (2 * d).clamp(max=1).mean(0))
        assert not torch.allclose(factor[0], (2 * d.mean(0)).clamp(max=1))
    else:
        assert factor[0].isnan().all()


def test_its_own_s_in_full_precision_is_the_same_run(tmp_path: Path) -> None:
    """A control takes the steps of its source if s is not rounded, bit for bit."""
    first, second = (make_population(tmp_path, variant("V4")) for _ in range(2))
    used: list[Tensor] = []
    for _ in range(STEPS):
        first.step()
        used.append(first.stack.s.clone())
    second.stack._smoothing.fill_(1.0)
    second.controls, second.source = torch.tensor([0]), torch.stack(used, 1)
    for _ in range(STEPS):
        second.step()
    for ours, theirs in zip(first.stack.params, second.stack.params, strict=True):
        assert torch.equal(ours, theirs)


def test_controls_whose_source_does_not_fit(tmp_path: Path) -> None:
    """They end before any training, and the error names the source."""
    (source,) = train(tmp_path, [variant("V4", seed=1)])
    lost = variant("V4", damping="another", damping_of="0123456789ab")
    longer = variant("V4", damping="another", damping_of=source.key, steps=16, epochs=4)
    other = variant("V4", damping="shuffled", damping_of=source.key)
    for control, message in (
        (lost, "0123456789ab.* is missing: this control needs the alignment of the trial 0123456789ab"),
        (longer, f"the trial {source.key} whose damping this control uses has 12 steps, not 16"),
        (other, "pretrain has no control with damping 'shuffled'"),
    ):
        with pytest.raises(LabError, match=message):
            train(tmp_path, [control], 1)
        assert not TrialFolder(tmp_path, control).metrics()


# ---------------------------------------------------------------------- settings and results


def test_schedule() -> None:
    lrs = config(lr=2.0, steps=100, epochs=1, warmup=10).schedule().tolist()
    for step, lr in enumerate(lrs):
        share = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        assert lr == pytest.approx(2 * (step + 1) / 10 if step < 10 else 2 * share)
    assert lrs[9] == lrs[10] == 2.0 and lrs[-1] == pytest.approx(0.2, rel=0.01)
    lowered = config(lr=2.0, steps=100, epochs=1, warmup=10, lowered=0.42).schedule().tolist()
    assert lowered == pytest.approx([lr / (1 + 0.42 * lr / 2.0) for lr in lrs])
    assert config(lr=2.0, warmup=0).schedule()[0] == 2.0


def test_a_run_that_is_no_better_than_byte_pairs_has_failed(tmp_path: Path) -> None:
    one = variant("V4", test=True)
    population, folder = make_population(tmp_path, one), TrialFolder(tmp_path, one)
    folder.path.mkdir(parents=True)
    for bound in (1.0, 100.0):
        population.pair_entropy = bound
        result = population.finish(0, folder)
        assert result["failed"] == (bound == 1.0) and not result["diverged"]
        assert result["pair_entropy"] == bound and result["parameters"] == 41_120
    assert result["test"] == pytest.approx(population.evaluate(population.test)[0])
    population.losses[0, -1] = math.nan
    result = population.finish(0, folder)
    assert result["failed"] and result["diverged"] and math.isnan(result["validation"])


def test_a_text_is_evaluated_in_order(tmp_path: Path) -> None:
    """By the loss of each sequence alone, in batches that do not divide them."""
    population = make_population(tmp_path, variant("V1"), variant("V1", seed=1))
    content = population.valid[: 5 * 16 + 9]
    expected = torch.zeros(2)
    for i in range(5):
        part = content[16 * i : 16 * i + 17].long().expand(2, 1, 17)
        expected += population.network.losses(
            [p.detach() for p in population.stack.params], part[..., :-1], part[..., 1:], torch.float32
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "EVALUATION_BATCH", 2)
        assert population.evaluate(content) == pytest.approx((expected / 5).tolist(), rel=1e-5)


@pytest.mark.parametrize(
    "mistake, message",
    [
        ({"size": "7B"}, "size='7B': must be one of 25M, 4.9M, 0.9M, tiny"),
        ({"epochs": 5}, "epochs divide steps"),
        ({"batch": 0}, "must be at least 1"),
        ({"warmup": 12}, "0 <= warmup < steps"),
        ({"clip": -1.0}, "clip >= 0"),
        ({"outliers": 1.5}, "0 <= outliers <= 1"),
        ({"optimizer": "angulargrad", "options": {}}, "no rule for the optimizer"),
        ({"options": {"scope": "layer"}}, "scope must be"),
        (
            {"optimizer": "adamw", "options": {}, "damping": "mean", "damping_of": "0" * 12},
            "must have a damping",
        ),
    ],
)
def test_mistakes(mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**mistake)


def test_without_the_package_schedule_free_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "find_spec", lambda name: None)
    events: list[Event] = []
    selection = Selection("pretrain", "smoke", variants=("schedule-free AdamW",))
    for _ in range(2):
        run(selection, RunLocation(tmp_path, tmp_path), 1, events.append)
    notices = [event.text for event in events if isinstance(event, Notice)]
    left_out = f"10 trials are left out: {missing_package('schedule-free AdamW', 'schedulefree')}"
    assert notices[:2] == [left_out, left_out]
    assert [text.partition(".")[0] for text in notices[2:]] == [
        "10 trials are finished, and no other trial can run"
    ]
    assert {record.config["optimizer"] for record in load_results(tmp_path)} == {"adamw"}
    (plans,) = load_plans(tmp_path)
    status = study_status(plans, tmp_path)
    variant = next(one for one in status.variants if one.name == "schedule-free AdamW")
    reason = str(missing_package("schedule-free AdamW", "schedulefree"))
    assert (status.to_run, variant.blocked, variant.note) == (0, 10, reason)
    assert all(one.blocked == 0 for one in status.variants if one is not variant)
    assert status.state.startswith(f"done; 10 trials cannot run: {reason}")


def test_one_population_trains_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes about 60 GB of a GPU, and `--together` is 4 by default."""
    locations: list[RunLocation] = []

    def make_engine(name: str, location: RunLocation, *_: Any) -> Any:
        locations.append(location)
        raise LabError("enough")

    monkeypatch.setattr(runner, "make_engine", make_engine)
    with pytest.raises(LabError, match="enough"):
        run(Selection("pretrain", "smoke"), RunLocation(tmp_path, tmp_path, trials_per_process=4), 2, print)
    assert [location.trials_per_process for location in locations] == [1]


@pytest.mark.parametrize(
    "experiment, preset, needs_gpu",
    [
        ("pretrain", "registered", True), ("pretrain", "cpu", False), ("pretrain", "smoke", False),
        ("sgd_ladder", "registered", True), ("sgd_ladder", "quick", False), ("toy", "paper", False),
    ],
)  # fmt: skip
def test_a_preset_that_needs_a_gpu_says_so_on_a_cpu(
    experiment: str, preset: str, needs_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_engine(*_: Any) -> Any:
        raise LabError("enough")

    monkeypatch.setattr(runner, "make_engine", make_engine)
    monkeypatch.setattr(runner, "check_trial", lambda *_: None)
    events: list[Event] = []
    with pytest.raises(LabError, match="enough"):
        run(Selection(experiment, preset), RunLocation(tmp_path, tmp_path), 1, events.append)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("is meant for a GPU" in text for text in notices) == needs_gpu


def test_the_smaller_gpt_has_its_own_seeds() -> None:
    presets = get_experiment("pretrain").presets
    registered = {seed for study in presets["registered"] for seed in study.seeds}
    for study in presets["cpu"]:
        assert registered.isdisjoint(study.seeds) and study.workload["size"] == "0.9M"
        lrs = {variant.name: variant.lrs for variant in study.variants if variant.control_of is None}
        for name, own in lrs.items():  # AdaTAMW's own lr is a fifth
            ratio = 0.2 if name.startswith(("AdaTAMW", "d at", "gain")) else 1
            assert own == pytest.approx([ratio * lr for lr in lrs["AdamW"]])


def test_the_lab_runs_the_smoke_preset(tmp_path: Path) -> None:
    """A ladder of all rules, with its controls, in seconds."""
    selection = Selection("pretrain", "smoke")
    run(selection, RunLocation(tmp_path, tmp_path, trials_per_process=4), 2, lambda event: None)
    (plan,) = select_plans(selection, load_results(tmp_path))
    assert plan.to_run() == []
    records = list(load_results(tmp_path))
    assert len(records) == 12 * 5 * 2 and not any(record.result["diverged"] for record in records)
    controls = [TrialFolder(tmp_path, one.config) for one in records if "damping" in one.config]
    assert len(controls) == 2 * 5 * 2
    for control in controls:
        source = read_alignment(tmp_path / "trials" / control.config["damping_of"] / ALIGNMENT_FILE)
        used = read_alignment(control.path / ALIGNMENT_FILE)
        if control.config["damping"] == "another":
            assert torch.equal(used, source)
        else:
            torch.testing.assert_close(used.float(), source.float().mean(0).expand(40, -1), atol=5e-4, rtol=0)
