"""Warm-up and mode connectivity: the switch against a loop written out, forks, barriers, jumps."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import tam
from tam.lab.core.errors import LabError
from tam.lab.core.plan import Plan
from tam.lab.core.results import load_results
from tam.lab.core.selection import PresetGroup
from tam.lab.core.store import TrialFolder
from tam.lab.core.study import Study
from tam.lab.experiments.images import trial as images
from tam.lab.experiments.warmup import forks
from tam.lab.experiments.warmup.figures import BARRIERS
from tam.lab.experiments.warmup.studies import EXPERIMENT
from tam.lab.report import build_report, render_markdown
from tam.lab.report.outcomes import first_jump
from tam.lab.training.augmentation import normalize
from tests.lab.experiments.test_images import config as run_config
from tests.lab.experiments.test_images import make_training, outcome, run

CPU = torch.device("cpu")


def pair(root: Path, steps: int | None = None, **more: Any) -> TrialFolder:
    """Train two forks, or take their first steps."""
    torch.set_num_threads(1)
    given = dataclasses.asdict(run_config(schedule="constant", epochs=5, keep_at=(2,)))
    config = forks.Config(**{**given, "at": 2, **more})
    folder = TrialFolder(root, config)
    with folder.at_work():
        for _ in itertools.islice(forks.run(config, folder, root, CPU, 0.0), steps):
            pass
    return folder


@pytest.mark.parametrize("buffers", ["keep", "rescale"])
def test_a_warm_up_is_tam_and_then_sgdm_at_half_its_lr(
    buffers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TAM's momentum as it is, or doubled: at d = 1/2 SGDM's is twice TAM's."""
    torch.set_num_threads(1)
    monkeypatch.setattr(images, "STEPS_BEFORE_SWITCH", 3)  # of the five steps of an epoch
    more = {"augment": False, "epochs": 4, "schedule": "constant", "lr": 0.05}
    folder = run(tmp_path, sgdm_from=2, buffers=buffers, **more)
    training = make_training(tmp_path, **more)
    model, optimizer = training.model, tam.TAM(training.model.parameters(), lr=0.05)
    second = torch.optim.SGD(model.parameters(), lr=0.025, momentum=0.9)
    losses, lengths = [], []
    for epoch in range(4):
        training.begin(epoch)
        total = 0.0
        for batch in training.draws.order.reshape(5, 64):
            x = normalize(training.images[batch], training.mean, training.std)
            loss = cross_entropy(model(x), training.labels[batch])
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            (optimizer if epoch < 2 else second).step()
            lengths.append(
                float((torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm())
            )
            total += loss.item() / 5
        if epoch == 1:
            factor = 1.0 if buffers == "keep" else 2.0
            for p in model.parameters():
                second.state[p]["momentum_buffer"] = factor * optimizer.state[p]["momentum_buffer"]
        losses.append(total)
    assert [row["loss"] for row in folder.metrics()] == pytest.approx(losses, rel=1e-4)
    assert ["alignment" in row for row in folder.metrics()] == [True, True, False, False]
    assert [row["lr"] for row in folder.metrics()] == [0.05, 0.05, 0.025, 0.025]
    measured = [row.get("update_norm") for row in folder.metrics()]
    assert measured == [
        None,
        pytest.approx(sum(lengths[7:10]) / 3, rel=1e-4),
        pytest.approx(lengths[10]),
        None,
    ]
    assert len(torch.load(folder.path / "alignment.pt", weights_only=True)) == 10


def test_a_killed_warm_up_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = outcome(run(tmp_path / "whole", sgdm_from=2))
    for steps in (8, 13):  # before and after the switch
        run(tmp_path / str(steps), steps, sgdm_from=2)
        assert outcome(run(tmp_path / str(steps), sgdm_from=2)) == whole


def test_schedules() -> None:
    tail = run_config(schedule="tail", epochs=10, lr=1.0)
    assert [tail.learning_rate(epoch) for epoch in (0, 7, 8, 9)] == pytest.approx([1, 1, 1, 0.5])
    with pytest.raises(ValueError, match="sgdm_from must be an epoch of a run with TAM"):
        run_config(sgdm_from=3)  # of 3
    with pytest.raises(ValueError, match=r"schedule must be .*, got 'step'"):
        run_config(schedule="step")


def test_forks_start_from_the_state_of_a_run_or_train_up_to_it(tmp_path: Path) -> None:
    run(tmp_path / "left", schedule="constant", epochs=5, keep_at=(2,))
    left, own = pair(tmp_path / "left"), pair(tmp_path / "own")
    assert outcome(left) == outcome(own)
    assert [row["epoch"] for row in left.metrics()] == [3, 4, 5]
    result = left.read_result()
    assert result is not None and result["barrier"] == result["barrier_train"] >= 0
    (kept,) = (tmp_path / "left").glob("trials/*/state-002.pt")
    kept.write_bytes(b"damaged")
    left.path.joinpath("result.json").unlink()
    with pytest.raises(LabError, match=r"state-002.pt is damaged"):
        pair(tmp_path / "left")


def test_forks_do_not_start_from_a_state_that_was_changed(tmp_path: Path) -> None:
    """Also if the run was killed after it had left the state."""
    run(tmp_path, steps=18, save_every=0.0, schedule="constant", epochs=5, keep_at=(2,))
    run(tmp_path, schedule="constant", epochs=5, keep_at=(2,))
    (path,) = tmp_path.glob("trials/*/state-002.pt")
    state = torch.load(path, weights_only=True)
    torch.save({**state, "more": 1}, path)
    with pytest.raises(LabError, match=rf"{path} is damaged"):
        pair(tmp_path)


def test_forks_differ_in_their_batches_alone(tmp_path: Path) -> None:
    made = [make_training(tmp_path, order=order) for order in (0, 1, 2)]
    for training in made:
        training.begin(2)
    orders = [training.draws.order for training in made]
    assert not torch.equal(orders[1], orders[2]) and not torch.equal(orders[0], orders[1])
    assert all(torch.equal(training.validation, made[0].validation) for training in made)
    assert all(torch.equal(order.sort().values, orders[0].sort().values) for order in orders)


@pytest.mark.parametrize("optimizer", ["sgdm", "tam"])
def test_a_fork_learns_what_it_learns_without_the_other(optimizer: str, tmp_path: Path) -> None:
    """They share nothing but where they begin: their momenta are two."""
    folder = pair(tmp_path, optimizer=optimizer)
    alone, right = [], []
    for order in forks.FORK_ORDERS:
        training = make_training(tmp_path, schedule="constant", epochs=5, optimizer=optimizer)
        epochs = []
        for epoch in range(5):
            if epoch == 2:
                training.config = dataclasses.replace(training.config, order=order)
            training.begin(epoch)
            for _ in range(training.steps):
                training.step()
            epochs.append(float(training.measured(epoch)[:, 0].double().mean()))
        alone.append(epochs[2:])
        right.append(float(training.accuracy(*training.validation_set())))
    expected = [sum(both) / 2 for both in zip(*alone, strict=True)]
    assert [row["loss"] for row in folder.metrics()] == pytest.approx(expected, rel=1e-6)
    assert folder.metrics()[-1]["validation"] == pytest.approx(sum(right) / 2) != right[0]


def test_killed_forks_end_with_the_same_bits(tmp_path: Path) -> None:
    whole = outcome(pair(tmp_path / "whole", schedule="tail"))
    for steps, at in ((8, 1), (20, 3)):  # on the way there, and in the second epoch from there
        parts = tmp_path / str(steps)
        last = max(pair(parts, steps, schedule="tail").path.glob("checkpoint-*"))
        assert last.name.startswith(f"checkpoint-{at:06d}")
        assert outcome(pair(parts, schedule="tail")) == whole


def test_forks_killed_before_they_started_may_find_a_state_later(tmp_path: Path) -> None:
    whole = outcome(pair(tmp_path / "whole"))
    pair(tmp_path / "later", 8)
    run(tmp_path / "later", schedule="constant", epochs=5, keep_at=(2,))
    assert len(pair(tmp_path / "later", 5 + 1).metrics()) == 1  # it does not train up to there any more
    assert outcome(pair(tmp_path / "later")) == whole


def test_forks_that_have_started_need_no_state(tmp_path: Path) -> None:
    whole = outcome(pair(tmp_path / "whole"))
    run(tmp_path / "left", schedule="constant", epochs=5, keep_at=(2,))
    pair(tmp_path / "left", 8)  # in its fourth epoch
    (kept,) = (tmp_path / "left").glob("trials/*/state-002.pt")
    kept.write_bytes(b"damaged")
    assert outcome(pair(tmp_path / "left")) == whole


def test_forks_with_a_tail_start_from_a_run_at_a_fixed_lr(tmp_path: Path) -> None:
    run(tmp_path / "left", schedule="constant", epochs=5, keep_at=(2,))
    steps = 5 + 1  # of its third epoch: it does not train up to there
    assert len(pair(tmp_path / "left", steps, schedule="tail").metrics()) == 1
    assert outcome(pair(tmp_path / "left", schedule="tail")) == outcome(
        pair(tmp_path / "own", schedule="tail")
    )


def make_plan(root: Path, study: Study, preset: str = "smoke") -> Plan:
    return Plan(EXPERIMENT, study, load_results(root), preset)


def fork_study() -> Study:
    (study,) = (study for study in EXPERIMENT.presets["smoke"] if study.outcome == "barrier")
    return study


def write_results(root: Path, study: Study, variant: str, results: list[dict[str, Any]]) -> Plan:
    """Write the results of a variant's first seeds, and return the plan that reads them."""
    trials = make_plan(root, study).comparison_trials(study.variant(variant))
    assert trials is not None
    for trial, result in zip(trials, results, strict=False):
        folder = TrialFolder(root, trial)
        with folder.at_work():
            for row in result.pop("metrics", []):
                folder.log(row)
            folder.finish({"diverged": False, **result}, 1.0, CPU)
    return make_plan(root, study)


def test_diverged_forks_have_no_figure_in_the_report(tmp_path: Path) -> None:
    study, nan = fork_study(), float("nan")
    name = study.variants[0].name
    lines = {key: [nan] * 11 for key in ("line_train", "line_validation")}
    diverged = {"barrier": nan, "barrier_train": nan, **lines, "diverged": True}
    plan = write_results(tmp_path, study, name, [dict(diverged), dict(diverged)])
    text = render_markdown(build_report([PresetGroup([plan], ())]))
    assert f"| {name} | 0.1 | 0.1 | 0 of 2, 2 diverged | no figure |" in text
    assert text.count(f"| {name} |") == 1 and "at an end" not in text.split("- **")[0]


def test_barriers_against_a_line_written_out(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    a, b = (make_training(tmp_path, order=i) for i in (1, 2))
    same = forks.barriers(a, b)
    assert all(same[name] == pytest.approx(0, abs=1e-6) for name in BARRIERS)
    for training in (a, b):
        training.begin(0)
        for _ in range(5):
            training.step()
    flat = [torch.cat([p.detach().flatten() for p in one.model.parameters()]).double() for one in (a, b)]
    share = (flat[0] - flat[1]).norm() / (0.5 * flat[0].norm() + 0.5 * flat[1].norm())
    assert forks.relative_distance(a, b) == pytest.approx(float(share)) and share > 0.001
    assert forks.relative_distance(a, a) == 0
    for training in (a, b):
        training.model.to(memory_format=torch.channels_last)  # as on a GPU
    assert forks.relative_distance(a, b) == pytest.approx(float(share))
    found = forks.barriers(a, b)
    batches = torch.split(a.train[:5000], 500)
    ends, between = [training.model.state_dict() for training in (a, b)], copy.deepcopy(a.model).eval()
    for name, rows in (("train", a.train), ("validation", a.validation)):
        x, y = normalize(a.images[rows], a.mean, a.std), a.labels[rows]
        losses, anew = [], []
        for i in range(11):
            mixed = {k: torch.lerp(v.double(), ends[1][k].double(), i / 10) for k, v in ends[0].items()}
            between.load_state_dict({k: v.to(ends[0][k].dtype) for k, v in mixed.items()})
            with torch.no_grad():
                losses.append(float(cross_entropy(between(x), y)))
                estimate(between, [normalize(a.images[batch], a.mean, a.std) for batch in batches])
                anew.append(float(cross_entropy(between(x), y)))
        height = max(losses) - (losses[0] + losses[-1]) / 2
        assert found[f"barrier_{name}_as_they_are"] == pytest.approx(height, rel=1e-3, abs=1e-5)
        assert found[f"line_{name}_as_they_are"] == pytest.approx(losses, rel=1e-4)
        assert found[f"line_{name}"] == pytest.approx(anew, rel=1e-4)
        assert found[f"barrier_{name}"] == pytest.approx(max(anew) - (anew[0] + anew[-1]) / 2, abs=1e-5)
        assert found[f"barrier_{name}"] != found[f"barrier_{name}_as_they_are"]


def estimate(model: torch.nn.Module, batches: list[torch.Tensor]) -> None:
    """Batch norm's statistics of training images: the mean over the batches."""
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
        norm.train()
    for batch in batches:
        model(batch)
    model.eval()


def test_jumps() -> None:
    assert first_jump([1.0] * 30) is None
    assert first_jump([1.02**i for i in range(60)]) is None  # slow
    jump = first_jump([1.0] * 20 + [1.8, 1.9] + [1.0] * 10)
    assert jump is not None and (jump.epoch, jump.size) == (21, pytest.approx(1.8))
    assert first_jump([9.0, 1.0, 1.0]) is None  # too few to tell
    assert first_jump([1.0] * 9 + [2.0]) is None
    jump = first_jump([1.0] * 10 + [1.6])  # as soon as there are ten before it
    assert jump is not None and (jump.epoch, jump.size) == (11, pytest.approx(1.6))
    assert first_jump([1.0] * 10 + [1.45]) is None
    jump = first_jump([9.0] * 4 + [1.0] * 6 + [1.6])  # the median of the ten, not their mean
    assert jump is not None and jump.size == pytest.approx(1.6)
    jump = first_jump([1.0] * 5 + [2.0] * 5 + [2.3])  # 1.5 is the median of the ten; with the jump it is 2
    assert jump is not None and jump.size == pytest.approx(2.3 / 1.5)
    assert first_jump([0.0] * 10 + [1.0]) is None  # nothing it could be a multiple of


@pytest.mark.parametrize("mistake", [{"at": 5}, {"at": -1}, {"sgdm_from": 3}])
def test_mistakes(mistake: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at must be|cannot be forked"):
        pair(tmp_path, **mistake)


def test_the_control_of_tam_is_sgdm_at_half_the_lr(tmp_path: Path) -> None:
    """The control of TAM at 0.1 has the trials of a variant, and so has that of TAM at 0.2."""
    for study, like in zip(EXPERIMENT.presets["quick"], ("SGDM, half its lr", "SGDM"), strict=False):
        plan = make_plan(tmp_path, study, "quick")
        control, same = (
            plan.comparison_trials(study.variant(name)) for name in ("SGDM at TAM's effective lr", like)
        )
        assert control == same is not None


def test_a_report_says_how_long_the_step_after_a_switch_is(tmp_path: Path) -> None:
    name = "TAM until 1, then SGDM"
    rows = [
        [{"epoch": i, "grad_norm": 1.0, "update_norm": norm} for i, norm in enumerate(norms, 1)]
        for norms in ((2.0, 1.0), (1.0, 0.4))
    ]
    results = [{"validation": 90.0, "metrics": metrics} for metrics in rows]
    plan = write_results(tmp_path, EXPERIMENT.presets["smoke"][0], name, results)
    (table,) = EXPERIMENT.extras.tables(plan)
    assert "first step after the switch" in table.caption
    assert table.header == ["variant", "seed 0", "seed 1"] and table.rows == [[name, "0.50", "0.40"]]


def test_a_report_has_the_first_jump_of_each_seed(tmp_path: Path) -> None:
    def rows(*norms: float) -> list[dict[str, float]]:
        return [{"epoch": i, "grad_norm": norm} for i, norm in enumerate(norms, 1)]

    study, flat = EXPERIMENT.presets["smoke"][0], rows(*[1.0] * 12)
    results = [{"validation": 90.0, "metrics": metrics} for metrics in (flat, rows(*[1.0] * 11, 2.0))]
    plan = write_results(tmp_path, study, "TAM", results)
    (table,) = EXPERIMENT.extras.tables(plan)
    assert table.rows == [["TAM", "none", "12 (x 2.00)"]] and not EXPERIMENT.extras.lines(plan)
    steady = write_results(tmp_path / "steady", study, "TAM", [{"validation": 90.0, "metrics": flat}])
    assert not EXPERIMENT.extras.tables(steady)
    assert EXPERIMENT.extras.lines(steady) == ["No run has a jump of the gradient norm."]


def test_forks_are_planned_at_a_fixed_lr_and_with_a_tail() -> None:
    for preset in ("paper", "quick"):
        schedules = [
            study.workload["schedule"] for study in EXPERIMENT.presets[preset] if study.outcome == "barrier"
        ]
        assert schedules == ["constant", "tail"]


def test_the_same_runs_are_compared_in_one_preset_alone() -> None:
    def compared(preset: str) -> set[tuple[str, str]]:
        return {pair for study in EXPERIMENT.presets[preset] for pair in study.comparisons()}

    assert ("SGDM, halved at 100", "SGDM") in compared("long") - compared("late")
    assert compared("long") & compared("late") == {  # TAM at another lr
        ("TAM", "SGDM"),
        ("TAM until 100, then SGDM", "SGDM"),
        ("TAM until 100, then SGDM", "SGDM, halved at 100"),
    }


def test_a_report_says_how_far_apart_forks_are(tmp_path: Path) -> None:
    study = fork_study()
    name = study.variants[0].name
    plan = write_results(tmp_path, study, name, [{"barrier_train": 0.25, "apart": 0.004}])
    (table,) = EXPERIMENT.extras.tables(plan)
    (row,) = table.rows
    assert (row[0], row[1], row[-1]) == (name, "0.2500", "0.004") and set(row[2:-1]) == {""}


def test_a_report_says_when_a_barrier_is_the_loss_of_an_end(tmp_path: Path) -> None:
    study = fork_study()
    name = study.variants[0].name
    losses = ([1.5, 1.2, 1.0], [1.0, 1.5, 1.0])
    results = [{"barrier_train": max(line) - (line[0] + line[-1]) / 2, "line_train": line} for line in losses]
    plan = write_results(tmp_path, study, name, results)
    (table,) = EXPERIMENT.extras.tables(plan)
    assert table.rows[0][:2] == [name, "0.3750 (at an end in 1 of 2)"]


def test_a_warm_up_records_the_settings_of_its_first_optimizer(tmp_path: Path) -> None:
    """Also one that was killed after the switch."""
    run(tmp_path / "killed", 13, sgdm_from=2)
    for root in (tmp_path / "whole", tmp_path / "killed"):
        result = run(root, sgdm_from=2, options={"weight_decay": 0.01}).read_result()
        killed = run(root, sgdm_from=2).read_result()
        assert result is not None and killed is not None
        settings = result["settings"]
        assert settings["optimizer"] == "tam" and settings["sgdm_from"] == 2
        expected = {"smoothing": 0.9, "momentum": 0.9, "weight_decay": 0.01, "scope": "global"}
        assert expected.items() <= settings["options"].items() and "nesterov" not in settings["options"]
        assert killed["settings"]["options"]["smoothing"] == 0.9
