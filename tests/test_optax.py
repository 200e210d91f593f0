"""The optimizers for JAX: equal to torch's and to the oracle, and at home among optax's transformations."""

from __future__ import annotations

import importlib
import inspect
import pickle
import runpy
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

import tam  # noqa: E402
import tam.optax  # noqa: E402
from tam.reference import Group, Reference  # noqa: E402
from tests.helpers import gradients, parameters  # noqa: E402

# It has moved out of jax.experimental.
enable_x64 = (jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")).enable_x64

# The rates here suit ten to fifty steps; test_a_learning_rate_for_adam_warns is about this warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*bias_correction")

SHAPES = [(3, 5), (7,)]
STEPS = 50
PAIRS = {"tam": tam.TAM, "adatam": tam.AdaTAM, "adatamw": tam.AdaTAMW}
TWINS = {"tam": optax.sgd, "adatam": optax.adam, "adatamw": optax.adamw, "scale_by_torque": optax.trace}
RATES = {"tam": 0.1, "adatam": 0.01, "adatamw": 0.01}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight_decay": {"weight_decay": 0.1},
    "max_grad_norm": {"max_grad_norm": 2.0},
    "ema": {"ema": True},
    "bias_correction": {"bias_correction": True},
    "all": {"weight_decay": 0.1, "max_grad_norm": 2.0, "ema": True, "bias_correction": True},
}
CASES = [
    (name, scope, options)
    for name in PAIRS
    for scope in ("global", "tensor")
    for options in OPTIONS
    if options != "all" and (name != "tam" or options not in ("ema", "bias_correction"))
]


@pytest.fixture(autouse=True, scope="module")
def _quick_compiling() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def arrays(tensors: Any) -> list[Any]:
    """As jax has them; bfloat16 has no numpy dtype of torch's."""
    found = []
    for x in tensors:
        x = x.detach()
        wide = jnp.asarray(x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy().copy())
        found.append(wide.astype(jnp.bfloat16) if x.dtype == torch.bfloat16 else wide)
    return found


def stream(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, steps: int = STEPS) -> tuple[Any, Any]:
    """The parameters at the start, and their gradients [steps, ...]: some agreement, some noise."""
    params = parameters(shapes, dtype)
    drift = gradients(params, 10_000)
    drawn = [gradients(params, k) for k in range(steps)]
    return params, [[g + 0.5 * d for g, d in zip(row, drift, strict=True)] for row in drawn]


