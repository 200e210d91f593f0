"""The recorder, compared with quantities that a plain loop computes in float64."""

from __future__ import annotations

import doctest
import gc
import json
import math
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import tam
from tam.recorder import recorder as recorder_module
from tam.recorder.quantities import QUANTITIES
from tests.helpers import gradients, parameters, params_of, train

SHAPES = [(5, 4), (7,), ()]


def flat(tensors: list[Tensor]) -> Tensor:
    real = [torch.view_as_real(x.detach()) if x.is_complex() else x.detach() for x in tensors]
    return torch.cat([x.reshape(-1).double() for x in real])


def momentum(optimizer: Optimizer) -> list[Tensor]:
    states = [optimizer.state.get(p, {}) for p in params_of(optimizer)]
    found = [s.get("momentum_buffer", s.get("exp_avg")) for s in states]
    return [torch.zeros_like(p) if m is None else m for m, p in zip(found, params_of(optimizer), strict=True)]


def expected(optimizer: Optimizer, steps: int, smoothing: float = 0.9) -> dict[str, list[float]]:
    """Trains the optimizer and computes every quantity but the effective lr plainly."""
    found: dict[str, list[float]] = {name: [] for name in QUANTITIES[:-1]}
    s = 0.0
    params = params_of(optimizer)
    for t in range(steps):
        g = gradients(params, t)
        signed = [-x if optimizer.param_groups[0]["maximize"] else x for x in g]
        m, before = flat(momentum(optimizer)), flat(params)
        for p, x in zip(params, g, strict=True):
            p.grad = x
        optimizer.step()
        norms = float(m.norm() * flat(g).norm())
        s = smoothing * s + (1 - smoothing) * (float(m @ flat(signed)) / norms if norms else 0.0)
        change = float((flat(params) - before).norm())
        row = [s, (1 + s) / 2, float(flat(g).norm()), float(flat(momentum(optimizer)).norm()), change]
        for name, value in zip(found, [*row, change / float(before.norm())], strict=True):
            found[name].append(value)
    return found


OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    (Adam, {"lr": 1e-2}),
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (tam.AngularGrad, {"lr": 1e-2}),
    (tam.TAM, {"lr": 0.1}),
    (tam.AdaTAM, {"lr": 1e-2}),
    (tam.AdaTAMW, {"lr": 1e-2, "maximize": True}),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("cls, options", OPTIMIZERS, ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_every_quantity_of_every_optimizer(
    cls: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    optimizer, twin = (cls(parameters(SHAPES, dtype), **options) for _ in range(2))
    recorder = tam.Recorder(optimizer, capacity=4)
    train(optimizer, 10)
    plain = expected(twin, 10)
    assert recorder["step"].tolist() == list(range(1, 11)) and len(recorder) == 10
    # A bfloat16 update is a multiple of the parameter's last bit, and s of a bfloat16 momentum as coarse.
    rel = {torch.float64: 1e-9, torch.bfloat16: 2e-2}.get(dtype, 1e-4)
    for name, values in plain.items():
        assert recorder[name].tolist() == pytest.approx(values, rel=rel, abs=rel / 10), name


def test_the_effective_lr_by_group() -> None:
    def groups() -> list[dict[str, Any]]:
        a, b, c = parameters(SHAPES)
        return [{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.4}]

    sgd = SGD([g | {"momentum": m} for g, m in zip(groups(), (0.9, 0.5), strict=True)])
    recorder = tam.Recorder(sgd)
    train(sgd, 2)
    for row in recorder["effective_lr"].tolist():
        assert row == pytest.approx([1.0, 0.8])
    for scope, owns in (("global", ([0], [0])), ("group", ([0], [1])), ("tensor", ([0, 1], [2]))):
        torque = tam.TAM(groups(), scope=scope, momentum=0.8)
        recorder = tam.Recorder(torque)
        train(torque, 6)
        s = recorder["alignment"][-1]
        assert torch.equal(s, torque.alignment.double())
        means = [float(s.reshape(-1)[own].mean()) for own in owns]
        # lr (1 + s) / (2 (1 - beta))
        expected = [0.25 * (1 + means[0]), 1.0 * (1 + means[1])]
        assert recorder["effective_lr"][-1].tolist() == pytest.approx(expected)
    adam = Adam(groups())
    recorder = tam.Recorder(adam)
    train(adam, 1)
    assert recorder["effective_lr"].tolist() == [[0.1, 0.4]]
    adatam = tam.AdaTAM(parameters(SHAPES), lr=0.1)
    recorder = tam.Recorder(adatam, ["effective_lr"])
    train(adatam, 4)
    assert recorder["effective_lr"][-1] == pytest.approx(0.5 * (1 + float(adatam.alignment)), rel=1e-6)


def test_the_effective_lr_goes_by_the_dampening() -> None:
    """On a steady gradient it is |update| / |g| at last, and 1 - dampening weighs g only with a momentum."""
    for momentum, expected in ((0.9, 0.025), (0.0, 0.01)):
        (p,) = parameters([(3,)], torch.float64)
        sgd = SGD([p], lr=0.01, momentum=momentum, dampening=0.75)
        recorder = tam.Recorder(sgd)
        for _ in range(300):
            p.grad = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
            sgd.step()
        assert recorder["effective_lr"].tolist() == pytest.approx([expected] * 300)
        assert recorder["update_norm"][-1] / recorder["grad_norm"][-1] == pytest.approx(expected)


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_the_effective_lr_of_as_many_groups_as_parameters(scope: str) -> None:
    """The mean s of the first group's tensors counts under scope="tensor", though it has two of two."""
    p, q = parameters([(3,), (3,)])
    torque = tam.TAM([{"params": [p, q]}, {"params": []}], lr=0.1, momentum=0.5, scope=scope)
    recorder = tam.Recorder(torque)
    for t in range(6):
        p.grad, q.grad = torch.ones(3), torch.full((3,), (-1.0) ** t)  # s of p rises, s of q falls
        torque.step()
    s = torque.alignment.reshape(-1).double()
    if scope == "tensor":
        assert s[0] > 0.3 and s[1] < -0.3
    means = {"global": [s[0], s[0]], "group": [s[0], s[-1]], "tensor": [s.mean(), 0.0]}[scope]
    expected = [0.1 * (1 + float(mean)) for mean in means]
    assert recorder["effective_lr"][-1].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("scope, gain", [("global", 16.0), ("tensor", 4.0)])
def test_damping_and_effective_lr_go_by_the_gain(scope: str, gain: float) -> None:
    """d = (1 + clip(gain s, -1, 1)) / 2, and an effective lr of 10 lr d at a momentum of 0.9."""
    torque = tam.TAM(parameters(SHAPES), lr=0.1, scope=scope, smoothing=0.5, gain=gain)
    recorder = tam.Recorder(torque)
    train(torque, 12)
    s = recorder["alignment"]
    d = ((gain * s).clamp(-1, 1) + 1) / 2
    assert (gain * s).abs().max() > 1 and ((d > 0) & (d < 1) & (s != 0)).any()  # clipped and not clipped
    assert torch.equal(recorder["damping"], d)
    if scope == "global":
        torch.testing.assert_close(recorder["effective_lr"], 0.1 * 10 * d, rtol=1e-12, atol=0.0)


def test_lr_may_be_a_tensor_and_change() -> None:
    lr = torch.tensor(0.25)
    sgd = SGD(parameters(SHAPES), lr=lr, momentum=0.5, foreach=False)
    recorder = tam.Recorder(sgd, ["effective_lr"])
    train(sgd, 1)
    lr.mul_(2)
    train(sgd, 1)
    assert recorder["effective_lr"].tolist() == [0.5, 1.0]


def test_every_so_many_steps() -> None:
    sgd = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    recorder = tam.Recorder(sgd, every=3, smoothing=0.5)
    train(sgd, 10)
    assert recorder["step"].tolist() == [3, 6, 9] and recorder.smoothing == 0.125


def test_closures_are_measured_after_they_ran() -> None:
    def closure_of(optimizer: Optimizer, t: int) -> Any:
        def closure() -> float:
            for p, g in zip(params_of(optimizer), gradients(params_of(optimizer), t), strict=True):
                p.grad = g
            return 1.5

        return closure

    sgd, plain = (SGD(parameters(SHAPES), lr=0.1, momentum=0.9) for _ in range(2))
    recorders = tam.Recorder(sgd), tam.Recorder(plain)
    for t in range(3):
        assert sgd.step(closure_of(sgd, t)) == 1.5
        train(plain, 1, start=t)
    assert sgd.step(closure=closure_of(sgd, 3)) == 1.5
    train(plain, 1, start=3)
    for name in QUANTITIES:
        assert torch.equal(recorders[0][name], recorders[1][name])


def test_parameters_without_gradients_take_no_part() -> None:
    sgd = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    train(sgd, 2)
    recorder = tam.Recorder(sgd)
    sgd.zero_grad()
    sgd.step()
    params = params_of(sgd)
    params[0].grad = torch.ones_like(params[0])
    sgd.step()
    m = sgd.state[params[0]]["momentum_buffer"]
    before = (m - params[0].grad) / 0.9
    cosine = float(before.sum() / (before.norm() * math.sqrt(20)))
    assert recorder["grad_norm"].tolist() == pytest.approx([0.0, math.sqrt(20)])
    assert recorder["alignment"].tolist() == pytest.approx([0.0, 0.1 * cosine], rel=1e-4)
    assert recorder["update_norm"][0] == 0.0


def test_a_gradient_that_is_not_finite_shows() -> None:
    sgd = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    train(sgd, 3)
    recorder = tam.Recorder(sgd)
    train(sgd, 1)
    params_of(sgd)[0].grad.fill_(math.inf)
    sgd.step()
    assert recorder["grad_norm"][1] == math.inf
    assert recorder["alignment"][1] == recorder["alignment"][0]


def test_it_follows_a_warmup_across_its_switch() -> None:
    warmup = tam.Warmup(tam.TAM(parameters(SHAPES), lr=0.2), SGD, 4)
    recorder = tam.Recorder(warmup)
    train(warmup, 9)
    first = tam.TAM(parameters(SHAPES), lr=0.2)
    other = tam.Recorder(first)
    train(first, 4)
    assert recorder["step"].tolist() == list(range(1, 10))
    for name in QUANTITIES:
        assert torch.equal(recorder[name][:4], other[name]), name
    second = tam.handover(first, SGD)
    m, g = flat(momentum(second)), flat(gradients(params_of(second), 4))
    s = 0.9 * float(first.alignment) + 0.1 * float(m @ g / (m.norm() * g.norm()))
    assert float(recorder["alignment"][4]) == pytest.approx(s, rel=1e-5)
    assert recorder["effective_lr"][4] == pytest.approx(0.1 / 0.1)


def test_both_optimizers_of_a_warmup_are_asked() -> None:
    plain = tam.Warmup(tam.TAM(parameters(SHAPES)), lambda groups: SGD(groups, lr=0.1), 2)
    recorder = tam.Recorder(plain)
    train(plain, 4)
    assert recorder["alignment"].isnan().tolist() == [False, False, True, True]
    assert recorder["momentum_norm"].isnan().tolist() == [False, False, True, True]
    assert not recorder["grad_norm"].isnan().any()
    with pytest.raises(TypeError, match="got RMSprop"):
        tam.Recorder(tam.Warmup(tam.TAM(parameters(SHAPES)), lambda groups: RMSprop(groups, lr=0.1), 2))
    later = tam.Warmup(SGD(parameters(SHAPES), lr=0.1), tam.TAM, 2)
    assert "alignment" in tam.Recorder(later).quantities


def test_steps_that_raise_are_none() -> None:
    sgd = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    recorder = tam.Recorder(sgd)

    def closure() -> float:
        raise RuntimeError("no loss today")

    train(sgd, 1)
    with pytest.raises(RuntimeError, match="no loss"):
        sgd.step(closure)
    train(sgd, 1, start=1)
    assert recorder["step"].tolist() == [1, 2]


def test_after_several_segments_s_goes_on_from_their_mean() -> None:
    warmup = tam.Warmup(tam.TAM(parameters(SHAPES), scope="tensor", lr=0.2), SGD, 4)
    recorder = tam.Recorder(warmup)
    train(warmup, 4)
    mean, m = float(recorder["alignment"][-1].mean()), flat(momentum(warmup))
    g = flat(gradients(params_of(warmup), 4))
    train(warmup, 1, start=4)
    s = 0.9 * mean + 0.1 * float(m @ g / (m.norm() * g.norm()))
    assert float(recorder["alignment"][4, 0]) == pytest.approx(s, rel=1e-5)


def test_closing_frees_the_copy() -> None:
    def count() -> int:
        gc.collect()
        return sum(type(x) is Tensor and x.shape == (5, 4) for x in gc.get_objects())

    sgd = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    train(sgd, 2)
    without_recorder = count()
    recorder = tam.Recorder(sgd)
    train(sgd, 2)
    assert count() == without_recorder + 1 and recorder.backend == "loop"
    recorder.close()
    recorder.close()
    assert count() == without_recorder and recorder.backend is None and len(recorder["update_norm"]) == 2


def test_under_grad_scaler_gradients_are_recorded_unscaled() -> None:
    for fused in (True, False):
        adam, plain = (Adam(parameters(SHAPES), lr=1e-2, fused=fused) for _ in range(2))
        recorder, other = tam.Recorder(adam), tam.Recorder(plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        for t in range(5):
            train(plain, 1, start=t)
            scaler.scale(torch.ones(()))
            for p, g in zip(params_of(adam), gradients(params_of(adam), t), strict=True):
                p.grad = g * 65536.0
            scaler.step(adam)
            scaler.update()
        for name in QUANTITIES:
            assert recorder[name].tolist() == pytest.approx(other[name].tolist(), rel=1e-5, abs=1e-7), name


def test_it_detaches_from_the_optimizer() -> None:
    sgd = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    with tam.Recorder(sgd) as recorder:
        train(sgd, 3)
    train(sgd, 3)
    assert len(recorder) == 3 and recorder["alignment"].shape == (3,)
    assert recorder.step == 3
    reference = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert reference() is None


def test_a_resumed_recording_goes_on() -> None:
    whole = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    recorder = tam.Recorder(whole)
    train(whole, 8)
    part = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    first = tam.Recorder(part)
    train(part, 5)
    first.close()
    second = tam.Recorder(part)
    second.load_state_dict(first.state_dict())
    train(part, 3, start=5)
    assert second["step"].tolist() == [6, 7, 8]
    assert torch.equal(second["alignment"], recorder["alignment"][5:])


def test_lines_of_json_as_it_goes_and_afterwards(tmp_path: Path) -> None:
    torque = tam.TAM(parameters(SHAPES), scope="tensor")
    file = tmp_path / "run.jsonl"
    recorder = tam.Recorder(torque, capacity=3, jsonl=file)
    train(torque, 7)
    assert len(file.read_text().splitlines()) == 3  # a batch late
    recorder.flush()
    train(torque, 1)
    recorder.close()
    recorder.to_jsonl(tmp_path / "again.jsonl")
    assert file.read_text() == (tmp_path / "again.jsonl").read_text()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert torch.equal(torch.tensor([row["alignment"] for row in rows]).double(), recorder["alignment"])


def test_a_killed_run_goes_on_in_its_file(tmp_path: Path) -> None:
    """Lines after the checkpoint, and half a line, are gone; those before it are there."""
    file = tmp_path / "runs" / "run.jsonl"  # a folder that is not there yet
    killed, resumed = (SGD(parameters(SHAPES), lr=0.1, momentum=0.9) for _ in range(2))
    recorder = tam.Recorder(killed, capacity=2, jsonl=file)
    train(killed, 5)
    checkpoint = recorder.state_dict()
    assert len(file.read_text().splitlines()) == 5
    train(killed, 8, start=5)
    with file.open("a") as open_file:
        open_file.write('{"step": 12, "align')
    with tam.Recorder(resumed, jsonl=file) as resumed_recorder:
        resumed_recorder.load_state_dict(checkpoint)
        train(resumed, 2, start=5)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5, 6, 7]


def test_it_looks_inside_wrappers() -> None:
    accelerate = pytest.importorskip("accelerate")
    warmup = tam.Warmup(tam.TAM(parameters(SHAPES)), SGD, 2)
    wrapped = accelerate.Accelerator(cpu=not torch.cuda.is_available()).prepare_optimizer(warmup)
    recorder = tam.Recorder(wrapped, "grad_norm")
    train(wrapped, 4)
    assert recorder["step"].tolist() == [1, 2, 3, 4] and recorder.quantities == ("grad_norm",)
    assert [row["step"] for row in recorder] == [1, 2, 3, 4]
    assert repr(recorder) == "Recorder(SGD, 4 of 4 steps)"


def test_json_has_no_nan(tmp_path: Path) -> None:
    sgd = SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    recorder = tam.Recorder(sgd)
    params_of(sgd)[0].grad = torch.full((2,), math.nan)
    sgd.step()
    recorder.to_jsonl(tmp_path / "run.jsonl")
    row = json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert row["grad_norm"] is None and row["update_ratio"] is None


def test_a_pandas_frame() -> None:
    pytest.importorskip("pandas")
    torque = tam.TAM(parameters(SHAPES), scope="tensor")
    recorder = tam.Recorder(torque)
    train(torque, 4)
    frame = recorder.frame()
    assert list(frame["step"]) == [1, 2, 3, 4]
    assert list(frame["alignment/2"]) == recorder["alignment"][:, 2].tolist()
    assert list(frame["grad_norm"]) == recorder["grad_norm"].tolist()


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torque = tam.TAM(parameters(SHAPES))
    recorder = tam.Recorder(torque, capacity=2, tensorboard=tmp_path / "live")
    train(torque, 5)
    recorder.close()
    recorder.to_tensorboard(tmp_path / "after")
    for folder in ("live", "after"):
        events = EventAccumulator(str(tmp_path / folder))
        events.Reload()
        scalars = events.Scalars("tam/alignment")
        assert [e.step for e in scalars] == [1, 2, 3, 4, 5]
        assert [e.value for e in scalars] == pytest.approx(recorder["alignment"].tolist())


def test_the_papers_figure() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    torque = tam.TAM(parameters(SHAPES))
    recorder = tam.Recorder(torque)
    train(torque, 6)
    ax = recorder.plot()
    line = ax.get_lines()[0]
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(line.get_ydata()) == recorder["alignment"].tolist()
    assert "s" in ax.get_ylabel() and ax.get_xlabel() == "step"
    assert recorder.plot("grad_norm", ax=ax) is ax
    many = tam.TAM(parameters([(2,)] * 12), scope="tensor")
    recorder = tam.Recorder(many)
    train(many, 3)
    mean = recorder.plot().get_lines()[0].get_ydata()
    assert list(mean) == pytest.approx(recorder["alignment"].mean(-1).tolist())
    pyplot.close("all")


def test_torch_compile() -> None:
    torch._dynamo.reset()
    sgd, plain = (SGD(parameters(SHAPES), lr=0.1, momentum=0.9) for _ in range(2))
    recorder, other = tam.Recorder(sgd), tam.Recorder(plain)
    compiled = torch.compile(sgd.step, backend="eager")
    for t in range(4):
        for p, g in zip(params_of(sgd), gradients(params_of(sgd), t), strict=True):
            p.grad = g
        compiled()
        train(plain, 1, start=t)
    assert recorder["alignment"].tolist() == pytest.approx(other["alignment"].tolist(), abs=1e-6)


def test_plain_sgd_has_no_alignment() -> None:
    sgd = SGD(parameters(SHAPES), lr=0.1)
    recorder = tam.Recorder(sgd)
    train(sgd, 2)
    assert recorder.quantities == ("grad_norm", "update_norm", "update_ratio", "effective_lr")
    assert recorder["effective_lr"].tolist() == [0.1, 0.1]
    for ask in (lambda: recorder["alignment"], recorder.plot, lambda: tam.Recorder(sgd, ["damping"])):
        with pytest.raises(ValueError, match="SGD without momentum has nothing to compare the gradient with"):
            ask()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"optimizer": 3}, TypeError, "must be a torch.optim.Optimizer, got int"),
        ({"optimizer": RMSprop(parameters(SHAPES))}, TypeError, "optimizer must be .*, got RMSprop"),
        ({"quantities": ["norm"]}, ValueError, 'quantities must be among alignment, .*, got "norm"'),
        ({"every": 0}, ValueError, "every must be .*, got 0"),
        ({"capacity": 1.5}, ValueError, "capacity must be .*, got 1.5"),
        ({"smoothing": 2.0}, ValueError, "smoothing must be .*, got 2.0"),
        (
            {"optimizer": tam.AngularGrad(parameters(SHAPES)), "quantities": ["effective_lr"]},
            ValueError,
            "coordinate",
        ),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tam.Recorder(**{"optimizer": tam.TAM(parameters(SHAPES)), **change})


