"""Warm-up and mode connectivity: the switch against a loop written out, copies, barriers, jumps."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import tam
from tam.lab import connectivity, images, report
from tam.lab.connectivity import first_jump
from tam.lab.experiment import Plan
from tam.lab.experiments.warmup import BARRIERS, EXPERIMENT
from tam.lab.runner import Group
from tam.lab.store import LabError, TrialFolder
from tests.lab.test_images import config as run_config
from tests.lab.test_images import outcome, run

CPU = torch.device("cpu")


def pair(root: Path, steps: int | None = None, **more: Any) -> TrialFolder:
    """Two copies."""
    torch.set_num_threads(1)
    given = {**run_config(schedule="constant", epochs=5, keep_at=(2,)), "at": 2, **more}
    folder = TrialFolder(root, connectivity.config_of(**given))
    with folder.at_work():
        for _ in itertools.islice(connectivity.run(folder.config, folder, root, CPU, 0.0), steps):
            pass
    return folder


@pytest.mark.parametrize("buffers", ["keep", "rescale"])
def test_a_warm_up_is_tam_and_then_sgdm_at_half_its_lr(
    buffers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TAM's momentum as it is, or doubled: at d = 1/2 SGDM's is twice TAM's."""
    torch.set_num_threads(1)
    monkeypatch.setattr(images, "BEFORE", 3)  # of the five steps of an epoch
    more = {"augment": False, "epochs": 4, "schedule": "constant", "lr": 0.05}
    folder = run(tmp_path, sgdm_from=2, buffers=buffers, **more)
    training = images.Training(images.Config(**run_config(**more)), tmp_path, CPU, None)
    model, optimizer = training.model, tam.TAM(training.model.parameters(), lr=0.05)
    second = torch.optim.SGD(model.parameters(), lr=0.025, momentum=0.9)
    losses, lengths = [], []
    for epoch in range(4):
        training.draws.epoch(epoch)
        total = 0.0
        for batch in training.draws.order.reshape(5, 64):
            x = images.normalise(training.images[batch], training.mean, training.std)
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
    tail = images.Config(**run_config(schedule="tail", epochs=10, lr=1.0))
    assert [tail.learning_rate(epoch) for epoch in (0, 7, 8, 9)] == pytest.approx([1, 1, 1, 0.5])
    with pytest.raises(ValueError, match="sgdm_from must be an epoch of TAM's run"):
        run_config(sgdm_from=3)  # of 3
    with pytest.raises(ValueError, match="schedule='step'"):
        run_config(schedule="step")


def test_copies_begin_from_what_a_run_has_left_or_train_up_to_there(tmp_path: Path) -> None:
    run(tmp_path / "left", schedule="constant", epochs=5, keep_at=(2,))
    left, own = pair(tmp_path / "left"), pair(tmp_path / "own")
    assert outcome(left) == outcome(own)
    assert [row["epoch"] for row in left.metrics()] == [3, 4, 5]
    result = left.result
    assert result is not None and result["barrier"] == result["barrier_train"] >= 0
    (kept,) = (tmp_path / "left").glob("trials/*/state-002.pt")
    kept.write_bytes(b"damaged")
    left.path.joinpath("result.json").unlink()
    with pytest.raises(LabError, match=r"state-002.pt is damaged"):
        pair(tmp_path / "left")


def test_copies_differ_in_their_batches_alone(tmp_path: Path) -> None:
    made = [
        images.Training(images.Config(**run_config(order=order)), tmp_path, CPU, None) for order in (0, 1, 2)
    ]
    for training in made:
        training.draws.epoch(3)
    orders = [training.draws.order for training in made]
    assert not torch.equal(orders[1], orders[2]) and not torch.equal(orders[0], orders[1])
    assert all(torch.equal(training.validation, made[0].validation) for training in made)
    assert all(torch.equal(order.sort().values, orders[0].sort().values) for order in orders)


@pytest.mark.parametrize("optimizer", ["sgdm", "tam"])
def test_a_copy_learns_what_it_learns_without_the_other(optimizer: str, tmp_path: Path) -> None:
    """They share nothing but where they begin: their momenta are two."""
    folder = pair(tmp_path, optimizer=optimizer)
    given = run_config(schedule="constant", epochs=5, optimizer=optimizer)
    alone, right = [], []
    for order in connectivity.COPIES:
        training, epochs = images.Training(images.Config(**given), tmp_path, CPU, None), []
        for epoch in range(5):
            if epoch == 2:
                training.draws.config = images.Config(**{**given, "order": order})
            training.begin(epoch)
            for _ in range(training.steps):
                training.step()
            epochs.append(float(training.seen[:, 0].double().mean()))
        alone.append(epochs[2:])
        right.append(float(training.accuracy(*connectivity.validation(training))))
    expected = [sum(both) / 2 for both in zip(*alone, strict=True)]
    assert [row["loss"] for row in folder.metrics()] == pytest.approx(expected, rel=1e-6)
    assert folder.metrics()[-1]["validation"] == pytest.approx(sum(right) / 2) != right[0]


