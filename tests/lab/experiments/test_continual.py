"""Continual learning: figures worked out by hand, a loop written out, streams and their files."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tam.lab.core.errors import DataError
from tam.lab.core.plan import Plan
from tam.lab.core.results import load_results
from tam.lab.core.runner import check_trial
from tam.lab.core.store import TrialFolder
from tam.lab.data import streams
from tam.lab.experiments.continual import trial as continual
from tam.lab.experiments.continual.studies import EXPERIMENT
from tam.lab.training.augmentation import augment
from tests.lab.experiments.test_images import outcome

CPU = torch.device("cpu")


def config(**more: Any) -> continual.Config:
    given = {
        "stream": "digits", "model": "tiny", "optimizer": "sgdm", "lr": 0.05, "seed": 0, "epochs": 3,
        "passes": 2, "batch": 32, "test": True,
    }  # fmt: skip
    return continual.Config(**{**given, **more})


def run(root: Path, steps: int | None = None, **more: Any) -> TrialFolder:
    torch.set_num_threads(1)
    trial = config(**more)
    folder = TrialFolder(root, trial)
    with folder.at_work():
        for _ in itertools.islice(continual.run(trial, folder, root, CPU, 0.0), steps):
            pass
    return folder


def make_learner(root: Path, trial: continual.Config) -> continual.Learner:
    return continual.Learner(trial, TrialFolder(root, trial), root, CPU)


def test_lwf_worked_out_by_hand() -> None:
    """At temperature 2 logits (2 ln 3, 0) are the answers 3/4 and 1/4, and (0, 0) are halves."""
    before = torch.tensor([[2 * math.log(3), 0.0], [0.0, 0.0]])
    now = torch.tensor([[0.0, 0.0], [0.0, 0.0]], requires_grad=True)
    found = continual.distillation_loss(now, before)
    # 3/4 ln(3/2) + 1/4 ln(1/2) for the first image, nothing for the second.
    expected = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(found, now)
    # A softmax's: (1/2 - 3/4) / temperature, of half a batch.
    assert gradient.tolist() == [[pytest.approx(-0.0625), pytest.approx(0.0625)], [0, 0]]


def test_forgetting_worked_out_by_hand() -> None:
    matrix = [[80.0, 50.0, 40.0], [90.0, 85.0, 60.0], [70.0, 80.0, 95.0]]
    assert continual.forgetting(matrix) == pytest.approx(((90 - 70) + (85 - 80)) / 2)
    assert continual.forgetting([[50.0]]) == 0
    unlearned = [[80.0, 99.0], [85.0, 60.0]]  # what was known before it was learned does not count
    assert continual.forgetting([*unlearned, [70.0, 50.0]]) == pytest.approx(((85 - 70) + (60 - 50)) / 2)
    assert continual.forgetting(unlearned) == pytest.approx(80 - 85)  # what has grown is negative


def plain(one: continual.Config, root: Path) -> tuple[list[float], list[list[float]]]:
    """Losses and the accuracy matrix, by torch's SGD."""
    learner = make_learner(root, one)  # for its data and first weights
    model = learner.model
    optimizer = torch.optim.SGD(model.parameters(), lr=one.lr, momentum=0.9)
    losses, matrix = [], []
    for k in range(one.epochs):
        before, total = copy.deepcopy(model).eval(), []
        for number in range(one.passes):
            learner.draws.draw(learner.stream.train[k], (one.seed * 1009 + k) * 1009 + number)
            for _ in range(len(learner.draws.order) // one.batch):
                rows, shifts, flips = learner.draws.next_batch()
                x = augment(learner.images[rows], shifts, flips, learner.mean, learner.std)
                answers = model(x)
                loss = cross_entropy(answers, learner.labels[rows])
                if one.method == "lwf" and k:
                    with torch.no_grad():
                        old = torch.softmax(before(x) / 2, 1)
                    new = torch.log_softmax(answers / 2, 1)
                    loss = loss + one.strength * torch.nn.functional.kl_div(new, old, reduction="batchmean")
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total.append(loss.item())
        losses.append(sum(total) / len(total))
        matrix.append([learner.accuracy(part) for part in learner.stream.test])
    return losses, matrix


@pytest.mark.parametrize("more", [{"method": "naive"}, {"method": "lwf"}, {"method": "lwf", "strength": 3.0}])
def test_a_trial_is_a_plain_training(more: dict[str, Any], tmp_path: Path) -> None:
    folder = run(tmp_path, **more)
    losses, matrix = plain(config(**more), tmp_path)
    assert [row["loss"] for row in folder.metrics()] == pytest.approx(losses, rel=1e-4)
    result = folder.read_result()
    assert result is not None and result["average"] == pytest.approx(sum(result["matrix"][-1]) / 3)
    for k, row in enumerate(folder.metrics()):
        assert row["average"] == pytest.approx(sum(row["accuracies"][: k + 1]) / (k + 1))
    for ours, theirs in zip(result["matrix"], matrix, strict=True):
        assert ours == pytest.approx(theirs, abs=1.7)  # two of 120 images


@pytest.mark.parametrize("more", [{"optimizer": "tam", "method": "lwf"}, {"method": "naive"}])
def test_a_killed_trial_ends_with_the_same_bits(more: dict[str, Any], tmp_path: Path) -> None:
    whole = outcome(run(tmp_path / "whole", **more))
    for steps in (5, 50):
        run(tmp_path / str(steps), steps, **more)
        assert outcome(run(tmp_path / str(steps), **more)) == whole


def test_d_replaced_by_its_own_sequence_is_the_same_run(tmp_path: Path) -> None:
    source = run(tmp_path, optimizer="tam")
    control = {"optimizer": "tam", "damping_of": source.key}
    assert outcome(run(tmp_path, damping="same", **control)) == outcome(source)
    assert outcome(run(tmp_path, damping="mean", **control)) != outcome(source)


def test_lrs_are_chosen_by_images_held_out_of_training(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, config())
    parts = [*learner.stream.train, *learner.stream.validation, *learner.stream.test]
    assert len(torch.cat(parts).unique()) == sum(len(part) for part in parts)
    chosen, compared = run(tmp_path, test=False), run(tmp_path)
    assert [row["loss"] for row in chosen.metrics()] == [row["loss"] for row in compared.metrics()]
    assert chosen.metrics()[0]["accuracies"] != compared.metrics()[0]["accuracies"]


def test_a_run_that_diverged_has_forgotten_nothing_that_counts(tmp_path: Path) -> None:
    study = EXPERIMENT.presets["smoke"][0]
    trials = Plan(EXPERIMENT, study, load_results(tmp_path)).comparison_trials(study.variants[0]) or []
    good = {"matrix": [[80.0, 20.0], [30.0, 90.0]], "forgetting": 50.0, "average": 60.0, "diverged": False}
    bad = {"matrix": [[10.0, 10.0]], "forgetting": 0.0, "average": 10.0, "diverged": True}
    for trial, result in zip(trials, (good, bad), strict=True):
        folder = TrialFolder(tmp_path, trial)
        with folder.at_work():
            folder.finish(result, 1.0, CPU)
    forgetting, matrix = EXPERIMENT.extras.tables(Plan(EXPERIMENT, study, load_results(tmp_path)))
    assert forgetting.rows == [[study.variants[0].name, "50.00", "1"]]
    assert matrix.rows[-1] == ["2", "30.0", "90.0"]


# ---------------------------------------------------------------------- streams


def test_a_stream_drifts_from_what_it_was(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (20, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(streams.drift(images, 0.0, 0, 0), images)
    far = [(streams.drift(images, x, 0, 0).float() - images.float()).abs().mean() for x in (0.2, 0.5, 1.0)]
    assert far[0] < far[1] < far[2]
    assert torch.equal(streams.drift(images, 0.5, 0, 1), streams.drift(images, 0.5, 0, 1))
    assert not torch.equal(streams.drift(images, 0.5, 0, 1), streams.drift(images, 0.5, 0, 2))
    one, other = streams.drifting("digits", tmp_path, 0, 4), streams.drifting("digits", tmp_path, 1, 4)
    assert len(one) == 4 and len({len(part) for part in one.train}) == 1
    assert not torch.equal(one.labels, other.labels)


def test_colours_turn_about_grey() -> None:
    matrix = streams.turn(120)
    # A third of a turn takes red to green, green to blue and blue to red.
    torch.testing.assert_close(matrix @ torch.eye(3), torch.eye(3)[[2, 0, 1]])
    torch.testing.assert_close(streams.turn(77) @ torch.ones(3), torch.ones(3))
    torch.testing.assert_close(streams.turn(50) @ streams.turn(-50), torch.eye(3))


def write_clear(folder: Path, train: str = "train") -> None:
    from PIL import Image

    for part, count in ((train, 10), ("test", 2)):
        for bucket in range(1, 11):
            for label, name in enumerate(("BACKGROUND", "laptop")):
                here = folder / "clear10" / part / "labeled_images" / str(bucket) / name
                here.mkdir(parents=True)
                for i in range(count):
                    Image.new("RGB", (20, 16), (label * 200, bucket * 20, i)).save(here / f"{i}.jpg")


@pytest.mark.parametrize("train", ["train", "train_image_only"])
def test_clear_is_read_from_its_folders(train: str, tmp_path: Path) -> None:
    write_clear(tmp_path, train)
    found = streams.clear(tmp_path, 8, seed=0)
    assert len(found) == 10 and found.classes == 2 and found.images.shape == (240, 3, 8, 8)
    assert [len(part) for part in (*found.train[:2], found.validation[0], found.test[0])] == [16, 16, 4, 4]
    for k in (0, 9):  # a year's images are its own
        for part in (found.train[k], found.validation[k], found.test[k]):
            assert (found.images[part][:, 1].float() - (k + 1) * 20).abs().max() < 12
            assert torch.equal(found.labels[part], (found.images[part][:, 0, 4, 4] > 100).long())
    folder = run(tmp_path, stream="clear", size=8, batch=8, epochs=10, passes=1)
    assert folder.read_result() is not None and len(folder.read_result()["matrix"]) == 10


def test_what_is_missing_of_clear_is_named(tmp_path: Path) -> None:
    trial = config(stream="clear")
    with pytest.raises(DataError, match=r"clear is incomplete: 20 of 20 files missing .*CLEAR-10 is at"):
        check_trial(EXPERIMENT, trial, tmp_path)
    write_clear(tmp_path)
    check_trial(EXPERIMENT, trial, tmp_path)
    bad = tmp_path / "clear10" / "train" / "labeled_images" / "3" / "laptop" / "0.jpg"
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"3/laptop/0.jpg cannot be read"):
        streams.clear(tmp_path, 8, seed=0)
    (tmp_path / "clear10" / "test" / "labeled_images" / "7").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"1 of 20 files missing .*test/labeled_images/7"):
        check_trial(EXPERIMENT, trial, tmp_path)


@pytest.mark.parametrize("mistake", [{"method": "ewc"}, {"passes": 0}, {"strength": -1.0}, {"model": "vgg"}])
def test_mistakes(mistake: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|not negative"):
        config(**mistake)


def test_the_report_has_the_mean_matrix_of_a_variant(tmp_path: Path) -> None:
    study = EXPERIMENT.presets["smoke"][0]
    variant = study.variants[0]
    trials = Plan(EXPERIMENT, study, load_results(tmp_path)).comparison_trials(variant) or []
    matrices = [[10.0, 0.0], [20.0, 40.0]], [[30.0, 5.0], [0.0, 60.0]]  # of two seeds
    for trial, matrix in zip(trials, matrices, strict=True):
        folder = TrialFolder(tmp_path, trial)
        with folder.at_work():
            folder.finish({"matrix": matrix, "forgetting": 0.0, "diverged": False}, 1.0, CPU)
    _, table = EXPERIMENT.extras.tables(Plan(EXPERIMENT, study, load_results(tmp_path)))
    assert table.header == [f"{variant.name}: after", "on 1", "on 2"]
    assert table.rows == [["1", "20.0", "2.5"], ["2", "10.0", "50.0"]]
