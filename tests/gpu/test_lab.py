"""The lab's trials on a GPU: several at once, as CUDA graphs, against the same on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.core.alignment import read_alignment
from tam.lab.core.config import TrialConfig
from tam.lab.core.store import TrialFolder
from tam.lab.engines.events import Event, Job, RunLocation, TrialFailed
from tam.lab.engines.local import LocalEngine
from tam.lab.engines.worker import run_jobs
from tam.lab.experiments.continual import trial as continual
from tam.lab.experiments.graph import trial as graph
from tam.lab.experiments.images import trial as images
from tam.lab.experiments.llm import trial as llm
from tam.lab.experiments.llm.masked import BackwardPass, MaskedLoss, compile_layers
from tam.lab.experiments.online import trial as online
from tam.lab.experiments.pretrain import trial as pretrain
from tam.lab.experiments.pretrain.registered import variants as registered_variants
from tam.lab.experiments.runtime import trial as runtime
from tam.lab.experiments.sgd_ladder import trial as sgd_ladder
from tam.lab.experiments.warmup import forks

CUDA = torch.device("cuda")


def config(**more: Any) -> images.Config:
    given = {
        "data": "digits", "model": "tiny", "optimizer": "tam", "lr": 0.1, "seed": 0, "epochs": 4, "batch": 64,
        "held_out": 300, "test": True,
    }  # fmt: skip
    return images.Config(**{**given, **more})


def run(root: Path, device: str, configs: list[images.Config]) -> list[TrialFolder]:
    """All of them side by side."""
    waiting = (Job("images", one) for one in configs)
    events: list[Event] = []
    location = RunLocation(root, root, device, trials_per_process=8)
    run_jobs(location, lambda _: next(waiting, None), events.append)
    assert [event for event in events if isinstance(event, TrialFailed)] == []
    return [TrialFolder(root, one) for one in configs]


def on_both(trial: Callable[..., Iterator[Any]], one: TrialConfig, root: Path) -> list[TrialFolder]:
    """A trial on the GPU and on the CPU."""
    folders = []
    for device in ("cuda", "cpu"):
        folders.append(TrialFolder(root / device, one))
        with folders[-1].at_work():
            for _ in trial(one, folders[-1], root, torch.device(device), 1e9):
                pass
    return folders


def test_trials_side_by_side_learn_what_they_learn_on_a_cpu(tmp_path: Path) -> None:
    variants = [
        ("sgd", 0.5),
        ("sgdm", 0.05),
        ("tam", 0.1),
        ("adam", 1e-3),
        ("adatam", 2e-4),
        ("angulargrad", 1e-3),
    ]
    configs = [config(optimizer=name, lr=lr) for name, lr in variants]
    found, expected = run(tmp_path / "gpu", "cuda", configs), run(tmp_path / "cpu", "cpu", configs)
    for ours, theirs in zip(found, expected, strict=True):
        result, expected_result = ours.read_result(), theirs.read_result()
        assert result is not None and expected_result is not None
        first, last = ours.metrics()[0], ours.metrics()[-1]
        # bfloat16 and float32: the same draws and weights, so that the first epoch hardly differs.
        assert first["loss"] == pytest.approx(theirs.metrics()[0]["loss"], rel=0.02)
        assert first["grad_norm"] == pytest.approx(theirs.metrics()[0]["grad_norm"], rel=0.05)
        assert last["loss"] == pytest.approx(theirs.metrics()[-1]["loss"], rel=0.1)
        assert [row["lr"] for row in ours.metrics()] == [row["lr"] for row in theirs.metrics()]
        assert result["test"] == pytest.approx(expected_result["test"], abs=5)


def test_given_d_reaches_every_replay_of_the_graph(tmp_path: Path) -> None:
    (source,) = run(tmp_path, "cuda", [config()])
    s = torch.load(source.path / "alignment.pt", weights_only=True)
    assert len(s.unique()) > len(s) // 2
    for how in ("same", "mean", "shuffled"):
        (folder,) = run(tmp_path, "cuda", [config(damping=how, damping_of=source.key)])
        used = torch.load(folder.path / "alignment.pt", weights_only=True)
        if how == "same":
            assert torch.equal(used, s)
            assert folder.metrics()[0]["loss"] == pytest.approx(source.metrics()[0]["loss"], rel=0.01)
        elif how == "mean":
            torch.testing.assert_close(used, torch.full_like(s, float(s.double().mean())))
        else:
            assert torch.equal(used.sort().values, s.sort().values) and not torch.equal(used, s)


LADDER: dict[str, Any] = {
    "data": "digits", "seed": 0, "epochs": 3, "batch": 64, "held_out": 300, "optimizer": "tam-variant",
    "lr": 0.2, "options": {"momentum": 0.99, "smoothing": 0.5, "soft_restart": True},
}  # fmt: skip
SGDM: dict[str, Any] = {"optimizer": "sgdm", "lr": 0.05, "options": {"momentum": 0.99}}
TAM: dict[str, Any] = {"optimizer": "tam", "lr": 0.1, "options": {"momentum": 0.99, "gain": 5.0}}


@pytest.mark.parametrize("model", ["tiny", "tiny-mlp"])
@pytest.mark.parametrize("variant", [SGDM, TAM, {}])
@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_a_ladder_of_sgd_clips_inside_the_graph(
    model: str, variant: dict[str, Any], clip: float, tmp_path: Path
) -> None:
    one = sgd_ladder.Config(**{**LADDER, **variant, "model": model, "clip": clip})
    found, expected = (folder.metrics() for folder in on_both(sgd_ladder.run, one, tmp_path))
    for key in ("loss", "grad_norm", "validation_loss"):
        assert found[0][key] == pytest.approx(expected[0][key], rel=0.1)
    for key in ("loss", "validation_loss"):
        assert found[-1][key] == pytest.approx(expected[-1][key], rel=0.3)


def test_soft_restarts_are_replayed_and_held_inside_the_graph(tmp_path: Path) -> None:
    def run_one(**more: Any) -> TrialFolder:
        one = sgd_ladder.Config(**{**LADDER, "model": "tiny", **more})
        folder = TrialFolder(tmp_path, one)
        with folder.at_work():
            for _ in sgd_ladder.run(one, folder, tmp_path, CUDA, 1e9):
                pass
        return folder

    source = run_one()
    s = read_alignment(source.path / "alignment.pt")
    assert len(s.unique()) > len(s) // 2
    again = run_one(damping="same", damping_of=source.key)
    assert torch.equal(read_alignment(again.path / "alignment.pt"), s)
    assert again.metrics()[0]["loss"] == pytest.approx(source.metrics()[0]["loss"], rel=0.01)
    held = run_one(damping="mean", damping_of=source.key)
    used = read_alignment(held.path / "alignment.pt")
    torch.testing.assert_close(used, torch.full_like(s, float(s.double().mean())))


def test_a_trial_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (whole,) = run(tmp_path / "whole", "cuda", [config()])
    folder = TrialFolder(tmp_path / "parts", config())
    steps = len(torch.load(whole.path / "alignment.pt", weights_only=True)) // 4
    with folder.at_work():
        for _ in itertools.islice(images.run(config(), folder, tmp_path, CUDA, 0.0), 2 * steps + 9):
            pass
    before = folder.metrics()
    (again,) = run(tmp_path / "parts", "cuda", [config()])
    assert again.metrics()[: len(before)] == before and again.metrics() == whole.metrics()
    s, expected = (torch.load(one.path / "alignment.pt", weights_only=True) for one in (again, whole))
    assert torch.equal(s, expected) and len(s) == 4 * steps


def test_another_process_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds no kernels of ours; three trials side by side in it, one here."""
    (here,) = run(tmp_path / "here", "cuda", [config()])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    jobs = [Job("images", config(seed=seed)) for seed in range(3)]
    with LocalEngine(
        RunLocation(tmp_path / "there", tmp_path, "cuda", trials_per_process=3), 1, lambda event: None
    ) as engine:
        engine.run(jobs)
    there = TrialFolder(tmp_path / "there", config())
    assert there.metrics() == here.metrics() and len(there.metrics()) == 4
    s, expected = (torch.load(one.path / "alignment.pt", weights_only=True) for one in (there, here))
    assert torch.equal(s, expected)


