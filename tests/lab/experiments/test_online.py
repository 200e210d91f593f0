"""Online learning: a population's members against networks trained alone, by torch's own optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import tam
from tam.lab.core import controls
from tam.lab.core.alignment import levels_of, pack_levels, read_alignment, unpack_levels
from tam.lab.core.results import load_results
from tam.lab.core.runner import run
from tam.lab.core.selection import Selection, select_plans
from tam.lab.core.store import TrialFolder
from tam.lab.data import load, split
from tam.lab.experiments.online import population
from tam.lab.experiments.online import trial as online
from tam.lab.experiments.online.studies import EXPERIMENT, TAM
from tam.lab.training.augmentation import normalize, per_channel
from tests.lab.engines.test_engines import EpochEnded, Event, RunLocation

CPU = torch.device("cpu")


def config(**more: Any) -> population.Config:
    given = {
        "depth": 2, "delta": 40, "optimizer": "tam", "lr": 0.05, "seed": 0, "epochs": 3, "passes": 2,
        "batch": 64, "width": 16, "data": "digits", "held_out": 300,
    }  # fmt: skip
    return population.Config(**{**given, **more})


def train(
    root: Path, configs: Sequence[population.Config], steps: int | None = None, save_every: float = 0.0
) -> list[TrialFolder]:
    torch.set_num_threads(1)
    folders = [TrialFolder(root, one) for one in configs]
    for folder in folders:
        folder.path.mkdir(parents=True, exist_ok=True)
    for _ in itertools.islice(online.run_together(configs, folders, root, CPU, save_every), steps):
        pass
    return folders


MIXED = [
    config(optimizer=optimizer, lr=lr, seed=seed, delta=delta)
    for optimizer, lr in (("sgd", 0.1), ("sgdm", 0.02), ("tam", 0.02), ("tam", 0.05))
    for seed in (0, 1)
    for delta in (40, 100)
]


def alone(one: population.Config) -> list[tuple[float, float, float]]:
    """Online accuracy, loss and the first pass's accuracy of each task, by torch's optimizer on a module."""
    data = load(one.data, Path())
    x, y = data.train
    x = normalize(x, *(per_channel(v, CPU) for v in (data.mean, data.std))).flatten(1)
    kept, _ = split(len(y), one.held_out, one.seed)
    model = population.make_network(x.shape[1], data.classes, one)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=one.lr, momentum=one.momentum)
    if one.optimizer == "tam":
        optimizer = tam.TAM(model.parameters(), lr=one.lr)
    found = []
    for task in range(one.epochs):
        names = population.task_labels(task, y, data.classes, one)
        right, losses, rights = 0, [], []
        for number in range(one.passes):
            generator = torch.Generator().manual_seed((one.seed * 1009 + task) * 1009 + number)
            order = kept[torch.randperm(len(kept), generator=generator)]
            for batch in order[: len(order) // one.batch * one.batch].split(one.batch):
                logits = model(x[batch])
                right += int((logits.argmax(1) == names[batch]).sum())
                loss = cross_entropy(logits, names[batch])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
            rights.append(right)
        seen = len(losses) * one.batch
        found.append((100 * right / seen, sum(losses) / len(losses), 100 * rights[0] * one.passes / seen))
    return found


def test_a_member_is_the_network_trained_alone(tmp_path: Path) -> None:
    """By torch's SGD and tam.TAM on a module; and, bit for bit, as a population of one."""
    for folder in train(tmp_path / "all", MIXED):
        expected = alone(population.Config(**folder.config))
        rows = folder.metrics()
        for i, (key, near) in enumerate((("online", 0.3), ("loss", 1e-3), ("first", 0.3))):
            assert [row[key] for row in rows] == pytest.approx([task[i] for task in expected], abs=near)
        result, tasks = folder.read_result(), [row["online"] for row in rows]
        assert result is not None and result["online"] == pytest.approx(sum(tasks) / len(tasks))
        assert result["first"] == pytest.approx(sum(row["first"] for row in rows) / len(rows))
        assert result["slope"] == pytest.approx((tasks[2] - tasks[0]) / 2)  # of three tasks
        (single,) = train(tmp_path / "one", [population.Config(**folder.config)])
        assert single.metrics() == rows
        assert ("alignment" in rows[0]) == (folder.config["optimizer"] == "tam")


