"""A trial of image classification: exact after a kill, and its controls."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tam import registry
from tam.lab.core.errors import LabError
from tam.lab.core.store import TrialFolder
from tam.lab.data import load
from tam.lab.experiments.images import trial as images
from tam.lab.models import get_model
from tam.lab.training.augmentation import augment
from tam.lab.training.factory import load_pretrained, resolve_checkpoint

CPU = torch.device("cpu")


def config(**more: Any) -> images.Config:
    given = {
        "data": "digits", "model": "tiny", "optimizer": "tam", "lr": 0.2, "seed": 0, "epochs": 3, "batch": 64,
        "held_out": 300, "limit": 320, "test": True,
    }  # fmt: skip
    return images.Config(**{**given, **more})


def run(root: Path, steps: int | None = None, save_every: float = 0.0, **more: Any) -> TrialFolder:
    """Run a trial, or its first steps."""
    torch.set_num_threads(1)
    trial = config(**more)
    folder = TrialFolder(root, trial)
    with folder.at_work():
        for _ in itertools.islice(images.run(trial, folder, root, CPU, save_every), steps):
            pass
    return folder


def make_training(root: Path, **more: Any) -> images.Training:
    trial = config(**more)
    return images.Training(trial, TrialFolder(root, trial), root, CPU)


def outcome(folder: TrialFolder) -> Any:
    result = folder.read_result()
    assert result is not None
    return {k: v for k, v in result.items() if k not in ("timing", "machine", "settings")}, folder.metrics()


@pytest.mark.parametrize(
    "optimizer, lr", [("tam", 0.2), ("sgdm", 0.1), ("adatam", 1e-4), ("angulargrad", 1e-3)]
)
def test_a_killed_trial_ends_with_the_same_bits(optimizer: str, lr: float, tmp_path: Path) -> None:
    whole = outcome(run(tmp_path / "whole", optimizer=optimizer, lr=lr))
    for steps in (2, 8, 13):  # in the first, second and third epoch of 5 steps
        parts = tmp_path / str(steps)
        run(parts, steps, optimizer=optimizer, lr=lr)
        folder = run(parts, optimizer=optimizer, lr=lr)
        assert outcome(folder) == whole


def test_variants_of_a_seed_share_split_weights_and_batches(tmp_path: Path) -> None:
    one = make_training(tmp_path)
    other = make_training(tmp_path, optimizer="adam", lr=1e-3)
    third = make_training(tmp_path, seed=1)
    for training in (one, other, third):
        training.begin(2)
    assert torch.equal(one.draws.order, other.draws.order) and torch.equal(one.draws.flips, other.draws.flips)
    assert torch.equal(one.validation, other.validation) and not torch.equal(one.validation, third.validation)
    weights = [next(training.model.parameters()) for training in (one, other, third)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_d_replaced_by_its_own_sequence_is_the_same_run(tmp_path: Path) -> None:
    for optimizer, lr in (("adatam", 2e-4), ("tam", 0.2)):
        variant: dict[str, Any] = {"optimizer": optimizer, "lr": lr}
        source = run(tmp_path, **variant)
        expected = outcome(source)
        assert outcome(run(tmp_path, damping="same", damping_of=source.key, **variant)) == expected
    s = torch.load(source.path / "alignment.pt", weights_only=True)
    for how in ("mean", "shuffled"):
        folder = run(tmp_path, damping=how, damping_of=source.key)
        used = torch.load(folder.path / "alignment.pt", weights_only=True)
        assert outcome(folder) != expected
        if how == "mean":
            torch.testing.assert_close(used, torch.full_like(s, float(s.mean())))
        else:
            assert torch.equal(used.sort().values, s.sort().values) and not torch.equal(used, s)


def test_d_of_a_trial_that_was_not_run(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"alignment.pt is missing: this control needs the alignment of"):
        run(tmp_path, damping="mean", damping_of="0" * 12)


def test_groups_are_parts_of_the_network_each_with_an_s(tmp_path: Path) -> None:
    made = make_training(tmp_path, grouped=True, options={"scope": "group"})
    groups = made.optimizer.param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(made.model.parameters()))
    assert (
        len(groups) == len(made.optimizer.segments.alignments()) == 6
    )  # conv, norm, 2 blocks, 2 of the head
    grouped = run(tmp_path, grouped=True, options={"scope": "group"})
    assert outcome(grouped) != outcome(run(tmp_path))
    assert outcome(run(tmp_path, grouped=True)) == outcome(run(tmp_path))  # of global scope


def test_defaults_are_part_of_every_trials_name() -> None:
    """A config leaves them out, so that a change here would let new trials pass for old ones."""
    defaults = {f.name: f.default for f in dataclasses.fields(images.Config)}
    assert {k: v for k, v in defaults.items() if v not in (None, False, dataclasses.MISSING)} == {
        "batch": 128, "schedule": "cosine", "held_out": 10000, "augment": True, "buffers": "keep",
        "keep_at": (),
    }  # fmt: skip
    options = {name: dict(record.options) for name, record in registry.OPTIMIZERS.items() if record.options}
    papers = {"bias_correction": False}
    assert options == {"sgdm": {"momentum": 0.9}, "adatam": papers, "adatamw": papers}


def test_decay_inside_the_cosine_is_another_run(tmp_path: Path) -> None:
    options = {"weight_decay": 0.5}
    inside, outside = (run(tmp_path, options=options, decay_in_cosine=flag) for flag in (True, False))
    assert outcome(inside) != outcome(outside)
    # Without damping the two are SGD's: the decay is added to the gradient either way.
    fixed = {**options, "smoothing": 1.0}
    pair = [outcome(run(tmp_path, options=fixed, decay_in_cosine=flag)) for flag in (True, False)]
    assert pair[0][0]["validation"] == pair[1][0]["validation"]
    assert pair[0][0]["loss"] == pytest.approx(pair[1][0]["loss"], rel=1e-4)


def test_a_trial_that_diverges_ends_and_says_so(tmp_path: Path) -> None:
    folder = run(tmp_path, lr=1e30, optimizer="sgdm")
    result = folder.read_result()
    assert result is not None and result["diverged"] and result["epochs"] < 3


def test_augmentation_is_a_crop_of_the_padded_image_and_a_flip() -> None:
    x = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).reshape(2, 3, 8, 8)
    mean, std = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)
    shift = torch.tensor([[0, 2], [1, 1]])  # up by one and right by one; not at all
    flip = torch.tensor([False, True])
    found = augment(x, shift, flip, mean, std) * 255
    expected = torch.nn.functional.pad(x.float(), (1, 1, 1, 1))
    torch.testing.assert_close(found[0], expected[0, :, 0:8, 2:10])
    torch.testing.assert_close(found[1], x[1].float().flip(2))


def test_configs() -> None:
    with pytest.raises(ValueError, match="optimizer 'sgdx'"):
        config(optimizer="sgdx")
    with pytest.raises(ValueError, match=r"schedule must be .*, got 'linear'"):
        config(schedule="linear")
    with pytest.raises(ValueError, match="must be given together"):
        config(damping="mean")
    assert "augment" not in config().canonical and config(augment=False).canonical["augment"] is False
    cosine = config(epochs=4)
    assert [cosine.learning_rate(e) for e in (0, 2)] == [0.2, pytest.approx(0.1)]


def test_a_pretrained_network_but_for_its_head(tmp_path: Path) -> None:
    source = make_training(tmp_path, seed=7).model
    state = dict(source.state_dict())
    state["head.weight"] = torch.zeros(3, 16)  # of other classes
    torch.save(state, tmp_path / "net.pt")
    training = make_training(tmp_path, checkpoint=with_digest(tmp_path / "net.pt"), resize=12)
    sizes: list[torch.Size] = []
    training.model.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape))
    own = training.model.state_dict()
    assert torch.equal(own["stem.0.weight"], state["stem.0.weight"]) and own["head.weight"].shape == (10, 16)
    training.begin(0)
    training.step()
    assert sizes == [(64, 3, 12, 12)]
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pt")
    for checkpoint, message in (
        (with_digest(tmp_path / "other.pt"), "is of another network: 0 of"),
        (f"{tmp_path}/gone.pt#0", "cannot be read"),
        (f"{tmp_path}/net.pt#0", "is not the one this trial began with"),
    ):
        with pytest.raises(LabError, match=message):
            load_pretrained(source, checkpoint)


def with_digest(path: Path) -> str:
    return resolve_checkpoint(str(path), path.parent, path.parent)["checkpoint"]


def plain_loop(lr: float, epochs: int, halve_at: int | None) -> tuple[list[float], list[float], float]:
    """SGDM written out: the losses and validation accuracies of all epochs, and the test's accuracy."""
    data = load("digits", Path())
    x, y = data.train
    mean, std = (torch.tensor(v)[:, None, None] for v in (data.mean, data.std))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, validation = order[:-300][:320], order[-300:]
    torch.manual_seed(0)
    model = get_model("tiny").make(10)
    velocity = [torch.zeros_like(p) for p in model.parameters()]

    def accuracy(images: torch.Tensor, labels: torch.Tensor) -> float:
        model.eval()
        with torch.no_grad():
            right = sum(
                int(model((image[None].float() / 255 - mean) / std).argmax() == label)
                for image, label in zip(images, labels, strict=True)
            )
        model.train()
        return 100 * right / len(labels)

    losses, accuracies = [], []
    for epoch in range(epochs):
        now = lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs)) / (1 if epoch < (halve_at or epochs) else 2)
        seen = train[torch.randperm(320, generator=torch.Generator().manual_seed(epoch))]
        total = 0.0
        for batch in seen.reshape(5, 64):
            loss = torch.nn.functional.cross_entropy(model((x[batch].float() / 255 - mean) / std), y[batch])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                    v.mul_(0.9).add_(g)
                    p.sub_(now * v)
            total += loss.item() / 5
        losses.append(total)
        accuracies.append(accuracy(x[validation], y[validation]))
    return losses, accuracies, accuracy(*data.test)