def test_a_warm_up_is_captured_anew_at_its_switch(tmp_path: Path) -> None:
    configs = [config(schedule="constant", sgdm_from=2, buffers=buffers) for buffers in ("keep", "rescale")]
    found, expected = run(tmp_path / "gpu", "cuda", configs), run(tmp_path / "cpu", "cpu", configs)
    kept, rescaled = (one.metrics() for one in found)
    assert kept[:2] == rescaled[:2] and kept[2] != rescaled[2]
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours.metrics(), theirs.metrics(), strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=0.1)
            assert ("update_norm" in mine) == (mine["epoch"] in (2, 3))
            assert mine.get("update_norm", 0.0) == pytest.approx(other.get("update_norm", 0.0), rel=0.2)
            assert ("alignment" in mine) == ("alignment" in other) == (mine["epoch"] <= 2)
        assert len(torch.load(ours.path / "alignment.pt", weights_only=True)) == len(
            torch.load(theirs.path / "alignment.pt", weights_only=True)
        )


def test_forks_and_their_barrier(tmp_path: Path) -> None:
    given = dataclasses.asdict(config(schedule="constant", keep_at=(2,)))
    found = [one.read_result() or {} for one in on_both(forks.run, forks.Config(**given, at=2), tmp_path)]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=0.15)
    assert found[0]["barrier"] == pytest.approx(found[1]["barrier"], rel=0.5, abs=0.05)


