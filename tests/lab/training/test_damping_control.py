"""Controls use the damping of another trial: step by step and segment by segment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tam
from tam.lab.core.alignment import read_alignment, round_alignment
from tam.lab.core.errors import LabError
from tam.lab.core.results import load_results, pack, unpack
from tam.lab.core.selection import Selection, remember_selection
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder
from tam.lab.models import get_model
from tam.lab.optimizers.variants import TAMVariant
from tam.lab.training.damping_control import alignment_tensors, load_source_alignment
from tam.lab.training.loop import StepRecorder
from tests.lab.experiments.test_images import config, outcome, run

CPU = torch.device("cpu")
TENSOR: dict[str, Any] = {"options": {"scope": "tensor"}}


def make_params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, generator=generator)) for _ in range(3)]


def take_steps(
    recorder: StepRecorder | None, optimizer: torch.optim.Optimizer, first: int, last: int
) -> None:
    """Take these steps on quadratics whose minima move, the same for every optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for p in params:
            loss = loss + (p - torch.randn(4, generator=generator)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        if recorder is None:
            optimizer.step()
        else:
            recorder.step(optimizer)


def write_source(root: Path, alignment: Tensor) -> TrialFolder:
    folder = TrialFolder(root, config())
    with folder.at_work():
        folder.write(ALIGNMENT_FILE, alignment)
    return folder


def load(root: Path, damping: str, source: TrialFolder, optimizer: Any = None) -> Tensor:
    control = config(damping=damping, damping_of=source.key, seed=3)
    alignment = load_source_alignment(control, TrialFolder(root, control), optimizer)
    assert alignment is not None
    return alignment


def test_the_source_of_each_control(tmp_path: Path) -> None:
    alignment = torch.tensor([0.25, 0.5, -0.25, 0.0])
    source = write_source(tmp_path, alignment)
    assert load(tmp_path, "mean", source).tolist() == [0.125] * 4
    assert torch.equal(load(tmp_path, "another", source), alignment)
    shuffled = load(tmp_path, "shuffled", source)
    assert sorted(shuffled.tolist()) == sorted(alignment.tolist())
    assert torch.equal(shuffled, load(tmp_path, "shuffled", source))
    assert load_source_alignment(config(), source) is None


def test_the_source_of_each_control_with_several_segments(tmp_path: Path) -> None:
    """Each segment has its own mean; steps are shuffled whole."""
    rows = [[0.5, -0.5, 0.0], [0.25, -1.0, 0.0], [0.0, 0.0, 0.75]]
    source = write_source(tmp_path, torch.tensor(rows).half())
    optimizer = tam.TAM(make_params(), scope="tensor")
    assert load(tmp_path, "mean", source, optimizer).tolist() == [[0.25, -0.5, 0.25]] * 3
    assert load(tmp_path, "another", source, optimizer).tolist() == rows
    shuffled = load(tmp_path, "shuffled", source, optimizer)
    assert sorted(shuffled.tolist()) == sorted(rows) and shuffled.tolist() != rows
    assert shuffled.dtype == torch.float32


@pytest.mark.parametrize("scope, count", [("group", 2), ("tensor", 3)])
def test_every_segment_is_recorded(scope: Any, count: int, tmp_path: Path) -> None:
    params = make_params()
    optimizer = tam.TAM([{"params": params[:2]}, {"params": params[2:]}], lr=0.05, scope=scope)
    recorder, shown = StepRecorder(6, CPU), []
    for step in range(4):
        take_steps(recorder, optimizer, step, step + 1)
        shown.append(optimizer.alignment.clone())  # of the optimizer itself
    folder = TrialFolder(tmp_path, config())
    with folder.at_work():
        recorder.write_alignment(folder)
    stored = torch.load(folder.path / ALIGNMENT_FILE, weights_only=True)
    assert stored.shape == (4, count) and stored.dtype == torch.float16
    assert torch.equal(stored, torch.stack(shown).half()) and len(set(stored[3].tolist())) == count
    torch.testing.assert_close(recorder.alignment[:4], torch.stack(shown).mean(1))


def test_one_segment_is_written_as_before(tmp_path: Path) -> None:
    """One group, or the global scope: one value per step in the recorder's precision."""
    recorder = StepRecorder(3, CPU)
    take_steps(recorder, tam.TAM(make_params(), lr=0.05, scope="group"), 0, 3)
    folder = TrialFolder(tmp_path, config())
    with folder.at_work():
        recorder.write_alignment(folder)
    stored = torch.load(folder.path / ALIGNMENT_FILE, weights_only=True)
    assert torch.equal(stored, recorder.values[:, 0]) and stored.dtype == torch.float32
    assert recorder.state_dict().keys() == {"values"}


def test_constant_segments_are_sgdm_with_an_lr_for_each() -> None:
    """m <- 0.9 m + d g and theta <- theta - lr m: SGD with momentum at lr d."""
    s, lr = torch.tensor([0.5, -0.5, 0.125]), 0.05
    controlled, plain = make_params(), make_params()
    control = tam.TAM(controlled, lr=lr, scope="tensor", smoothing=1.0, floor=0.0)
    take_steps(StepRecorder(8, CPU, s.expand(8, 3)), control, 0, 8)
    groups = [{"params": [p], "lr": lr * d} for p, d in zip(plain, ((1 + s) / 2).tolist(), strict=True)]
    take_steps(None, torch.optim.SGD(groups, lr=lr, momentum=0.9), 0, 8)
    for own, other in zip(controlled, plain, strict=True):
        torch.testing.assert_close(own, other)


def test_segments_are_replayed_in_order_and_survive_a_checkpoint() -> None:
    source = (torch.rand(5, 3, generator=torch.Generator().manual_seed(1)) * 2 - 1).half().float()
    whole = tam.TAM(make_params(), lr=0.05, scope="tensor", smoothing=1.0)
    recorder = StepRecorder(5, CPU, source)
    take_steps(recorder, whole, 0, 5)
    assert recorder.segments is not None and torch.equal(recorder.segments.float(), source)
    parts = tam.TAM(make_params(), lr=0.05, scope="tensor", smoothing=1.0)
    first, second = (StepRecorder(5, CPU, source) for _ in range(2))
    take_steps(first, parts, 0, 2)
    second.load_state_dict(first.state_dict())
    take_steps(second, parts, 2, 5)
    assert second.segments is not None and torch.equal(second.segments, recorder.segments)
    for own, other in zip(whole.param_groups[0]["params"], parts.param_groups[0]["params"], strict=True):
        assert torch.equal(own, other)


class ReadsOfDevice(TorchDispatchMode):
    """Counts what would wait for a GPU: values that become Python's."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_can_be_captured() -> None:
    """After the first step, the recorder writes to the same tensors and reads no value of the device."""
    optimizer = tam.TAM(make_params(), lr=0.05, scope="tensor", smoothing=1.0)
    recorder = StepRecorder(4, CPU, torch.zeros(4, 3))
    take_steps(recorder, optimizer, 0, 1)
    assert recorder.segments is not None
    buffers = recorder.segments.data_ptr(), recorder.values.data_ptr(), recorder.steps_taken.data_ptr()
    with ReadsOfDevice() as reads:
        recorder.before_step(optimizer)
        recorder.after_step()
    assert reads.count == 0
    assert buffers == (
        recorder.segments.data_ptr(),
        recorder.values.data_ptr(),
        recorder.steps_taken.data_ptr(),
    )


def test_the_tensors_that_hold_s() -> None:
    """They are the same in every step, also in a warm-up. What is written to them counts."""
    params = make_params()
    for optimizer, count in (
        (tam.TAM(params, scope="tensor"), 3),
        (tam.Warmup(tam.TAM(params), torch.optim.SGD, 10), 1),
        (TAMVariant(params), 1),
        (TAMVariant(params, scope="tensor"), 3),
        (torch.optim.SGD(params, lr=0.1), 0),
    ):
        take_steps(None, optimizer, 0, 1)
        before = alignment_tensors(optimizer)
        take_steps(None, optimizer, 1, 2)
        after = alignment_tensors(optimizer)
        assert [s.data_ptr() for s in before] == [s.data_ptr() for s in after] and len(after) == count
    held = TAMVariant(params, smoothing=1.0)
    alignment_tensors(held)[0].fill_(0.25)
    take_steps(None, held, 2, 3)
    assert held._stack.s.tolist() == [[0.25] * 3]


def test_a_variant_is_recorded_and_replayed_like_tam() -> None:
    source = torch.rand(5, generator=torch.Generator().manual_seed(1)) * 2 - 1
    twins = []
    for kind in (tam.TAM, TAMVariant):
        own, control = kind(make_params(), lr=0.05), kind(make_params(), lr=0.05, smoothing=1.0)
        recorders = StepRecorder(5, CPU), StepRecorder(5, CPU, source)
        for recorder, optimizer in zip(recorders, (own, control), strict=True):
            take_steps(recorder, optimizer, 0, 5)
        assert torch.equal(recorders[1].alignment, source)
        twins.append(
            [recorders[0].alignment, *own.param_groups[0]["params"], *control.param_groups[0]["params"]]
        )
    torch.testing.assert_close(*twins)


def test_a_checkpoint_without_segments_goes_on_with_the_mean(tmp_path: Path) -> None:
    """Older versions kept the mean only: the file then holds it, as theirs did."""
    optimizer = tam.TAM(make_params(), lr=0.05, scope="tensor")
    first, second = StepRecorder(4, CPU), StepRecorder(4, CPU)
    take_steps(first, optimizer, 0, 2)
    second.load_state_dict({"values": first.state_dict()["values"]})
    take_steps(second, optimizer, 2, 4)
    folder = TrialFolder(tmp_path, config())
    with folder.at_work():
        second.write_alignment(folder)
    assert torch.equal(read_alignment(folder.path / ALIGNMENT_FILE), second.alignment)


@pytest.mark.parametrize(
    "shape, scope, message",
    [
        ((2,), "tensor", "has one s per step, but the control's optimizer has 3 segments"),
        ((2, 4), "tensor", "has 4 segments, but the control's optimizer has 3 segments"),
        ((2, 3), "global", "has 3 segments, but the control's optimizer has 1 segment. "),
    ],
)
def test_another_number_of_segments_is_refused(
    shape: tuple[int, ...], scope: Any, message: str, tmp_path: Path
) -> None:
    source = write_source(tmp_path, torch.zeros(shape))
    with pytest.raises(LabError, match=f"the trial {source.key}, .* {message}"):
        load(tmp_path, "another", source, tam.TAM(make_params(), scope=scope))
    # A warm-up has the segments of its first optimizer.
    warmup = tam.Warmup(tam.TAM(make_params(), scope=scope), torch.optim.SGD, 2)
    with pytest.raises(LabError, match=message):
        load(tmp_path, "mean", source, warmup)


def test_a_killed_trial_with_segments_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **TENSOR)
    s = torch.load(whole.path / ALIGNMENT_FILE, weights_only=True)
    assert s.shape == (15, len(list(get_model("tiny").make(10).parameters()))) and s.dtype == torch.float16
    means = s.float().mean(1).reshape(3, 5).mean(1).tolist()
    assert [row["alignment"] for row in whole.metrics()] == pytest.approx(means, abs=1e-3)
    run(tmp_path / "parts", 8, **TENSOR)
    assert outcome(run(tmp_path / "parts", **TENSOR)) == outcome(whole)  # with the digest of alignment.pt


def test_a_control_of_segments_uses_another_seeds_rows(tmp_path: Path) -> None:
    source = run(tmp_path, seed=1, **TENSOR)
    s = torch.load(source.path / ALIGNMENT_FILE, weights_only=True)
    control = run(tmp_path, damping="another", damping_of=source.key, **TENSOR)
    assert torch.equal(torch.load(control.path / ALIGNMENT_FILE, weights_only=True), s)
    constant = run(tmp_path, seed=1, damping="mean", damping_of=source.key, **TENSOR)
    used = torch.load(constant.path / ALIGNMENT_FILE, weights_only=True).float()
    torch.testing.assert_close(used, s.float().mean(0).expand_as(used), atol=5e-4, rtol=1e-3)
    with pytest.raises(LabError, match="has 15 steps, not 10"):
        run(tmp_path, epochs=2, damping="another", damping_of=source.key, **TENSOR)


def test_packed_files_hold_the_mean_over_the_segments(tmp_path: Path) -> None:
    source = run(tmp_path / "run", **TENSOR)
    remember_selection(Selection("images", "smoke"), tmp_path / "run")
    s = torch.load(source.path / ALIGNMENT_FILE, weights_only=True)
    expected = round_alignment(s.float().mean(1))
    packed = tmp_path / "trials.jsonl.xz"
    pack([tmp_path / "run"], packed)
    unpack(packed, tmp_path / "copy")
    for path in (tmp_path / "run", packed, tmp_path / "copy"):
        record = load_results(path).get(source.key)
        assert record is not None and record.alignment is not None
        assert torch.equal(record.alignment, expected)
    with pytest.raises(LabError, match="Packed results hold one s per step"):
        run(tmp_path / "copy", damping="mean", damping_of=source.key, **TENSOR)