@pytest.mark.parametrize("halve_at", [None, 2])
def test_a_trial_is_a_plain_training(halve_at: int | None, tmp_path: Path) -> None:
    """Split, batches, schedule, losses, validation and test against a loop written out for itself."""
    torch.set_num_threads(1)
    folder = run(tmp_path, optimizer="sgdm", lr=0.05, augment=False, epochs=4, halve_at=halve_at)
    losses, accuracies, test = plain_loop(0.05, 4, halve_at)
    assert [row["loss"] for row in folder.metrics()] == pytest.approx(losses, rel=1e-4)
    assert [row["validation"] for row in folder.metrics()] == pytest.approx(accuracies, abs=0.35)  # an image
    assert folder.read_result() is not None and folder.read_result()["test"] == pytest.approx(test, abs=0.3)


def test_keys_tell_different_trials_apart_and_no_others() -> None:
    """The registry's options count: what a config leaves out stands for them."""

    def key(optimizer: str, **more: Any) -> str:
        return config(optimizer=optimizer, **more).key

    plain = key("sgdm")
    assert key("sgdm", options={"momentum": 0.0}) != plain
    assert key("SGDM", options={"momentum": 0.9, "dampening": 0}) == plain
    assert key("adam", options={"betas": [0.9, 0.999]}) == key("adam")
    assert key("adam", options={"betas": (0.8, 0.99)}) == key("adam", options={"betas": [0.8, 0.99]})
    assert key("sgdm", batch=128) != plain and key("sgdm", schedule="cosine") == plain


