"""The pure steps: equal to the optimizers', vmap-able with an lr for each member, differentiable."""

from __future__ import annotations

import io
import typing
import zipfile
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import tam
from tam import functional
from tests.helpers import assert_close, gradients, parameters, params_of

SHAPES = [(3, 5), (7,)]
# name: (class, init, step, init's options, step's options)
STEPS: dict[str, tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]] = {
    "tam": (tam.TAM, functional.init_tam, functional.tam, {}, {"max_grad_norm": 1.0}),
    "tam-tensor": (tam.TAM, functional.init_tam, functional.tam, {"scope": "tensor"}, {"scope": "tensor"}),
    "adatam": (tam.AdaTAM, functional.init_adatam, functional.adatam, {}, {"bias_correction": True}),
    "adatam-ema": (tam.AdaTAM, functional.init_adatam, functional.adatam, {}, {"ema": True}),
    "adatamw": (tam.AdaTAMW, functional.init_adatam, functional.adatamw, {}, {}),
    "angulargrad": (tam.AngularGrad, functional.init_angular_grad, functional.angular_grad, {}, {}),
    "angulargrad-vote": (
        tam.AngularGrad, functional.init_angular_grad, functional.angular_grad,
        {"vote": True}, {"vote": True},
    ),
}  # fmt: skip


def run(name: str, params: Any, lr: Any, steps: int = 5) -> tuple[Any, Any]:
    _, init, step, init_options, options = STEPS[name]
    state = init(params, **init_options)
    tensors = list(params.values()) if isinstance(params, dict) else list(params)
    for k in range(steps):
        drawn = gradients(tensors, k)
        grads = dict(zip(params, drawn, strict=True)) if isinstance(params, dict) else drawn
        params, state = step(params, grads, state, lr=lr, weight_decay=0.1, **options)
    return params, state


def train(name: str, lr: float) -> list[Tensor]:
    cls, _, _, _, options = STEPS[name]
    optimizer = cls(parameters(SHAPES, torch.float64), lr=lr, weight_decay=0.1, **options)
    for k in range(5):
        for p, g in zip(params_of(optimizer), gradients(params_of(optimizer), k), strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params_of(optimizer)]


def start() -> list[Tensor]:
    return [p.detach() for p in parameters(SHAPES, torch.float64)]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("form", [list, tuple, lambda x: {f"p{i}": p for i, p in enumerate(x)}])
def test_equals_the_optimizer(name: str, form: Any) -> None:
    before = start()
    params, _ = run(name, form(before), lr=0.01)
    assert type(params) is type(form(before))
    after = list(params.values()) if isinstance(params, dict) else list(params)
    for a, b in zip(after, train(name, 0.01), strict=True):
        assert_close(a, b, 1e-12)
    for a, b in zip(before, start(), strict=True):
        assert torch.equal(a, b)  # nothing was changed


def test_keys_matter_not_their_order() -> None:
    params = dict(zip("ab", start(), strict=True))
    grads = {"b": torch.ones(7, dtype=torch.float64), "a": torch.zeros(3, 5, dtype=torch.float64)}
    after, _ = functional.tam(params, grads, functional.init_tam(params), lr=1.0)
    assert torch.equal(after["a"], params["a"]) and not torch.equal(after["b"], params["b"])


@pytest.mark.parametrize("name", STEPS)
def test_members_of_a_population_have_their_own_lr(name: str) -> None:
    _, init, step, init_options, options = STEPS[name]
    rates = torch.tensor([0.001, 0.01, 0.1], dtype=torch.float64)
    params = {f"p{i}": p.expand(3, *p.shape) for i, p in enumerate(start())}
    state = vmap(lambda p: init(p, **init_options))(params)

    def member(params: Any, grads: Any, state: Any, lr: Tensor) -> Any:
        return step(params, grads, state, lr=lr, weight_decay=0.1, **options)

    for k in range(5):
        drawn = gradients(start(), k)
        grads = {f"p{i}": g.expand(3, *g.shape) for i, g in enumerate(drawn)}
        params, state = vmap(member)(params, grads, state, rates)
    for member_index, lr in enumerate(rates.tolist()):
        for p, q in zip(params.values(), train(name, lr), strict=True):
            assert_close(p[member_index], q, 1e-12)
    if hasattr(state, "alignment"):
        assert state.alignment.shape[0] == 3