def test_a_killed_population_ends_with_the_same_bits_also_in_other_company(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", MIXED)
    train(tmp_path / "parts", MIXED, steps=50)  # in the second task of 34 steps
    train(tmp_path / "parts", MIXED[:3], steps=90)  # these get further
    for ours, theirs in zip(train(tmp_path / "parts", MIXED), whole, strict=True):
        assert ours.metrics() == theirs.metrics()
        mine, other = ours.read_result(), theirs.read_result()
        assert mine is not None and other is not None
        for key in ("online", "first", "slope", "parameters"):
            assert mine[key] == other[key]
        left = [sorted(path.name for path in folder.path.iterdir()) for folder in (ours, theirs)]
        assert left[0] == left[1]
        assert ("alignment.pt" in left[0]) == (ours.config["optimizer"] == "tam")
        if "alignment.pt" in left[0]:
            kept = [read_alignment(folder.path / "alignment.pt") for folder in (ours, theirs)]
            assert torch.equal(*kept)


def test_d_replaced_by_its_own_sequence_is_the_same_run(tmp_path: Path) -> None:
    (source,) = train(tmp_path, [config()])
    controls = [config(damping=how, damping_of=source.key) for how in ("same", "mean", "shuffled")]
    same, mean, shuffled = train(tmp_path, [*controls])
    for key, near in (("loss", 0.03), ("online", 1), ("alignment", 1 / 256)):  # s is kept in 8 bits
        for ours, theirs in zip(same.metrics(), source.metrics(), strict=True):
            assert ours[key] == pytest.approx(theirs[key], abs=near)
    assert mean.metrics() != source.metrics() != shuffled.metrics()
    s = read_alignment(source.path / "alignment.pt")
    for row in mean.metrics():
        assert row["alignment"] == pytest.approx(float(s.mean()), abs=1e-6)


def test_s_that_is_given_is_what_a_member_uses(tmp_path: Path) -> None:
    """With its own s, in full precision, a control takes the steps of its source, bit for bit."""
    torch.set_num_threads(1)
    source = population.Population([config()], tmp_path, CPU, [None])
    learn(source)
    given = source.values[2][0].clone()
    one = config(damping="same", damping_of="of no trial")
    control = population.Population([one], tmp_path, CPU, [given])
    learn(control)
    assert torch.equal(control.values[2][0], given)
    for ours, theirs in zip(control.blocks[0].params, source.blocks[0].params, strict=True):
        assert torch.equal(ours, theirs)


def learn(one: population.Population) -> None:
    """Learn the first task."""
    for _ in one.epoch(0):
        pass


def test_s_of_every_step_is_kept_to_a_128th(tmp_path: Path) -> None:
    (folder,) = train(tmp_path, [config(epochs=1)])
    alone = population.Population([config(epochs=1)], tmp_path, CPU, [None])
    learn(alone)
    s = read_alignment(folder.path / "alignment.pt")
    torch.testing.assert_close(s, alone.values[2][0], rtol=0, atol=1 / 256)


def test_levels_of_s_are_packed_without_loss() -> None:
    s = torch.tensor([0.0, 1.0, -1.0, 0.999, -0.004, 0.3, -0.7])
    levels = levels_of(s)
    assert levels.tolist() == [0, 127, -128, 127, -1, 38, -90]
    assert torch.equal(unpack_levels(pack_levels(levels)), levels)
    noise = torch.randint(-128, 128, (5000,), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(unpack_levels(pack_levels(noise)), noise)
    # A smoothed cosine as runs have it: half a byte per step at most.
    draws = 0.1 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    walk, values = 0.0, []
    for draw in draws.tolist():
        walk = 0.9 * walk + 0.1 * draw
        values.append(walk)
    assert len(pack_levels(levels_of(torch.tensor(values)))) < 20_000 / 2


def test_a_control_takes_the_d_of_the_next_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registered studies in small, with their controls, as the lab runs them."""
    small = {"epochs": 2, "passes": 2, "batch": 64, "width": 16, "data": "digits", "held_out": 300}
    presets: Any = EXPERIMENT.presets
    studies = [
        replace(study, workload={**study.workload, **small}, seeds=study.seeds[:3])
        for study in presets["registered-controls"]
    ]
    monkeypatch.setitem(presets, "registered-controls", tuple(studies))
    chosen = ("claim13-80", "claim14-100", "edge-40")
    selection = Selection("online", "registered-controls", studies=chosen)
    run(selection, RunLocation(tmp_path, tmp_path), 1, lambda event: None)
    for plan in select_plans(selection, load_results(tmp_path)):
        for variant in plan.study.variants:
            trials = plan.comparison_trials(variant)
            assert trials is not None and all(plan.record(trial) for trial in trials)
            if variant.damping is None:
                continue
            sources = plan.comparison_trials(plan.study.variant(str(variant.control_of)))
            assert sources is not None
            for seed, trial in enumerate(trials):
                source, folder = TrialFolder(tmp_path, sources[(seed + 1) % 3]), TrialFolder(tmp_path, trial)
                assert trial.damping == "another" and trial.damping_of == source.key
                used = read_alignment(source.path / "alignment.pt").view(2, -1).mean(1)
                assert [row["alignment"] for row in folder.metrics()] == pytest.approx(
                    used.tolist(), abs=1e-6
                )
                assert folder.metrics() != TrialFolder(tmp_path, sources[seed]).metrics()
                assert not (folder.path / "alignment.pt").exists()  # its source has it


def test_one_product_for_all_members_is_each_members_own() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 7, generator=generator), torch.randn(2, 7, 3, 4, generator=generator)
    found = population.multiply_jointly(x, weight)
    torch.testing.assert_close(found, population.multiply_separately(x, weight))
    for seed, member in itertools.product(range(2), range(3)):
        torch.testing.assert_close(found[seed, member], x[seed] @ weight[seed, :, member])


def test_members_need_not_be_as_many_of_each_seed(tmp_path: Path) -> None:
    odd = [*MIXED[:3], *MIXED[9:14], MIXED[6]]
    for folder in train(tmp_path / "odd", odd):
        (single,) = train(tmp_path / "one", [population.Config(**folder.config)])
        assert single.metrics() == folder.metrics()


def test_a_member_that_diverges_is_alone_in_it(tmp_path: Path) -> None:
    wild, tame = train(tmp_path / "both", [config(lr=1e30), config(lr=0.02)])
    (single,) = train(tmp_path / "one", [config(lr=0.02)])
    result = wild.read_result()
    assert result is not None and result["diverged"]
    assert tame.metrics() == single.metrics()


def test_a_compiled_step_is_the_same(tmp_path: Path) -> None:
    """As on a GPU, with its products at once."""
    torch.set_num_threads(1)
    members = MIXED
    plain, compiled = (population.Population(members, tmp_path, CPU, [None] * len(members)) for _ in range(2))
    compiled.forward = torch.compile(compiled._forward, fullgraph=True, backend="aot_eager")
    compiled.update = torch.compile(compiled._update, fullgraph=True, backend="aot_eager")
    for one in (plain, compiled):
        one.begin_task(0)
        one.begin_pass(0, 0)
        for _ in range(5):
            one.step()
    for ours, theirs in zip(plain.blocks, compiled.blocks, strict=True):
        for p, q in zip(ours.params, theirs.params, strict=True):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("delta, changed", [(0, 0), (40, 4), (100, 10)])
def test_classes_are_permuted_among_themselves(delta: int, changed: int) -> None:
    one = config(delta=delta)
    labels = torch.arange(10).repeat(5)
    before = labels
    for task in range(1, 6):
        after = population.task_labels(task, labels, 10, one)
        names = {int(a): int(b) for a, b in zip(before, after, strict=True)}
        assert sorted(names.values()) == list(range(10))  # one name for each class
        assert sum(a != b for a, b in names.items()) == changed
        before = after
    assert torch.equal(population.task_labels(0, labels, 10, one), labels)
    assert (delta == 0) == torch.equal(before, labels)


def test_samples_get_new_labels() -> None:
    one = config(delta=40, reading="samples")
    labels = torch.zeros(1000, dtype=torch.int64)
    once, twice = (population.task_labels(task, labels, 10, one) for task in (1, 2))
    assert 300 < int((once != labels).sum()) <= 400  # a tenth of the new ones are the old ones
    assert 300 < int((twice != once).sum()) <= 400


def test_the_papers_networks_have_their_parameters() -> None:
    for depth, count in ((2, 411_146), (4, 444_170)):
        one = config(depth=depth, width=128)
        assert sum(p.numel() for p in population.make_network(3072, 10, one).parameters()) == count


def test_slopes() -> None:
    assert (
        population.slope_per_task([3.0, 2.0, 1.0]) == pytest.approx(-1)
        and population.slope_per_task([5.0]) == 0
    )


@pytest.mark.parametrize(
    "mistake, message",
    [
        ({"optimizer": "adam"}, "optimizer='adam': must be one of sgd, sgdm, tam"),
        ({"reading": "images"}, "reading='images'"),
        ({"delta": 101}, "delta in 0 to 100"),
        ({"damping": "nonsense", "damping_of": "0" * 12}, "damping='nonsense'"),
        ({"passes": 0}, "must be at least 1"),
        ({"options": {"floor": 0.1}}, "a population's members have the paper's"),
    ],
)
def test_mistakes(mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**mistake)


def test_the_lab_runs_populations_on_both_engines(tmp_path: Path) -> None:
    found = []
    online_by_engine: dict[str, dict[tuple[str, int], float]] = {"local": {}, "ray": {}}
    for engine in online_by_engine:
        selection = Selection("online", "smoke", variants=(controls.controls(TAM)[1].name,))

        def tell(event: Event, mine: dict[tuple[str, int], float] = online_by_engine[engine]) -> None:
            if isinstance(event, EpochEnded):
                mine[event.job.label, event.epoch] = event.metrics["online"]

        run(selection, RunLocation(tmp_path / engine, tmp_path), 1, tell, engine)
        for plan in select_plans(selection, load_results(tmp_path / engine)):
            assert plan.to_run() == []
            records = [record for one in plan.outcomes() for record in one.records.values()]
            found.append([record.result["online"] for record in records])
    assert len(found[0]) == 6 and found[:2] == found[2:]
    last = dict(online_by_engine["local"].keys())  # Ray's may miss the tasks before
    assert "networks at once" in next(iter(last))
    for key in last.items():
        assert online_by_engine["ray"][key] == pytest.approx(online_by_engine["local"][key])