def gpt(number: str, **more: Any) -> pretrain.Config:
    """A tiny run of a registered variant."""
    own = registered_variants((0.01,))[number]
    given = {
        "size": "tiny", "optimizer": own.optimizer, "options": dict(own.options), "lr": own.lrs[0], "seed": 0,
        "epochs": 4, "steps": 24, "warmup": 6, "context": 32, "batch": 8, "data": "generated", **own.settings,
    }  # fmt: skip
    return pretrain.Config(**{**given, **more})


@pytest.mark.parametrize(
    "numbers", [("V1", "V4", "V4n", "V6", "V7", "V8", "V9", "V10", "V11"), ("V12",)], ids=["graph", "V12"]
)
def test_a_population_of_gpts_learns_what_it_learns_on_a_cpu(
    numbers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, compiled and as a graph; controls take over the s of another run inside it."""
    if numbers == ("V12",):
        pytest.importorskip("schedulefree")
    monkeypatch.setattr(pretrain, "COMPILED_FROM", {"tiny": 0})
    monkeypatch.setattr(pretrain, "EVALUATED", 16)
    configs = [gpt(number, seed=seed) for number in numbers for seed in (0, 1)]
    controls = [
        gpt(number, damping=how, damping_of=gpt(number, seed=seed).key)
        for number, how, seed in (("V4", "mean", 0), ("V4", "another", 1), ("V9", "mean", 0))
        if number in numbers
    ]
    found: dict[str, list[TrialFolder]] = {}
    for device in ("cuda", "cpu"):
        found[device] = []
        for group in filter(None, (configs, controls)):
            folders = [TrialFolder(tmp_path / device, one) for one in group]
            for folder in folders:
                folder.path.mkdir(parents=True, exist_ok=True)
            for _ in pretrain.run_together(group, folders, tmp_path, torch.device(device), 1e9):
                pass
            found[device] += folders
    for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
        for mine, other in zip(ours.metrics(), theirs.metrics(), strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=0.05)
        result, expected = ours.read_result(), theirs.read_result()
        assert result is not None and expected is not None
        assert result["validation"] == pytest.approx(expected["validation"], rel=0.05)
    if controls:
        replayed, source = (found["cuda"][i].path / "alignment.pt" for i in (-2, 2 * numbers.index("V4") + 1))
        assert torch.equal(read_alignment(replayed), read_alignment(source))


def test_a_population_learns_what_it_learns_on_a_cpu(tmp_path: Path) -> None:
    """All rules at once, in TF32 and as a graph; controls read another member's s inside it."""
    shared = {
        "depth": 2,
        "epochs": 2,
        "passes": 2,
        "batch": 64,
        "width": 16,
        "data": "digits",
        "held_out": 300,
    }
    variants = [("sgd", 0.1), ("sgdm", 0.02), ("tam", 0.04)]
    configs = [
        online.Config(**shared, optimizer=name, lr=lr, seed=seed, delta=delta)
        for name, lr in variants
        for seed in (0, 1)
        for delta in (40, 100)
    ]
    found = {}
    for device in ("cuda", "cpu"):
        folders = [TrialFolder(tmp_path / device, one) for one in configs]
        source = folders[-1]
        more = [
            dataclasses.replace(configs[-1], damping=how, damping_of=source.key) for how in ("same", "mean")
        ]
        for names in (configs, more):
            members = [TrialFolder(tmp_path / device, one) for one in names]
            for member in members:
                member.path.mkdir(parents=True, exist_ok=True)
            for _ in online.run_together(names, members, tmp_path, torch.device(device), 1e9):
                pass
        found[device] = [TrialFolder(tmp_path / device, one).metrics() for one in (*configs, *more)]
        s = read_alignment(source.path / "alignment.pt").view(2, -1).mean(1).tolist()  # of each task
        same, mean = ([row["alignment"] for row in rows] for rows in found[device][-2:])
        assert same == pytest.approx(s, abs=1e-6)
        assert mean == pytest.approx([sum(s) / 2] * 2, abs=1e-6)
    for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["loss"] == pytest.approx(other["loss"], rel=0.05)
            assert mine["online"] == pytest.approx(other["online"], abs=3)


@pytest.mark.parametrize("method", ["naive", "lwf"])
def test_continual_learning(method: str, tmp_path: Path) -> None:
    given = {
        "stream": "digits",
        "model": "tiny",
        "lr": 0.05,
        "seed": 0,
        "epochs": 3,
        "batch": 32,
        "test": True,
    }
    one = continual.Config(**given, optimizer="tam", method=method, passes=2)
    ours, theirs = on_both(continual.run, one, tmp_path)
    for mine, other in zip(ours.metrics(), theirs.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=0.1)


def test_a_graph_network(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    given = {"optimizer": "tam", "lr": 0.02, "seed": 0, "epochs": 6, "data": "generated", "test": True}
    one = graph.Config(**given, switch=3)
    ours, theirs = on_both(graph.run, one, tmp_path)
    for mine, other in zip(ours.metrics(), theirs.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=0.01)


def test_fine_tuning_and_going_on_from_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    given = {
        "model": "tiny-bert",
        "data": "generated",
        "block": 32,
        "batch": 8,
        "lr": 1e-3,
        "seed": 0,
        "epochs": 3,
    }
    one = llm.Config(**given, optimizer="adatamw", options={"weight_decay": 0.0}, test=True)
    ours, theirs = on_both(llm.run, one, tmp_path)
    for mine, other in zip(ours.metrics(), theirs.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=0.05)  # dropout's draws differ
        assert mine["perplexity"] == pytest.approx(other["perplexity"], rel=0.1)
    folder = TrialFolder(tmp_path / "parts", one)

    def stop(progress: Any) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    folder.report_progress = stop
    with folder.at_work():
        with pytest.raises(KeyboardInterrupt):
            list(llm.run(one, folder, tmp_path, CUDA, 0.0))
        folder.report_progress = lambda progress: None
        list(llm.run(one, folder, tmp_path, CUDA, 0.0))
    assert [row["epoch"] for row in folder.metrics()] == [1, 2, 3]
    for mine, other in zip(folder.metrics(), ours.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=0.01)
    assert len(torch.load(folder.path / "alignment.pt", weights_only=True)) == 69


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_graph_gives_the_gradients_of_a_plain_step(kind: str) -> None:
    """Three steps are plain, one is captured, the others are replays; shapes in turn."""
    test_masked = pytest.importorskip("tests.lab.experiments.test_masked")
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain, quick = (test_masked.make(kind, **without).cuda() for _ in range(2))
    assert compile_layers(quick)
    both = (
        (plain, BackwardPass(MaskedLoss(plain), CUDA, graph=False)),
        (quick, BackwardPass(MaskedLoss(quick), CUDA, graph=True)),
    )
    for step in range(12):
        made = {key: value.cuda() for key, value in test_masked.batch(step, (0.1, 0.5)[step % 2])[0].items()}
        losses = [backward(model, made) for model, backward in both]
        torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0.0)
        largest = max(float(q.grad.abs().max()) for q in plain.parameters())
        for p, q in zip(quick.parameters(), plain.parameters(), strict=True):
            # That of the keys' bias is 0 but for rounding: no query prefers a key for it.
            atol = 0.03 * float(q.grad.abs().max()) + 1e-6 * largest
            torch.testing.assert_close(p.grad, q.grad, rtol=0.0, atol=atol)
        for model, _ in both:
            model.zero_grad()


def test_a_graph_draws_dropout_from_the_step() -> None:
    test_masked = pytest.importorskip("tests.lab.experiments.test_masked")
    made = {key: value.cuda() for key, value in test_masked.batch(0)[0].items()}
    lengths: list[list[float]] = []  # of the gradient; the loss itself has but bfloat16's digits
    for replayed in (True, False):
        model = test_masked.make("bert").cuda()
        assert compile_layers(model)
        backward = BackwardPass(MaskedLoss(model), CUDA, graph=replayed)
        lengths.append([])
        for seed in SEEDS:
            torch.manual_seed(seed)
            backward(model, made)
            lengths[-1].append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
            model.zero_grad()
    # Compiled or not, replayed or not, a seed's gradients are its own: no other seed's are as near.
    for seed, found in zip(SEEDS, lengths[0], strict=True):
        nearest = min(zip(lengths[1], SEEDS, strict=True), key=lambda other: abs(other[0] - found))
        assert nearest[1] == seed
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-3)
    assert lengths[0][4] == pytest.approx(lengths[0][6], rel=1e-5)  # the same seed, both replays


SEEDS = (1, 2, 3, 4, 5, 6, 5, 7)


def test_a_step_is_timed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    given = {"model": "tiny-bert", "lr": 1e-5, "seed": 0, "epochs": 2, "batch": 2, "length": 16}
    one = runtime.Config(**given, optimizer="adatamw", options={"weight_decay": 0.0})
    ours, _ = on_both(runtime.run, one, tmp_path)
    result = ours.read_result()
    assert result is not None and result["tokens_per_second"] > 0