def test_members_have_their_own_smoothing_and_floor() -> None:
    """Among them SGD with momentum, exactly: a smoothing of 1 and a floor of 1/2."""
    options = [(0.9, 1e-8), (0.5, 0.1), (1.0, 0.5)]
    smoothing, floor = (torch.tensor(column, dtype=torch.float64) for column in zip(*options, strict=True))
    stacked = [torch.stack([p] * len(options)) for p in start()]
    state = vmap(functional.init_tam)(stacked)

    def step(p: Any, g: Any, s: Any, gamma: Tensor, epsilon: Tensor) -> Any:
        return functional.tam(p, g, s, lr=0.1, smoothing=gamma, floor=epsilon)

    each = [parameters(SHAPES, torch.float64) for _ in options]
    alone: list[Any] = [
        tam.TAM(p, lr=0.1, smoothing=gamma, floor=epsilon)
        for p, (gamma, epsilon) in zip(each, options, strict=True)
    ]
    alone[-1] = torch.optim.SGD(each[-1], lr=0.1, momentum=0.9)
    for k in range(5):
        drawn = gradients(start(), k)
        grads = [torch.stack([g] * len(options)) for g in drawn]
        stacked, state = vmap(step)(stacked, grads, state, smoothing, floor)
        for params, optimizer in zip(each, alone, strict=True):
            for p, g in zip(params, drawn, strict=True):
                p.grad = g.clone()
            optimizer.step()
    for i, params in enumerate(each):
        for ours, theirs in zip(stacked, params, strict=True):
            assert_close(ours[i], theirs, 1e-12)
    assert state.alignment[-1] == 0


def test_a_population_trains_on_its_own_losses() -> None:
    # vmap over grad and step together, as an ensemble is trained.
    data = torch.linspace(-1, 1, 8, dtype=torch.float64)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return ((params["a"] * data + params["b"] - 2 * data - 1) ** 2).mean()

    def member(params: dict[str, Tensor], state: Any, lr: Tensor) -> Any:
        return functional.tam(params, grad(loss)(params), state, lr=lr)

    params = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    state = vmap(functional.init_tam)(params)
    rates = torch.tensor([0.0, 0.1], dtype=torch.float64)
    for _ in range(300):
        params, state = vmap(member)(params, state, rates)
    assert params["a"].tolist() == [0.0, pytest.approx(2.0, abs=1e-3)]
    assert params["b"].tolist() == [0.0, pytest.approx(1.0, abs=1e-3)]


@pytest.mark.parametrize("name", ["tam", "adatam", "adatamw"])
def test_the_gradient_of_two_steps_by_lr(name: str) -> None:
    def after(lr: Tensor) -> Tensor:
        params, _ = run(name, start(), lr, steps=2)
        return sum(p.sum() for p in params)  # type: ignore[return-value]

    lr = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(after, (lr,))


def test_mixed_dtypes_keep_their_order() -> None:
    params = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(4)]
    for scope in ("global", "tensor"):
        state = functional.init_tam(params, scope=scope)
        grads = [torch.full_like(p, i + 1.0) for i, p in enumerate(params)]
        after, state = functional.tam(params, grads, state, lr=0.1, scope=scope)
        assert [p.dtype for p in after] == [p.dtype for p in params]
        assert [float(p[0]) for p in after] == pytest.approx([0.95, 0.9, 0.85])
        assert state.alignment.shape == (() if scope == "global" else (3,))


def test_complex_parameters_start_as_the_optimizers_do() -> None:
    p = torch.ones(2, dtype=torch.complex128)
    g = torch.tensor([0.3 + 0.7j, 1j], dtype=torch.complex128)
    (after,), _ = functional.angular_grad([p], [g], functional.init_angular_grad([p]), lr=0.1)
    q = torch.nn.Parameter(p.clone())
    q.grad = g
    tam.AngularGrad([q], lr=0.1).step()
    assert_close(after, q, 1e-12)