def test_a_result_says_all_it_was_run_with(tmp_path: Path) -> None:
    result = run(tmp_path, epochs=1).read_result()
    assert result is not None and result["settings"]["schedule"] == "cosine"
    assert (
        result["settings"]["options"]["smoothing"] == 0.9 and result["settings"]["options"]["momentum"] == 0.9
    )


def test_a_checkpoint_brings_no_flags_of_another_device(tmp_path: Path) -> None:
    adam = make_training(tmp_path, optimizer="adam", lr=1e-3)
    state = adam.state_dict()
    for group in state["optimizer"]["param_groups"]:
        group |= {"capturable": True, "lr": 5.0}
    adam.load_state_dict(state)
    assert all(group["lr"] is adam.lr and not group["capturable"] for group in adam.optimizer.param_groups)


def test_a_control_needs_as_many_steps_as_its_source(tmp_path: Path) -> None:
    source = run(tmp_path, epochs=1)
    with pytest.raises(LabError, match="has 5 steps, not 15"):
        run(tmp_path, damping="mean", damping_of=source.key)
    (source.path / "alignment.pt").write_bytes(b"PK")
    with pytest.raises(LabError, match=r"alignment.pt is damaged"):
        run(tmp_path, damping="mean", damping_of=source.key)


@pytest.mark.parametrize("name", ["epochs", "batch", "held_out"])
def test_counts_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match="epochs, batch and held_out must be at least 1"):
        config(**{name: 0})