def test_killed_copies_end_with_the_same_bits(tmp_path: Path) -> None:
    whole = outcome(pair(tmp_path / "whole", schedule="tail"))
    for steps, at in ((8, 1), (20, 3)):  # on the way there, and in the second epoch from there
        parts = tmp_path / str(steps)
        last = max(pair(parts, steps, schedule="tail").path.glob("checkpoint-*"))
        assert last.name.startswith(f"checkpoint-{at:06d}")
        assert outcome(pair(parts, schedule="tail")) == whole


def test_copies_that_were_killed_before_they_began_may_find_a_state_later(tmp_path: Path) -> None:
    whole = outcome(pair(tmp_path / "whole"))
    pair(tmp_path / "later", 8)
    run(tmp_path / "later", schedule="constant", epochs=5, keep_at=(2,))
    assert len(pair(tmp_path / "later", 5 + 1).metrics()) == 1  # it does not train up to there any more
    assert outcome(pair(tmp_path / "later")) == whole


def test_copies_that_have_begun_need_no_state(tmp_path: Path) -> None:
    whole = outcome(pair(tmp_path / "whole"))
    run(tmp_path / "left", schedule="constant", epochs=5, keep_at=(2,))
    pair(tmp_path / "left", 8)  # in its fourth epoch
    (kept,) = (tmp_path / "left").glob("trials/*/state-002.pt")
    kept.write_bytes(b"damaged")
    assert outcome(pair(tmp_path / "left")) == whole


def test_copies_with_a_tail_begin_from_a_run_at_a_fixed_lr(tmp_path: Path) -> None:
    run(tmp_path / "left", schedule="constant", epochs=5, keep_at=(2,))
    steps = 5 + 1  # of its third epoch: it does not train up to there
    assert len(pair(tmp_path / "left", steps, schedule="tail").metrics()) == 1
    assert outcome(pair(tmp_path / "left", schedule="tail")) == outcome(
        pair(tmp_path / "own", schedule="tail")
    )


def test_diverged_copies_have_no_figure_in_the_report(tmp_path: Path) -> None:
    (study,) = (one for one in EXPERIMENT.presets["smoke"] if one.outcome == "barrier")
    made = Plan(EXPERIMENT, study, tmp_path, "smoke")
    nan = float("nan")
    for trial in made.reported(study.arms[0]) or []:
        folder = TrialFolder(tmp_path, trial)
        with folder.at_work():
            lines = {key: [nan] * 11 for key in ("line_train", "line_validation")}
            folder.finish({"barrier": nan, "barrier_train": nan, **lines, "diverged": True}, 1.0, CPU)
    text = report.markdown([Group([made], ())])
    assert f"| {study.arms[0].name} | 0.1 | 0 of 2, 2 diverged | no figure |" in text
    assert ": .\n" not in text and "at an end" not in text.split("- **")[0]