def test_the_state_does_not_share_the_gradients_memory() -> None:
    params, grads = start(), [torch.ones_like(p) for p in start()]
    _, state = functional.angular_grad(params, grads, functional.init_angular_grad(params))
    grads[0].zero_()
    assert state.previous_grad[0].all()


BAD: list[tuple[Any, str]] = [
    (lambda p, s: functional.tam(p, p, s, scope="layer"), 'scope must be .*got "layer"'),
    (lambda p, s: functional.tam(p, p, s, momentumm=0.9), "momentumm"),
    (lambda p, s: functional.tam(p, p, s, lr="0.1"), 'lr must be .*got "0.1"'),
    (lambda p, s: functional.tam(p, p, s, smoothing=2.0), "smoothing must be .*got 2.0"),
    (lambda p, s: functional.tam(p, p, s, max_grad_norm=-1.0), "max_grad_norm must be .*got -1.0"),
    (lambda p, s: functional.adatam(p, p, functional.init_adatam(p), ema="no"), 'ema must be .*got "no"'),
    (
        lambda p, s: functional.adatamw(p, p, functional.init_adatam(p), bias_correction=1),
        "bias_correction must be .*got 1",
    ),
    (
        lambda p, s: functional.tam(p, p, s, scope="tensor"),
        r'another scope: use init_tam\(params, scope="tensor"\)',
    ),
    (lambda p, s: functional.tam(p, p[:1], s), "2 parameters, but 1 of gradient"),
    (lambda p, s: functional.tam(p, [p[0], None], s), "parameter 1 has shape .*its gradient None"),
    (lambda p, s: functional.tam(p, [p[0], p[0]], s), "its gradient \\(3, 5\\)"),
    (
        lambda p, s: functional.tam({"b": p[0]}, {"a": p[0]}, functional.init_tam({"b": p[0]})),
        "'b' has no grad",
    ),
    (
        lambda p, s: functional.tam(p, dict(zip("ab", p, strict=True)), s),
        "params is a list and grads is a dict: give both in the same form",
    ),
    (
        lambda p, s: functional.tam(p, p, functional.init_adatam(p)),
        "state must be a TAMState from init_tam, got AdaTAMState",
    ),
    (lambda p, s: functional.adatamw(p, p, s), "state must be an AdaTAMState from init_adatam, got TAMState"),
    (lambda p, s: functional.angular_grad(p, p, s), "state must be an AngularGradState"),
    (lambda p, s: functional.init_tam(p[0]), "expected a dict, list or tuple"),
    (lambda p, s: functional.init_tam([]), "with something in it"),
    (lambda p, s: functional.adatamw(p, p, functional.init_adatam(p), amsgrad=True), "amsgrad"),
    (
        lambda p, s: functional.angular_grad(p, p, functional.init_angular_grad(p), method="sin"),
        'method must be .*got "sin"',
    ),
]


@pytest.mark.parametrize("call, match", BAD)
def test_bad_input(call: Any, match: str) -> None:
    params = start()
    with pytest.raises((ValueError, TypeError), match=match):
        call(params, functional.init_tam(params))


@pytest.mark.parametrize("name", ["tam", "adatam", "angulargrad"])
def test_checkpoints_name_the_state_by_the_public_module(name: str) -> None:
    """So files of the package can move, and older checkpoints load."""
    state = STEPS[name][1](start())
    file = io.BytesIO()
    torch.save(state, file)
    assert f"tam.functional\n{type(state).__name__}\n".encode() in zipped(file)
    file.seek(0)
    with torch.serialization.safe_globals([type(state)]):
        loaded = torch.load(file)
    assert type(loaded) is type(state)
    assert typing.get_type_hints(type(state))["alignment" if name != "angulargrad" else "step"] is Tensor


def zipped(file: io.BytesIO) -> bytes:
    """Return the pickle in a file of `torch.save`."""
    archive = zipfile.ZipFile(file)
    return archive.read(next(one for one in archive.namelist() if one.endswith("data.pkl")))