def test_what_was_not_recorded_and_sparse_gradients() -> None:
    sgd = SGD(parameters([(3, 2)]), lr=0.1, momentum=0.9)
    recorder = tam.Recorder(sgd, ["alignment"])
    with pytest.raises(ValueError, match=r'quantity must be .*\(alignment\), got "grad_norm"'):
        recorder["grad_norm"]
    with pytest.raises(ValueError, match=r'no quantity "foo"; there are step, alignment$'):
        recorder["foo"]  # type: ignore[index]
    params_of(sgd)[0].grad = torch.sparse_coo_tensor([[0]], [[1.0, 2.0]], (3, 2))
    with pytest.raises(RuntimeError, match=r"dense gradients, got .*sparse_coo"):
        sgd.step()


@pytest.mark.parametrize(
    "module, use",
    [
        ("pandas", lambda recorder, folder: recorder.frame()),
        ("matplotlib", lambda recorder, folder: recorder.plot()),
        ("tensorboard", lambda recorder, folder: recorder.to_tensorboard(folder)),
    ],
)
def test_the_error_names_the_extra(
    module: str, use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torque = tam.TAM(parameters(SHAPES))
    recorder = tam.Recorder(torque)
    train(torque, 1)
    for name in [n for n in sys.modules if n.split(".")[0] == module or n == "torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"Recorder.* needs .*pip install '\.\[record\]'"):
        use(recorder, tmp_path)


def test_the_example_of_the_docstring_runs() -> None:
    results = doctest.testmod(recorder_module)
    assert results.attempted > 0 and results.failed == 0
