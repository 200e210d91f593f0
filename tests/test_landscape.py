"""Interpolation and barriers, against figures worked out by hand."""

from __future__ import annotations

import copy
import doctest
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tam
from tam.landscape import Barrier, barrier, interpolate

INF, NAN = math.inf, math.nan


class Point(nn.Module):
    """A model of one number, which is its own input to a loss."""

    def __init__(self, x: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(x, dtype=torch.float64))


def walk(
    loss: Callable[[Any], Any], left: float, right: float, points: Any = 11, baseline: str = "mean"
) -> Barrier:
    """The barrier of a loss of one number between two of them."""
    return barrier(Point(left), Point(right), lambda m: loss(m.x), points=points, baseline=baseline)


def table(*losses: float, baseline: str = "mean") -> Barrier:
    """The barrier for given losses at equally spaced points."""
    left = iter(losses)
    return barrier(Point(0), Point(1), lambda _: next(left), points=len(losses), baseline=baseline)


def square(x: Tensor) -> Tensor:
    return x * x


def wells(x: Tensor) -> Tensor:
    return (x * x - 1) ** 2


def network(seed: int, *extra: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), *extra, nn.Linear(4, 2))


def inputs(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> list[Any]:
    """Tells 0 from -0."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(a: Any, b: Any) -> None:
    """Two modules or state dicts, to the bit."""
    a, b = (m.state_dict() if isinstance(m, nn.Module) else m for m in (a, b))
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and bits(a[name]) == bits(b[name]), name


# ------------------------------------------------------------------ barriers


@pytest.mark.parametrize("baseline", ["mean", "linear"])
def test_the_double_well_has_a_barrier_of_one(baseline: str) -> None:
    found = walk(wells, -1, 1, baseline=baseline)
    assert (found.height, found.t, found.baseline) == (1.0, 0.5, baseline)
    assert found.ts == tuple(i / 10 for i in range(11))
    expected = [(x * x - 1) ** 2 for x in (2 * t - 1 for t in found.ts)]
    assert found.losses == pytest.approx(expected, abs=1e-15)
    assert all(isinstance(x, float) for x in (found.height, found.t, *found.ts, *found.losses))


@pytest.mark.parametrize("baseline", ["mean", "linear"])
def test_a_convex_loss_has_none(baseline: str) -> None:
    found = walk(square, -1, 1, baseline=baseline)
    assert (found.height, found.t) == (0.0, 0.0)


def test_the_baselines_differ_where_the_ends_do() -> None:
    # L = x^2 from 0 to 2: L(t) = 4 t^2. The mean of 0 and 4 is 2, so the worse end is 2 above it; the line is
    # 4 t, and 4 t^2 - 4 t is nowhere positive.
    found = walk(square, 0, 2)
    assert (found.height, found.t) == (2.0, 1.0)
    assert found.losses == pytest.approx([4 * t * t for t in found.ts])
    found = walk(square, 0, 2, baseline="linear")
    assert (found.height, found.t) == (0.0, 0.0)


def test_an_asymmetric_bump_by_hand() -> None:
    # L: 1, 6, 5, 3, 3. Mean of the ends 2: 6 - 2 = 4. Line 1, 1.5, 2, 2.5, 3: 6 - 1.5 = 4.5.
    assert table(1, 6, 5, 3, 3) == Barrier(4.0, 0.25, (0, 0.25, 0.5, 0.75, 1), (1, 6, 5, 3, 3), "mean")
    assert table(1, 6, 5, 3, 3, baseline="linear").height == 4.5
    # L: 1, 4, 3, 3, 5. Mean 3: the worse end, 2, is above the bump, 1. Line 1, 2, 3, 4, 5: 4 - 2 = 2.
    assert (table(1, 4, 3, 3, 5).height, table(1, 4, 3, 3, 5).t) == (2.0, 1.0)
    found = table(1, 4, 3, 3, 5, baseline="linear")
    assert (found.height, found.t) == (2.0, 0.25)


def test_the_two_ends_alone() -> None:
    assert table(1, 4).height == 1.5
    assert table(1, 4, baseline="linear").height == 0.0


@pytest.mark.parametrize("loss", [0.05, 0.1, 0.7, 1e308, -1e308])
def test_a_constant_loss_has_no_barrier_to_the_bit(loss: float) -> None:
    for baseline in ("mean", "linear"):
        assert table(*[loss] * 11, baseline=baseline).height == 0.0


def test_given_points_get_the_ends_and_an_order() -> None:
    found = walk(wells, -1, 1, points=[0.75, 0.5, 0.5])
    assert found.ts == (0.0, 0.5, 0.75, 1.0)
    assert (found.height, found.t) == (1.0, 0.5)
    assert walk(wells, -1, 1, points=()).ts == (0.0, 1.0)
    assert walk(wells, -1, 1, points=torch.linspace(0, 1, 3)).ts == (0.0, 0.5, 1.0)
    assert walk(wells, -1, 1, points=(t for t in (0.25,))).ts == (0.0, 0.25, 1.0)


@pytest.mark.parametrize(
    ("losses", "height", "t"),
    [
        ((1, INF, 2, 1), INF, 1 / 3),
        ((1, 5, NAN, 1), NAN, 2 / 3),
        ((1, INF, NAN, 1), NAN, 2 / 3),
        ((1, -INF, 5, 1), NAN, 1 / 3),
        ((INF, 1, 1, 1), NAN, 0.0),
        ((INF, 1, 1, INF), NAN, 0.0),
        ((NAN, 1, 1, 1), NAN, 0.0),
        ((-INF, 1, 1, 1), NAN, 0.0),
    ],
)
@pytest.mark.parametrize("baseline", ["mean", "linear"])
def test_what_is_not_finite_shows(losses: Any, height: float, t: float, baseline: str) -> None:
    found = table(*losses, baseline=baseline)
    assert found.height == height or (math.isnan(height) and math.isnan(found.height))
    assert found.t == t
    assert repr(found.losses) == repr(tuple(float(x) for x in losses))


def test_an_infinite_last_loss() -> None:
    for baseline in ("mean", "linear"):
        assert math.isnan(table(1, 1, 1, INF, baseline=baseline).height)


def test_evaluate_gets_a_fresh_copy_without_gradients() -> None:
    a, b, seen = Point(-1), Point(1), []

    def evaluate(model: Point) -> Tensor:
        assert not torch.is_grad_enabled() and model is not a and model is not b
        seen.append(float(model.x))
        model.x.fill_(100.0)
        return model.x

    barrier(a, b, evaluate, points=3)
    assert seen == [-1, 0, 1] and (a.x.item(), b.x.item()) == (-1, 1)
    assert torch.is_grad_enabled()


def test_state_dicts_are_evaluated_as_such() -> None:
    a, b = {"x": torch.tensor(-1.0)}, {"x": torch.tensor(1.0)}
    assert barrier(a, b, lambda state: wells(state["x"])).height == 1.0


def test_what_evaluate_may_return() -> None:
    for value in (1, 1.0, torch.tensor(1.0), torch.tensor(1), torch.tensor(1.0, requires_grad=True)):
        assert barrier(Point(0), Point(1), lambda _, value=value: value).losses == (1.0,) * 11


def train(model: nn.Module, orders: list[Tensor], x: Tensor, y: Tensor) -> nn.Module:
    optimizer = tam.TAM(model.parameters(), lr=0.2)
    for order in orders:
        for batch in order.split(16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model


def test_copies_spawned_late_are_connected_and_independent_models_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 2, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()

    def orders(n: int) -> list[Tensor]:
        return [torch.randperm(len(x), generator=generator) for _ in range(n)]

    def mlp(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    spawn = train(mlp(0), orders(10), x, y)
    copies = [train(copy.deepcopy(spawn), orders(10), x, y) for _ in range(2)]
    apart = [train(mlp(seed), orders(20), x, y) for seed in (1, 2)]
    near, far = (barrier(*pair, loss, baseline="linear") for pair in (copies, apart))
    assert max(near.losses[0], near.losses[-1], far.losses[0], far.losses[-1]) < 0.15
    assert near.height < 0.01 and far.height > 0.2
    # The ends are what the trained models themselves give.
    assert near.losses[:: len(near.losses) - 1] == pytest.approx([loss(model).item() for model in copies])


# ------------------------------------------------------------------ interpolation


def test_the_ends_are_the_models_to_the_bit() -> None:
    a, b = network(0), network(1)
    awkward = torch.tensor([0.0, -0.0, INF, -INF, 1e-45, 3e38])
    for model, values in ((a, awkward), (b, awkward.flip(0))):
        model.register_buffer("awkward", values.clone())
        model.register_buffer("narrow", values.bfloat16())
        model.register_buffer("complex", torch.complex(values, -values))
        model(inputs(5))
    a(inputs(5))
    assert_same(interpolate(a, b, 0), a)
    assert_same(interpolate(a, b, 1), b)
    assert_same(interpolate(a.state_dict(), b.state_dict(), 0.0), a)
    assert_same(interpolate(a.state_dict(), b.state_dict(), 1.0), b)


@pytest.mark.parametrize("t", [-1.0, 0.25, 0.5, 0.9, 2.0])
def test_between_and_beyond(t: float) -> None:
    a, b = network(0), network(1)
    for model, n in ((a, 1), (b, 3)):
        for _ in range(n):
            model(inputs(5, seed=n))
    before = copy.deepcopy((a, b))
    mixed, state = interpolate(a, b, t), interpolate(a.state_dict(), b.state_dict(), t)
    assert_same(mixed, state)
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        if name == "1.num_batches_tracked":
            assert int(state[name]) == (1 if t <= 0.5 else 3)
        else:
            torch.testing.assert_close(state[name], (1 - t) * x + t * y)
    assert_same(a, before[0])
    assert_same(b, before[1])
    mine = {x.data_ptr() for model in (a, b) for x in model.state_dict().values()}
    assert not mine & {x.data_ptr() for x in (*mixed.state_dict().values(), *state.values())}


def test_equal_entries_stay_equal() -> None:
    mask = torch.full((3, 3), -INF).triu(1)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for t in (-1.0, 0.3, 0.7, 2.0):
        found = interpolate({"mask": mask, "x": x}, {"mask": mask.clone(), "x": x.clone()}, t)
        assert torch.equal(found["mask"], mask) and torch.equal(found["x"], x)


def test_infinities_and_large_values_do_not_become_nan() -> None:
    a, b = torch.tensor([INF, 1.0, 3e38, -3e38]), torch.tensor([1.0, -INF, -3e38, 3e38])
    assert interpolate({"x": a}, {"x": b}, 0.5)["x"].tolist() == [INF, -INF, 0, 0]
    z = interpolate({"x": torch.complex(a, b)}, {"x": torch.complex(b, a)}, 0.5)["x"]
    assert z.real.tolist() == [INF, -INF, 0, 0] and not z.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1000, generator=generator).to(dtype) for _ in range(2))
    found = interpolate({"x": a}, {"x": b}, 0.3)["x"]
    exact = 0.7 * a.double() + 0.3 * b.double()
    # Half a unit in the last place is the least error a rounding can have; twice rounded it would be more.
    unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().log2().floor()
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= unit * (0.5 + 1e-3)).all()


def test_integers_bools_and_complex_numbers() -> None:
    a = {
        "i": torch.tensor([1, 2]),
        "b": torch.tensor(True),
        "z": torch.tensor([1 + 2j, 3j]),
        "e": torch.ones(0),
    }
    b = {
        "i": torch.tensor([5, 6]),
        "b": torch.tensor(False),
        "z": torch.tensor([3 - 2j, 1.0]),
        "e": torch.ones(0),
    }
    for t, end in ((0.25, a), (0.5, a), (0.51, b), (-3, a), (3, b)):
        found = interpolate(a, b, t)
        assert torch.equal(found["i"], end["i"]) and torch.equal(found["b"], end["b"])
        torch.testing.assert_close(found["z"], (1 - t) * a["z"] + t * b["z"])


def test_buffers_outside_the_state_dict_are_interpolated() -> None:
    a, b = nn.Module(), nn.Module()
    a.register_buffer("scale", torch.zeros(2).expand(3, 2), persistent=False)  # memory that overlaps itself
    b.register_buffer("scale", torch.ones(2).expand(3, 2), persistent=False)
    assert torch.equal(interpolate(a, b, 0.25).scale, torch.full((3, 2), 0.25))


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_tied_parameters_stay_tied() -> None:
    torch.manual_seed(0)
    a, b = Tied(), Tied()
    found = interpolate(a, b, 0.5)
    assert found.head.weight is found.embed.weight
    torch.testing.assert_close(found.head.weight, (a.embed.weight + b.embed.weight) / 2)
    state = interpolate(a.state_dict(), b.state_dict(), 0.5)
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert_same(found, state)
    # One parameter of a cannot become two of b; two of a may come from one of b.
    with pytest.raises(
        ValueError, match=r"'embed\.weight' and 'head\.weight' are one tensor in a, but not in b"
    ):
        interpolate(a, Tied(tie=False), 0.5)
    assert torch.equal(interpolate(Tied(tie=False), b, 1).head.weight, b.head.weight)
    state = interpolate(a.state_dict(), Tied(tie=False).state_dict(), 0.5)
    assert not torch.equal(state["embed.weight"], state["head.weight"])


def test_a_module_keeps_the_modes_and_flags_of_a_and_no_gradients() -> None:
    a, b = network(0, nn.Dropout()), network(1, nn.Dropout()).eval()
    a[1].eval()
    a[0].weight.requires_grad_(False)
    a(inputs(4)).sum().backward()
    found = interpolate(a, b, 0.5)
    assert [m.training for m in found.modules()] == [m.training for m in a.modules()]
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in a.parameters()]
    assert all(p.grad is None for p in found.parameters())
    found(inputs(4)).sum().backward()  # its parameters are leaves


def test_a_state_dict_keeps_its_form() -> None:
    a, b = network(0).state_dict(), network(1).state_dict()
    found = interpolate(a, b, 0.5)
    assert isinstance(found, OrderedDict) and found._metadata == a._metadata
    network(2).load_state_dict(found)
    parameters = dict(network(0).named_parameters())
    assert not any(x.requires_grad for x in interpolate(parameters, parameters, 0.5).values())
    extra = interpolate({**a, "1._extra_state": "left"}, {**b, "1._extra_state": "right"}, 1)
    assert extra["1._extra_state"] == "left"


def test_no_random_numbers_are_drawn() -> None:
    a, b = network(0, nn.Dropout()), network(1, nn.Dropout())
    state = torch.get_rng_state()
    barrier(a, b, lambda _: 0.0, batches=[inputs(5)])
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------ batch-norm statistics


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_statistics_are_those_of_the_features(t: float) -> None:
    a, b = network(0, nn.Dropout()), network(1, nn.Dropout())
    a[1].running_mean.fill_(NAN)  # what was there before has no part in it
    a[1].momentum, a[1].eps = 0.3, 1e-2
    a.eval()
    a[2].train()
    batches = [inputs(8, seed) for seed in range(3)]
    found = interpolate(a, b, t, batches=batches)
    weight, bias = ((1 - t) * x + t * y for x, y in zip(a[0].parameters(), b[0].parameters(), strict=True))
    features = [x @ weight.T + bias for x in batches]
    torch.testing.assert_close(found[1].running_mean, torch.cat(features).mean(0))
    torch.testing.assert_close(found[1].running_var, torch.stack([f.var(0) for f in features]).mean(0))
    assert int(found[1].num_batches_tracked) == 3
    assert found[1].momentum == 0.3 and not found[1].running_mean.requires_grad
    assert [m.training for m in found.modules()] == [m.training for m in a.modules()]
    torch.testing.assert_close(found[3].weight, (1 - t) * a[3].weight + t * b[3].weight)


def test_the_forms_of_a_batch() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, affine=False)

        def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
            assert not torch.is_grad_enabled() and not self.training
            return self.norm(x + shift)

    model, x = Keywords(), inputs(8)
    for batch in (x, (x, "label"), [x], {"x": x}, {"x": x - 1, "shift": 1.0}):
        norm = interpolate(model, model, 0.5, batches=[batch]).norm
        torch.testing.assert_close(norm.running_mean, x.mean(0))
    once = interpolate(model, model, 0.5, batches=iter([x, x + 2])).norm
    torch.testing.assert_close(once.running_mean, x.mean(0) + 1)


def test_dropout_is_off_and_later_layers_see_normalised_features() -> None:
    model, x = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3), nn.BatchNorm1d(3)), inputs(64)
    found = interpolate(model, model, 0.5, batches=[x])
    torch.testing.assert_close(found[1].running_mean, x.mean(0))
    torch.testing.assert_close(found[2].running_mean, torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(found[2].running_var, torch.full((3,), 64 / 63), atol=1e-4, rtol=0)


def test_layers_that_no_batch_reaches_keep_what_they_have() -> None:
    class Auxiliary(nn.Module):
        def __init__(self, mean: float) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.head.running_mean = torch.full((3,), mean)
            self.head.num_batches_tracked += 7

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return self.head(x) if self.training else x

    found = interpolate(Auxiliary(1.0), Auxiliary(3.0), 0.5, batches=[inputs(8)])
    assert found.head.running_mean.tolist() == [2, 2, 2] and int(found.head.num_batches_tracked) == 7
    assert found.norm.running_mean.abs().min() > 0


def test_without_statistics_batches_are_not_read() -> None:
    for model in (nn.Linear(3, 2), nn.BatchNorm1d(3, track_running_stats=False)):
        batches = iter([inputs(4)])
        interpolate(model, model, 0.5, batches=batches)
        assert len(list(batches)) == 1
        interpolate(model, model, 0.5, batches=[])


def test_a_barrier_with_statistics_estimated_anew() -> None:
    # b is a with the first layer negated: halfway the layer is 0, and so is the variance of its features.
    a, x = network(0).eval(), inputs(16)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0].weight.neg_(), b[0].bias.neg_()
    variances = []

    def evaluate(model: Any) -> float:
        variances.append(model[1].running_var.max().item())
        return model(x).square().mean().item()

    found = barrier(a, b, evaluate, points=3, batches=[x])
    assert variances[0] == pytest.approx(variances[2]) and variances[1] == 0.0
    direct = copy.deepcopy(a)
    direct[1].momentum = None
    direct[1].train()(a[0](x))
    assert found.losses[0] == pytest.approx(direct.eval()(x).square().mean().item())


# ------------------------------------------------------------------ errors


def state(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_models_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 3\) in a, \(2, 4\) in b"):
        interpolate(nn.Linear(3, 2), nn.Linear(4, 2), 0.5)
    with pytest.raises(ValueError, match=r"'weight' is torch.float32 in a, torch.float64 in b"):
        interpolate(nn.Linear(3, 2), nn.Linear(3, 2).double(), 0.5)
    with pytest.raises(ValueError, match=r"different parameters or buffers: b lacks bias$"):
        interpolate(nn.Linear(3, 2), nn.Linear(3, 2, bias=False), 0.5)
    with pytest.raises(ValueError, match=r": a lacks y; b lacks p, q, r and 2 more$"):
        interpolate(state(p=(), q=(), r=(), s=(), t=(), x=()), state(x=(), y=()), 0.5)


def test_what_is_no_model() -> None:
    model: Any = nn.Linear(3, 2)
    for a, b, kinds in (
        (model, model.state_dict(), "Linear and OrderedDict"),
        (model.state_dict(), model, "OrderedDict and Linear"),
        (list(model.parameters()), list(model.parameters()), "list and list"),
    ):
        with pytest.raises(TypeError, match=rf"two modules or two state dicts \(dict\), got {kinds}"):
            interpolate(a, b, 0.5)
        with pytest.raises(TypeError, match="two modules or two state dicts"):
            barrier(a, b, lambda _: 0.0)
    checkpoint = {"model": model.state_dict(), "epoch": 3}
    with pytest.raises(TypeError, match="got 'model', a OrderedDict"):
        interpolate(checkpoint, checkpoint, 0.5)


@pytest.mark.parametrize("t", [NAN, INF, -INF, torch.tensor(NAN)])
def test_t_is_finite(t: Any) -> None:
    with pytest.raises(ValueError, match="t must be finite, got"):
        interpolate(state(x=()), state(x=()), t)


@pytest.mark.parametrize("t", ["0.5", None, True, 1j, torch.zeros(2)])
def test_t_is_a_number(t: Any) -> None:
    with pytest.raises(TypeError, match="t must be a real number"):
        interpolate(state(x=()), state(x=()), t)
    assert interpolate({"x": torch.zeros(())}, {"x": torch.ones(())}, torch.tensor(0.5))["x"] == 0.5


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (1, ValueError, "points must be at least 2, the ends, got 1"),
        (-3, ValueError, "points must be at least 2"),
        ([0.5, 1.5], ValueError, r"points must be in \[0, 1\], got 1.5"),
        ([NAN], ValueError, r"points must be in \[0, 1\], got nan"),
        (11.0, TypeError, "points must be an integer or a sequence"),
        (["0.5"], TypeError, "a point must be a real number"),
    ],
)
def test_points(points: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        walk(wells, -1, 1, points=points)


def test_unknown_baseline() -> None:
    with pytest.raises(ValueError, match='baseline must be "mean" or "linear", got "max"'):
        walk(wells, -1, 1, baseline="max")


@pytest.mark.parametrize("value", [None, "1.0", True, 1j, torch.zeros(1), torch.tensor(1j), [1.0]])
def test_evaluate_returns_a_number(value: Any) -> None:
    with pytest.raises(
        TypeError, match="what evaluate returns must be a real number or a 0-dim tensor of one, got"
    ):
        barrier(Point(0), Point(1), lambda _: value)


def test_batches() -> None:
    a, b, x = network(0), network(1), inputs(4)
    with pytest.raises(TypeError, match="batches must be None with state dicts"):
        interpolate(a.state_dict(), b.state_dict(), 0.5, batches=[x])
    with pytest.raises(ValueError, match="batches must have at least one batch"):
        interpolate(a, b, 0.5, batches=[])
    with pytest.raises(TypeError, match="got one Tensor: put it in a list"):
        interpolate(a, b, 0.5, batches=x)
    with pytest.raises(TypeError, match="got one dict: put it in a list"):
        interpolate(a, b, 0.5, batches={"input": x})
    with pytest.raises(TypeError, match="batches must be a list or a loader, got an iterator"):
        barrier(a, b, lambda _: 0.0, batches=iter([x]))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_batch_norms_are_refused() -> None:
    model = torch.jit.script(network(0))
    assert_same(
        interpolate(model, torch.jit.script(network(1)), 0.5), interpolate(network(0), network(1), 0.5)
    )
    with pytest.raises(TypeError, match="scripted batch norm"):
        interpolate(model, model, 0.5, batches=[inputs(4)])


def test_the_examples_of_the_docstrings_run() -> None:
    results = doctest.testmod(tam.landscape)
    assert results.attempted > 0 and results.failed == 0