def by_optax(optimizer: Any, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """Parameters and state after the steps on these gradients. Without jit: compiling takes longer."""
    state = optimizer.init(params)
    for g in grads:
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def by_torch(optimizer: Any, grads: list[Any]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g
        optimizer.step()


def get(state: Any, name: str) -> Any:
    return optax.tree_utils.tree_get(state, name)


def alignment(state: Any) -> Any:
    return get(state, "alignment")


def momentum(state: Any) -> Any:
    return get(state, "trace") if get(state, "mu") is None else get(state, "mu")


def close(a: Any, b: Any, tol: float) -> None:
    """|a - b| <= tol max|b|."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    if b.size:
        assert np.abs(a - b).max() <= tol * np.abs(b).max(), np.abs(a - b).max() / np.abs(b).max()


def numbers(steps: int = 10) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A dict of parameters, and gradients of them."""
    params, grads = stream(steps=steps)
    named = [dict(zip("wb", arrays(row), strict=True)) for row in (params, *grads)]
    return named[0], named[1:]


@pytest.mark.parametrize("name, scope, case", CASES)
def test_equals_torch(name: str, scope: str, case: str) -> None:
    options = {"scope": scope, **OPTIONS[case]}
    params, grads = stream()
    theta, state = by_optax(
        getattr(tam.optax, name)(RATES[name], **options), arrays(params), [arrays(row) for row in grads]
    )
    twin = PAIRS[name](params, lr=RATES[name], foreach=False, fused=False, **options)
    by_torch(twin, grads)
    for x, p in zip(theta, params, strict=True):
        close(x, p.detach(), 1e-6)
    np.testing.assert_allclose(alignment(state), twin.alignment, atol=1e-6)
    assert np.abs(alignment(state)).max() > 0.05  # it damps


@pytest.mark.parametrize("name, scope", [("tam", "global"), ("adatam", "tensor"), ("adatamw", "global")])
def test_under_jit_and_scan(name: str, scope: str) -> None:
    params, grads = numbers()
    optimizer = getattr(tam.optax, name)(RATES[name], scope=scope, weight_decay=0.1, max_grad_norm=1.0)

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *grads)
    (theta, state), _ = jax.jit(jax.lax.scan, static_argnums=0)(
        step, (params, optimizer.init(params)), stacked
    )
    expected, other = by_optax(optimizer, params, grads)
    for key in params:
        close(theta[key], expected[key], 1e-6)
    np.testing.assert_allclose(alignment(state), alignment(other), atol=1e-6)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("name, case", [("tam", "max_grad_norm"), ("adatam", "all"), ("adatamw", "all")])
def test_equals_the_oracle_in_float64(name: str, scope: str, case: str) -> None:
    options = {"weight_decay": 0.1, "scope": scope, **OPTIONS[case]}
    params, grads = stream(torch.float64)
    group = Group(
        [p.detach().clone() for p in params], lr=RATES[name], weight_decay=options.pop("weight_decay")
    )
    reference = Reference([group], rule=name, **options)
    with enable_x64(True):
        optimizer = getattr(tam.optax, name)(RATES[name], weight_decay=group.weight_decay, **options)
        theta, state = by_optax(optimizer, arrays(params), [arrays(row) for row in grads])
        assert alignment(state).dtype == jnp.float64
        for row in grads:
            reference.step([row])
        for x, p in zip(theta, group.theta, strict=True):
            close(x, p, 1e-12)
        for x, m in zip(momentum(state), reference.m[0], strict=True):
            close(x, m, 1e-12)
        expected = [reference.s[reference.segment(0, j)] for j in range(len(params))]
        np.testing.assert_allclose(
            np.broadcast_to(alignment(state), len(params)), expected, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", ["tam", "adatam"])
def test_complex_parameters_are_pairs_of_reals(name: str) -> None:
    params, grads = stream(torch.complex64, [(3, 2), (5,)], steps=20)
    options = {"weight_decay": 0.1, "max_grad_norm": 2.0}
    start = arrays(params)
    optimizer = getattr(tam.optax, name)(RATES[name], **options)
    theta, state = by_optax(optimizer, start, [arrays(row) for row in grads])
    twin = PAIRS[name](params, lr=RATES[name], foreach=False, fused=False, **options)
    by_torch(twin, grads)
    for x, p in zip(theta, params, strict=True):
        assert x.dtype == jnp.complex64
        close(x, p.detach(), 1e-6)
    assert float(alignment(state)) == pytest.approx(float(twin.alignment), abs=1e-6)


def test_bfloat16_is_computed_in_float32() -> None:
    params, grads = stream(torch.bfloat16, [(100, 20), (7,)], steps=10)
    start = arrays(params)
    theta, state = by_optax(tam.optax.adatam(0.01), start, [arrays(row) for row in grads])
    twin = tam.AdaTAM(params, lr=0.01, foreach=False, fused=False)
    by_torch(twin, grads)
    for x, m, p in zip(theta, momentum(state), params, strict=True):
        assert x.dtype == m.dtype == jnp.bfloat16
        close(x.astype(jnp.float32), p.detach().float(), 2**-7)
    # Sums of bfloat16 numbers would be off by 1e-2.
    assert alignment(state).dtype == jnp.float32
    assert float(alignment(state)) == pytest.approx(float(twin.alignment), abs=1e-4)


def test_the_state_has_the_dtype_of_what_init_was_given() -> None:
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    optimizer = tam.optax.adatam(0.01)
    state = optimizer.init({"w": jnp.ones(3, jnp.float32)})
    updates, state = optimizer.update(params, state, params)
    assert get(state, "mu")["w"].dtype == get(state, "nu")["w"].dtype == jnp.float32
    assert updates["w"].dtype == jnp.bfloat16


def test_mixed_dtypes() -> None:
    with enable_x64(True):
        params = [jnp.ones(2, jnp.float32), jnp.ones(3, jnp.float64)]
        optimizer = tam.optax.tam(0.1, weight_decay=0.1, max_grad_norm=1.0)
        theta, state = by_optax(optimizer, params, [params, params])
        assert [x.dtype for x in theta] == [x.dtype for x in params]
        assert [x.dtype for x in momentum(state)] == [x.dtype for x in params]
        assert alignment(state).dtype == jnp.float32 and float(alignment(state)) == pytest.approx(0.1)


def test_the_limit_is_optax_sgd() -> None:
    params, grads = numbers()
    limit, _ = by_optax(tam.optax.tam(0.1, smoothing=1.0, floor=0.5), params, grads)
    half, _ = by_optax(tam.optax.tam(0.2, smoothing=1.0, floor=0.0), params, grads)
    sgd, _ = by_optax(optax.sgd(0.1, momentum=0.9), params, grads)
    for key in params:
        close(limit[key], sgd[key], 3e-7)
        close(half[key], sgd[key], 3e-7)
    other, _ = by_optax(tam.optax.tam(0.1, floor=0.5), params, grads)
    assert np.abs(other["w"] - sgd["w"]).max() > 1e-3


def test_the_limit_is_optax_adam() -> None:
    # With d = 1/2, m is a sum of halves: 5 times Adam's average once beta1^t is gone.
    params, grads = numbers(steps=100)
    limit, adam = tam.optax.adatam(0.001, smoothing=1.0, bias_correction=True), optax.adam(0.005)
    state, other = limit.init(params), adam.init(params)
    for g in grads:
        updates, state = limit.update(g, state, params)
        expected, other = adam.update(g, other, params)
    for key in params:
        close(updates[key], expected[key], 1e-3)


def test_weight_decay_and_clipping_lie_outside_the_cosine() -> None:
    params, grads = numbers()
    big = jax.tree.map(lambda x: 100 * x, params)
    torque = tam.optax.scale_by_torque
    first = grads[0]
    for options in ({"weight_decay": 10.0}, {"max_grad_norm": 0.1}):
        state = torque(**options).init(big)
        update, state = torque(**options).update(first, state, big)
        # After one step m is known, and the cosine of the next is with the raw gradient.
        flat = [jnp.concatenate([y.ravel() for y in jax.tree.leaves(x)]) for x in (update, grads[1])]
        cosine = float(flat[0] @ flat[1] / jnp.linalg.norm(flat[0]) / jnp.linalg.norm(flat[1]))
        _, state = torque(**options).update(grads[1], state, big)
        assert float(state.alignment) == pytest.approx(0.1 * cosine, abs=1e-6)


@pytest.mark.parametrize("name, scope", [("tam", "tensor"), ("adatam", "global"), ("adatamw", "tensor")])
def test_a_population_has_its_own_learning_rates(name: str, scope: str) -> None:
    params, grads = numbers(steps=4)
    rates = jnp.array([0.001, 0.01, 0.1])
    members = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), params)

    def of(lr: Any) -> Any:
        return getattr(tam.optax, name)(lr, weight_decay=0.1, max_grad_norm=1.0, scope=scope)

    @jax.jit
    @jax.vmap
    def step(params: Any, state: Any, lr: Any) -> Any:
        # Each has its own gradients, too.
        updates, state = of(lr).update(jax.tree.map(jnp.sin, params), state, params)
        return optax.apply_updates(params, updates), state

    theta, state = members, jax.vmap(of(0.0).init)(members)
    for _ in grads:
        theta, state = step(theta, state, rates)
    assert alignment(state).shape == ((3,) if scope == "global" else (3, 2))
    for k in range(3):
        one = jax.tree.map(lambda x, k=k: x[k], members)
        alone = of(float(rates[k])).init(one)
        for _ in grads:
            updates, alone = of(float(rates[k])).update(jax.tree.map(jnp.sin, one), alone, one)
            one = optax.apply_updates(one, updates)
        for key in params:
            close(theta[key][k], one[key], 1e-6)
        np.testing.assert_allclose(alignment(state)[k], alignment(alone), atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_inject_hyperparams(name: str) -> None:
    params, grads = numbers(steps=6)
    factory = getattr(tam.optax, name)
    optimizer = optax.inject_hyperparams(factory)(learning_rate=0.01, max_grad_norm=1.0)
    state = optimizer.init(params)
    assert {"learning_rate", "smoothing", "floor", "weight_decay"} <= set(state.hyperparams)
    theta = params
    update = jax.jit(optimizer.update)
    for g in grads[:3]:
        updates, state = update(g, state, theta)
        theta = optax.apply_updates(theta, updates)
    same, _ = by_optax(factory(0.01, max_grad_norm=1.0), params, grads[:3])
    close(theta["w"], same["w"], 1e-5)  # 1 - b2 has few digits where b2 is a float32

    state.hyperparams["learning_rate"] = jnp.array(0.0)
    state.hyperparams["smoothing"] = jnp.array(1.0)
    before = alignment(state)
    updates, state = update(grads[3], state, theta)
    assert all((x == 0).all() for x in jax.tree.leaves(updates))
    assert float(alignment(state)) == float(before) != 0


def test_multi_transform_has_a_cosine_for_each_label() -> None:
    params, grads = stream(steps=10)
    start = arrays(params)
    optimizer = optax.multi_transform(
        {"slow": tam.optax.tam(0.01, momentum=0.5), "fast": tam.optax.tam(0.1)}, ["slow", "fast"]
    )
    theta, state = by_optax(optimizer, start, [arrays(row) for row in grads])
    twin = tam.TAM(
        [{"params": params[:1], "lr": 0.01, "momentum": 0.5}, {"params": params[1:], "lr": 0.1}],
        scope="group",
        foreach=False,
        fused=False,
    )
    by_torch(twin, grads)
    for x, p in zip(theta, params, strict=True):
        close(x, p.detach(), 1e-6)
    found = dict(optax.tree_utils.tree_get_all_with_path(state, "alignment"))
    np.testing.assert_allclose(sorted(map(float, found.values())), sorted(twin.alignment.tolist()), atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_schedules(name: str) -> None:
    params, grads = stream(shapes=SHAPES[1:], steps=5)
    start = arrays(params)
    rate = optax.linear_schedule(0.1, 0.0, 5)
    theta, _ = by_optax(
        getattr(tam.optax, name)(rate, weight_decay=0.1), start, [arrays(row) for row in grads]
    )
    twin = PAIRS[name](params, weight_decay=0.1, foreach=False, fused=False)
    for k, row in enumerate(grads):
        twin.param_groups[0]["lr"] = 0.1 * (1 - k / 5)
        by_torch(twin, [row])
    close(theta[0], params[0].detach(), 1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_schedules_of_the_weight_decay(name: str) -> None:
    params, grads = stream(steps=5)
    start, rows = arrays(params), [arrays(row) for row in grads]
    decay = optax.linear_schedule(0.5, 0.0, 5)
    optimizer = getattr(tam.optax, name)(RATES[name], weight_decay=decay)
    theta, state = by_optax(optimizer, start, rows)
    twin = PAIRS[name](params, lr=RATES[name], foreach=False, fused=False)
    for k, row in enumerate(grads):
        twin.param_groups[0]["weight_decay"] = 0.5 * (1 - k / 5)
        by_torch(twin, [row])
    for x, p in zip(theta, params, strict=True):
        close(x, p.detach(), 1e-6)
    counts = [int(x) for _, x in optax.tree_utils.tree_get_all_with_path(state, "count")]
    assert counts == [5] * (2 if name == "adatamw" else 1)  # decoupled, the decay counts for itself

    def step(carry: Any, g: Any) -> Any:
        updates, state = optimizer.update(g, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    (other, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), stacked)
    for x, y in zip(other, theta, strict=True):
        close(x, y, 1e-6)


def test_a_schedule_of_the_weight_decay_with_a_mask() -> None:
    params, grads = numbers(steps=4)

    def of(**options: Any) -> Any:
        return by_optax(tam.optax.adatamw(0.01, **options), params, grads)[0]

    theta = of(weight_decay=lambda count: jnp.where(count < 2, 0.5, 0.0), mask={"w": True, "b": False})
    free, decayed = of(weight_decay=0.0), of(weight_decay=0.5)
    close(theta["b"], free["b"], 1e-6)
    assert np.abs(theta["w"] - free["w"]).max() > 1e-3 < np.abs(theta["w"] - decayed["w"]).max()


def by_hand(
    grads: list[np.ndarray], gain: float, gamma: float = 0.9, beta: float = 0.9
) -> tuple[np.ndarray, float]:
    """m and s of the rule with a gain, in float64."""
    m, s = np.zeros_like(grads[0]), 0.0
    for g in grads:
        norms = np.linalg.norm(m) * np.linalg.norm(g)
        s = gamma * s + (1 - gamma) * (m @ g / norms if norms else 0.0)
        m = beta * m + (1e-8 + (1 + min(max(gain * s, -1.0), 1.0)) / 2) * g
    return m, s


@pytest.mark.parametrize("gain", [0.5, 4.0, -20.0])
def test_gain(gain: float) -> None:
    _, grads = stream(torch.float64, SHAPES[1:], steps=20)
    rows = [g.numpy() for (g,) in grads]
    m, s = by_hand(rows, gain)
    assert (abs(gain * s) > 1) == (abs(gain) > 1)  # clipped, or not
    assert np.abs(m - by_hand(rows, 1.0)[0]).max() > 1e-3
    with enable_x64(True):
        for option, scope in ((gain, "tensor"), (jnp.array(gain), "global")):
            torque = tam.optax.scale_by_torque(gain=option, scope=scope)
            state = torque.init(jnp.zeros(len(m)))
            for g in rows:
                update, state = torque.update(jnp.asarray(g), state)
            close(update, m, 1e-12)
            np.testing.assert_allclose(np.ravel(alignment(state)), s, atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_every_optimizer_has_the_gain(name: str) -> None:
    params, grads = numbers()
    params, grads = params["b"], [g["b"] for g in grads]
    factory = getattr(tam.optax, name)
    half, _ = by_optax(factory(0.01, gain=0.0), params, grads)
    fixed, _ = by_optax(factory(0.01, smoothing=1.0), params, grads)  # s stays 0
    plain, _ = by_optax(factory(0.01), params, grads)
    assert (half == fixed).all() and np.abs(half - plain).max() > 1e-4
    by_number = [by_optax(factory(0.01, gain=gain), params, grads)[0] for gain in (1, 2.0)]
    by_array = jax.vmap(lambda gain: by_optax(factory(0.01, gain=gain), params, grads)[0])(
        jnp.array([1.0, 2.0])
    )
    assert (by_number[0] == plain).all()
    close(by_array, jnp.stack(by_number), 1e-6)


def test_links_of_a_chain() -> None:
    params, grads = numbers()
    chain = optax.chain(optax.clip(0.5), tam.optax.scale_by_torque(), optax.scale(-0.1))
    clipped = [jax.tree.map(lambda x: jnp.clip(x, -0.5, 0.5), g) for g in grads]
    theta, state = by_optax(chain, params, grads)
    expected, other = by_optax(tam.optax.tam(0.1), params, clipped)
    close(theta["w"], expected["w"], 1e-6)
    assert float(alignment(state)) == pytest.approx(float(alignment(other)), abs=1e-6)


def test_the_mask_of_adatamw() -> None:
    params, grads = numbers()
    of = tam.optax.adatamw
    for mask in ({"w": True, "b": False}, lambda p: {key: key == "w" for key in p}):
        theta, _ = by_optax(of(0.1, weight_decay=0.5, mask=mask), params, grads)
        decayed, _ = by_optax(of(0.1, weight_decay=0.5), params, grads)
        free, _ = by_optax(of(0.1, weight_decay=0.0), params, grads)
        close(theta["w"], decayed["w"], 1e-6)
        close(theta["b"], free["b"], 1e-6)
        assert np.abs(decayed["b"] - free["b"]).max() > 1e-3


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_zero_gradients_let_s_fade(scope: str) -> None:
    params, grads = numbers()
    zero = jax.tree.map(jnp.zeros_like, params)
    optimizer = tam.optax.tam(0.1, scope=scope, max_grad_norm=1.0)
    theta, _ = by_optax(optimizer, params, [zero])
    assert all((theta[key] == params[key]).all() for key in params)
    _, before = by_optax(optimizer, params, grads)
    _, after = by_optax(optimizer, params, [*grads, zero])
    assert (alignment(before) != 0).all()
    np.testing.assert_allclose(alignment(after), 0.9 * alignment(before), rtol=1e-5)


def test_the_cosine_is_never_beyond_one() -> None:
    g = jax.random.normal(jax.random.key(0), (1000, 7))
    torque = tam.optax.scale_by_torque(smoothing=0.0)
    _, state = jax.vmap(torque.update)(g, jax.vmap(torque.init)(g))
    for sign in (1, -1):
        _, after = jax.vmap(torque.update)(sign * 3 * g, state)
        assert np.abs(after.alignment).max() == 1.0
        np.testing.assert_allclose(after.alignment, sign, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_that_are_not_finite_leave_s(value: float) -> None:
    params, grads = numbers()
    bad = {**grads[0], "w": grads[0]["w"].at[0].set(value)}
    for scope in ("global", "tensor"):
        optimizer = tam.optax.tam(0.1, scope=scope)
        _, before = by_optax(optimizer, params, grads)
        _, after = by_optax(optimizer, params, [*grads, bad])
        kept = np.asarray(alignment(after) == alignment(before))
        assert kept.tolist() == (True if scope == "global" else [False, True])  # leaves: b, w
        assert not np.isfinite(momentum(after)["w"]).all()


def test_apply_if_finite() -> None:
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    optimizer = optax.apply_if_finite(tam.optax.adatam(0.1), 5)
    state = optimizer.init(params)
    updates, state = optimizer.update({"w": jnp.full(3, jnp.nan, jnp.bfloat16)}, state, params)
    assert (updates["w"] == 0).all() and updates["w"].dtype == jnp.bfloat16
    updates, state = optimizer.update(params, state, params)
    assert (updates["w"] < 0).all()


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_gradient_of_none_takes_no_part(name: str, scope: str) -> None:
    params, grads = stream(steps=6)
    theta = dict(zip("ab", arrays(params), strict=True))
    optimizer = getattr(tam.optax, name)(0.1, scope=scope, weight_decay=0.1)
    state = optimizer.init(theta)
    twin = PAIRS[name](params, lr=0.1, scope=scope, weight_decay=0.1, foreach=False, fused=False)
    for k, row in enumerate(grads):
        g = dict(zip("ab", arrays(row), strict=True))
        if k in (2, 4):
            g["a"], row[0] = None, None
        updates, state = optimizer.update(g, state, theta)
        assert (updates["a"] is None) == (k in (2, 4))
        theta = {key: p if updates[key] is None else p + updates[key] for key, p in theta.items()}
        by_torch(twin, [row])
    for x, p in zip(theta.values(), params, strict=True):
        close(x, p.detach(), 1e-6)
    np.testing.assert_allclose(alignment(state), twin.alignment, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_empty_places_in_a_tree(name: str, scope: str) -> None:
    optimizer = getattr(tam.optax, name)(0.1, scope=scope, max_grad_norm=1.0, weight_decay=0.1)
    full = {
        "a": jnp.ones(7),
        "e": jnp.ones((2, 0)),
        "f": jnp.zeros(()),
        "b": None,
        "c": optax.MaskedNode(),
        "d": {},
    }
    theta, state = by_optax(optimizer, full, [full, full])
    assert jax.tree.structure(theta) == jax.tree.structure(full)
    alone, other = by_optax(optimizer, jnp.ones(7), [jnp.ones(7)] * 2)
    assert (theta["a"] == alone).all()
    s, expected = np.ravel(alignment(state)), np.ravel(alignment(other))
    assert s[0] == expected[0] > 0 and s[1:].tolist() == ([0.0, 0.0] if scope == "tensor" else [])

    for empty in ({}, [], {"b": None}):
        state = optimizer.init(empty)
        updates, after = optimizer.update(empty, state, empty)
        assert updates == empty and (alignment(after) == 0).all()
        assert alignment(after).dtype == jnp.float32


def test_masked() -> None:
    params, grads = numbers()
    masked = optax.masked(tam.optax.scale_by_torque(scope="tensor"), {"w": True, "b": False})
    _, state = by_optax(masked, params, grads)
    _, other = by_optax(tam.optax.scale_by_torque(), params["w"], [g["w"] for g in grads])
    assert alignment(state).shape == (1,)
    # The parameters move otherwise, the given gradients are the same.
    assert float(alignment(state)[0]) == pytest.approx(float(alignment(other)), abs=1e-6)


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_optax_knows_which_state_is_like_the_parameters(scope: str) -> None:
    params, _ = numbers()
    optimizer = tam.optax.adatam(0.1, scope=scope)
    state = optax.tree_utils.tree_map_params(optimizer, lambda x: x + 1, optimizer.init(params))
    assert (get(state, "mu")["w"] == 1).all() and (get(state, "nu")["b"] == 1).all()
    assert (alignment(state) == 0).all() and int(get(state, "count")) == 0


def test_the_names_of_the_state_are_those_of_optax() -> None:
    params, grads = numbers(steps=2)
    names = {"tam": ["trace"], "adatam": ["count", "mu", "nu"], "adatamw": ["count", "mu", "nu"]}
    for name, fields in names.items():
        _, state = by_optax(getattr(tam.optax, name)(RATES[name]), params, grads)
        _, theirs = by_optax(
            TWINS[name](RATES[name], **{"momentum": 0.9} if name == "tam" else {}), params, grads
        )
        assert list(state[0]._fields) == [*theirs[0]._fields, "alignment"] == [*fields, "alignment"]
        for field in fields:
            ours, other = (jax.eval_shape(lambda x: x, get(x, field)) for x in (state, theirs))
            assert ours == other
    assert int(get(state, "count")) == 2


@pytest.mark.parametrize("name", TWINS)
def test_positional_arguments_mean_what_they_mean_in_optax(name: str) -> None:
    def positional(factory: Any) -> list[str]:
        parameters = inspect.signature(factory).parameters.values()
        return [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]

    ours = positional(getattr(tam.optax, name))
    theirs = [{"decay": "momentum"}.get(x, x) for x in positional(TWINS[name])]
    assert ours == theirs[: len(ours)] and ours
    with pytest.raises(TypeError, match="positional"):
        getattr(tam.optax, name)(*[0.1] * (len(ours) + 1))


@pytest.mark.parametrize("name", PAIRS)
def test_optax_sees_that_schedules_are_accepted(name: str) -> None:
    parameters = inspect.signature(getattr(tam.optax, name)).parameters
    assert parameters["learning_rate"].annotation == optax.ScalarOrSchedule
    assert parameters["weight_decay"].annotation == optax.ScalarOrSchedule


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_the_state_keeps_its_types(name: str, dtype: Any) -> None:
    params = {"a": jnp.ones((2, 3), dtype), "b": jnp.ones(4, dtype)}
    option = "accumulator_dtype" if name == "tam" else "mu_dtype"
    for options in ({}, {"weight_decay": lambda count: 0.1}, {option: jnp.complex64}, {option: "float32"}):
        if options.get(option) == "float32" and dtype == jnp.complex64:
            continue
        optimizer = getattr(tam.optax, name)(1e-4, **options)
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, params, state, params)
        assert after == state
        assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, params)
        if option in options:
            assert {x.dtype for x in jax.tree.leaves(momentum(state))} == {jnp.dtype(options[option])}


@pytest.mark.parametrize("name", PAIRS)
def test_the_dtype_of_the_momentum(name: str) -> None:
    params, grads = numbers()
    option = "accumulator_dtype" if name == "tam" else "mu_dtype"

    def of(dtype: Any) -> Any:
        return getattr(tam.optax, name)(RATES[name], **{option: dtype})

    theta, state = by_optax(of(jnp.bfloat16), params, grads)
    # The same by hand: only the momentum is rounded, and only between two steps.
    plain, expected = of(None), params
    other = plain.init(params)
    for g in grads:
        updates, other = plain.update(g, other, expected)
        expected = optax.apply_updates(expected, updates)
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), momentum(other))
        other = optax.tree_utils.tree_set(other, **{"trace" if name == "tam" else "mu": rounded})
    unrounded, _ = by_optax(plain, params, grads)
    for key in params:
        assert momentum(state)[key].dtype == jnp.bfloat16
        assert (theta[key] == expected[key]).all() and (theta[key] != unrounded[key]).any()
    assert float(alignment(state)) == float(alignment(other))
    # A complex momentum of real parameters is a real one, as it is in optax.
    complex_, state = by_optax(of("complex64"), params, grads)
    assert momentum(state)["w"].dtype == jnp.complex64
    for key in params:
        close(complex_[key], unrounded[key], 1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_a_real_momentum_cannot_hold_complex_gradients(name: str) -> None:
    option = {"accumulator_dtype" if name == "tam" else "mu_dtype": "bfloat16"}
    optimizer = getattr(tam.optax, name)(1e-4, **option)
    params = jnp.ones(3, jnp.complex64)
    with pytest.raises(ValueError, match=r"bfloat16 .* complex"):
        optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize("name", ["adatam", "adatamw"])
def test_the_second_moment_of_float16_parameters_does_not_underflow(name: str) -> None:
    optimizer = getattr(tam.optax, name)(1e-2, bias_correction=True, weight_decay=0.0)
    _, grads = stream(shapes=[(100,)], steps=5)
    theta = {}
    for dtype in (jnp.float16, jnp.float32):
        rows = [jnp.asarray(1e-3 * g.numpy(), dtype) for (g,) in grads]
        theta[dtype], _ = by_optax(optimizer, jnp.zeros(100, dtype), rows)
    assert theta[jnp.float16].dtype == jnp.float16
    # With v in float16 the parameters move 40 times as far.
    close(theta[jnp.float16].astype(jnp.float32), theta[jnp.float32], 1e-2)


@pytest.mark.parametrize("name", ["adatam", "adatamw"])
def test_a_learning_rate_for_adam_warns(name: str) -> None:
    factory = getattr(tam.optax, name)
    for rate in (1e-3, np.float32(0.1), 1):
        with pytest.warns(UserWarning, match="bias_correction") as caught:
            factory(rate)
        assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factory()
        factory(9.9e-4)
        factory(lambda count: 0.1)
        factory(jnp.array(0.1))
        for value in (False, True):
            factory(0.1, bias_correction=value)
    params, grads = numbers(steps=3)
    paper, _ = by_optax(factory(0.1, bias_correction=False), params, grads)
    default, _ = by_optax(factory(0.1), params, grads)
    assert (paper["w"] == default["w"]).all()


def test_a_cosine_averaged_too_briefly_for_the_momentum_warns() -> None:
    for make in (
        lambda: tam.optax.tam(0.1, 0.99),
        lambda: tam.optax.scale_by_torque(smoothing=0.0),
        lambda: tam.optax.adatam(b1=0.99),
        lambda: tam.optax.adatamw(b1=np.float32(0.99)),
    ):
        with pytest.warns(UserWarning, match="averages the cosine") as caught:
            make()
        assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tam.optax.tam(0.1, 0.95)
        tam.optax.tam(0.1, 0.99, smoothing=1.0)
        tam.optax.tam(0.1, 0.99, gain=0.0)
        tam.optax.tam(0.1, jnp.array(0.99))  # it may be traced
        tam.optax.adatam(b1=0.99, ema=True)


def test_the_state_can_be_donated() -> None:
    params, grads = numbers()
    optimizer = tam.optax.adatam(0.1)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update, donate_argnums=1)
    for g in grads[:2]:
        _, state = update(g, state, params)
    assert int(get(state, "count")) == 2


@pytest.mark.parametrize("name, scope", [("tam", "tensor"), ("adatam", "global")])
def test_the_derivative_of_training_by_the_learning_rate(name: str, scope: str) -> None:
    def after(lr: Any) -> Any:
        optimizer = getattr(tam.optax, name)(lr, scope=scope, max_grad_norm=1.0)
        theta = {"a": jnp.arange(1.0, 8.0)}
        if name == "tam":
            theta["zero"] = jnp.zeros(7)  # in AdaTAM sqrt(v) has no derivative there, as in Adam
        state = optimizer.init(theta)
        for _ in range(2):
            updates, state = optimizer.update(jax.tree.map(lambda x: x**3, theta), state, theta)
            theta = optax.apply_updates(theta, updates)
        return (theta["a"] ** 2).sum()

    with enable_x64(True):
        slope = jax.jit(jax.grad(after))(0.01)
        around = (after(0.01 + 1e-6) - after(0.01 - 1e-6)) / 2e-6
        # Neither m = 0 at the first step nor a gradient of 0 makes it a nan.
        assert float(slope) == pytest.approx(float(around), rel=1e-6) and slope != 0


def test_the_derivative_where_all_gradients_are_zero() -> None:
    torque = tam.optax.scale_by_torque(max_grad_norm=1.0)
    slope = jax.grad(lambda g: torque.update(g, torque.init(g))[0].sum())(jnp.zeros(7))
    np.testing.assert_allclose(slope, 0.5)  # m = d g


def test_training() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 4)), jnp.float32)
    y = x @ jnp.arange(4.0) + 1.0

    def loss(params: Any) -> Any:
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    for optimizer in (tam.optax.tam(0.1), tam.optax.adatam(0.01), tam.optax.adatamw(0.01, weight_decay=1e-4)):
        params = {"w": jnp.zeros(4), "b": jnp.zeros(())}

        @jax.jit
        def step(params: Any, state: Any, optimizer: Any = optimizer) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        state, first = optimizer.init(params), float(loss(params))
        for _ in range(200):
            params, state = step(params, state)
        assert float(loss(params)) < 1e-3 * first
        assert -1 <= float(alignment(state)) <= 1


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("tam", {"scope": "group"}, 'scope must be "global" or "tensor", got "group"'),
    ("tam", {"learning_rate": -0.1}, r"learning_rate must be .*got -0.1"),
    ("tam", {"learning_rate": "0.1"}, r'learning_rate must be .*got "0.1"'),
    ("tam", {"momentum": 1.0}, r"momentum must be .*got 1.0"),
    ("tam", {"momentum": lambda t: 0.9}, r"momentum must be .*got <function"),
    ("tam", {"smoothing": 1.5}, r"smoothing must be .*got 1.5"),
    ("tam", {"floor": float("nan")}, r"floor must be .*got nan"),
    ("tam", {"max_grad_norm": -1.0}, r"max_grad_norm must be .*got -1.0"),
    ("adatam", {"b1": 1.0}, r"b1 must be .*got 1.0"),
    ("adatam", {"b2": -0.1}, r"b2 must be .*got -0.1"),
    ("adatam", {"eps": -1e-8}, r"eps must be .*got -1e-08"),
    ("adatam", {"ema": 1}, r"ema must be .*got 1"),
    ("adatam", {"bias_correction": 1}, r"bias_correction must be .*got 1"),
    ("tam", {"gain": float("nan")}, "gain"),
    ("adatamw", {"gain": -float("inf")}, "gain"),
    ("tam", {"accumulator_dtype": "int32"}, "accumulator_dtype"),
    ("adatam", {"mu_dtype": bool}, "mu_dtype"),
    ("adatamw", {"weight_decay": -1.0}, r"weight_decay must be .*got -1.0"),
    ("adatamw", {"scope": "layer"}, r'scope must be .*got "layer"'),
    ("scale_by_torque", {"weight_decay": "1"}, r'weight_decay must be .*got "1"'),
]