def test_barriers_against_a_line_written_out(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    a, b = (images.Training(images.Config(**run_config(order=i)), tmp_path, CPU, None) for i in (1, 2))
    same = connectivity.barriers(a, b)
    assert all(same[name] == pytest.approx(0, abs=1e-6) for name in BARRIERS)
    for training in (a, b):
        training.begin(0)
        for _ in range(5):
            training.step()
    flat = [torch.cat([p.detach().flatten() for p in one.model.parameters()]).double() for one in (a, b)]
    share = (flat[0] - flat[1]).norm() / (0.5 * flat[0].norm() + 0.5 * flat[1].norm())
    assert connectivity.apart(a, b) == pytest.approx(float(share)) and share > 0.001
    assert connectivity.apart(a, a) == 0
    for training in (a, b):
        training.model.to(memory_format=torch.channels_last)  # as on a GPU
    assert connectivity.apart(a, b) == pytest.approx(float(share))
    found = connectivity.barriers(a, b)
    batches = torch.split(a.draws.indices[:5000], 500)
    ends, between = [training.model.state_dict() for training in (a, b)], copy.deepcopy(a.model).eval()
    for name, rows in (("train", a.draws.indices), ("validation", a.validation)):
        x, y = images.normalise(a.images[rows], a.mean, a.std), a.labels[rows]
        losses, anew = [], []
        for i in range(11):
            mixed = {k: torch.lerp(v.double(), ends[1][k].double(), i / 10) for k, v in ends[0].items()}
            between.load_state_dict({k: v.to(ends[0][k].dtype) for k, v in mixed.items()})
            with torch.no_grad():
                losses.append(float(cross_entropy(between(x), y)))
                estimate(between, [images.normalise(a.images[batch], a.mean, a.std) for batch in batches])
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
    with pytest.raises(ValueError, match=r"at=|not provided for"):
        pair(tmp_path, **mistake)


def test_the_control_of_tam_is_sgdm_at_half_the_lr(tmp_path: Path) -> None:
    """Of TAM at 0.1: its runs are there already; of TAM at 0.2 those of SGDM."""
    for study, like in zip(EXPERIMENT.presets["quick"], ("SGDM, half its lr", "SGDM"), strict=False):
        made = Plan(EXPERIMENT, study, tmp_path, "quick")
        control, same = (made.reported(study.arm(name)) for name in ("SGDM at TAM's effective lr", like))
        assert control == same is not None


def test_a_report_tells_how_long_the_step_is_after_a_switch(tmp_path: Path) -> None:
    study = EXPERIMENT.presets["smoke"][0]
    made = Plan(EXPERIMENT, study, tmp_path, "smoke")
    trials = made.reported(study.arm("TAM until 1, then SGDM"))
    assert trials is not None
    for trial, before, after in zip(trials, (2.0, 1.0), (1.0, 0.4), strict=True):
        folder = TrialFolder(tmp_path, trial)
        with folder.at_work():
            for length in (before, after):
                folder.log({"grad_norm": 1.0, "update_norm": length})
            folder.finish({"validation": 90.0, "diverged": False}, 1.0, CPU)
    told = "the first step after the switch has 0.50, 0.40 of the length of those before it"
    assert EXPERIMENT.says is not None and EXPERIMENT.says(made) == [f"TAM until 1, then SGDM: {told}."]


def test_copies_are_planned_at_a_fixed_lr_and_with_a_tail() -> None:
    for preset in ("paper", "quick"):
        names = [study.name for study in EXPERIMENT.presets[preset] if study.outcome == "barrier"]
        assert names == ["copies-constant", "copies-tail"]


def test_the_same_runs_are_compared_in_one_preset_alone() -> None:
    def compared(preset: str) -> set[tuple[str, str]]:
        return {pair for study in EXPERIMENT.presets[preset] for pair in study.comparisons()}

    assert ("SGDM, halved at 100", "SGDM") in compared("long") - compared("late")
    assert compared("long") & compared("late") == {  # TAM at another lr
        ("TAM", "SGDM"),
        ("TAM until 100, then SGDM", "SGDM"),
        ("TAM until 100, then SGDM", "SGDM, halved at 100"),
    }


def test_copies_tell_how_far_apart_they_are(tmp_path: Path) -> None:
    (study,) = (one for one in EXPERIMENT.presets["smoke"] if one.outcome == "barrier")
    made = Plan(EXPERIMENT, study, tmp_path, "smoke")
    trials = made.reported(study.arms[0])
    assert trials is not None
    folder = TrialFolder(tmp_path, trials[0])
    with folder.at_work():
        folder.finish({"barrier_train": 0.25, "apart": 0.004, "diverged": False}, 1.0, CPU)
    told = f"{study.arms[0].name}: training loss 0.2500, copies 0.004 of their norm apart."
    assert EXPERIMENT.says is not None and EXPERIMENT.says(made) == [told]


def test_a_barrier_that_is_but_the_loss_of_an_end_is_told(tmp_path: Path) -> None:
    (study,) = (one for one in EXPERIMENT.presets["smoke"] if one.outcome == "barrier")
    made = Plan(EXPERIMENT, study, tmp_path, "smoke")
    trials = made.reported(study.arms[0])
    assert trials is not None
    for trial, line in zip(trials, ([1.5, 1.2, 1.0], [1.0, 1.5, 1.0]), strict=True):
        folder = TrialFolder(tmp_path, trial)
        with folder.at_work():
            height = max(line) - (line[0] + line[-1]) / 2
            folder.finish({"barrier_train": height, "line_train": line, "diverged": False}, 1.0, CPU)
    told = f"{study.arms[0].name}: training loss 0.3750 (at an end in 1 of 2)."
    assert EXPERIMENT.says is not None and EXPERIMENT.says(made) == [told]