@pytest.mark.parametrize("name, options, match", BAD)
def test_bad_options(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        getattr(tam.optax, name)(**options)


@pytest.mark.parametrize("gain", ["1", None, True])
def test_a_gain_that_is_no_number(gain: Any) -> None:
    with pytest.raises(TypeError, match="gain"):
        tam.optax.scale_by_torque(gain=gain)


@pytest.mark.parametrize("name", PAIRS)
def test_weight_decay_needs_the_parameters(name: str) -> None:
    grads = jnp.ones(2)
    for decay in (0.1, lambda count: 0.1):
        optimizer = getattr(tam.optax, name)(1e-4, weight_decay=decay)
        with pytest.raises(ValueError, match=r"weight_decay .* params"):
            optimizer.update(grads, optimizer.init(grads))


@pytest.mark.parametrize("name", ["tam", "adatam"])
def test_an_injected_weight_decay_of_zero_needs_no_parameters(name: str) -> None:
    params, grads = numbers(steps=1)
    factory = getattr(tam.optax, name)
    optimizer = optax.inject_hyperparams(factory)(learning_rate=1e-4)
    updates, _ = optimizer.update(grads[0], optimizer.init(params))
    expected, _ = factory(1e-4).update(grads[0], factory(1e-4).init(params))
    close(updates["w"], expected["w"], 1e-4)  # b2 = 0.999 is a float32 there
    injected = optax.inject_hyperparams(factory)(learning_rate=1e-4, weight_decay=0.1)
    with pytest.raises(ValueError, match="weight_decay"):
        injected.update(grads[0], injected.init(params))


def test_beta2_of_zero() -> None:
    optimizer = tam.optax.adatam(1.0, b2=0.0, bias_correction=True)
    updates, _ = optimizer.update(jnp.full(2, 3.0), optimizer.init(jnp.ones(2)))
    np.testing.assert_allclose(updates, -0.5, rtol=1e-6)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"tam.optax needs .*pip install '\.\[jax\]'"):
        runpy.run_path(str(tam.optax.__file__))


def test_checkpoints_name_the_state_by_the_public_module() -> None:
    state = tam.optax.scale_by_torque().init(jnp.ones(2))
    assert b"tam.optax" in pickle.dumps(state) and b"transforms" not in pickle.dumps(state)
    assert type(pickle.loads(pickle.dumps(state))) is tam.optax.TAMState
