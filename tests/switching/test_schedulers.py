"""Schedulers across a hand-over, against the lr the old one would have set, times the factor."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

import tam
from tests.helpers import parameters, train

pytestmark = [
    pytest.mark.filterwarnings("error:.*before `optimizer.step", "error:.*has been overridden after"),
    pytest.mark.filterwarnings("error:a scheduler sets"),
]

STEPS = 14
RATES = (0.1, 0.04)  # of the two groups

SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: LambdaLR(o, [lambda t: 0.9**t, lambda t: (t + 1) / 20]),
    "LambdaLR from 0": lambda o: LambdaLR(o, lambda t: t / 10),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: MultiStepLR(o, [2, 8]),
    "ConstantLR": lambda o: ConstantLR(o, 0.5, 8),
    "LinearLR": lambda o: LinearLR(o, 0.1, total_iters=9),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 8, eta_min=1e-2),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 4, 2, eta_min=1e-2),
    "CyclicLR": lambda o: CyclicLR(o, [0.01, 0.02], [0.1, 0.3], 3, cycle_momentum=False),
    "CyclicLR with momentum": lambda o: CyclicLR(o, 0.01, 0.1, 3, mode="triangular2"),
    "OneCycleLR": lambda o: OneCycleLR(o, [0.3, 0.1], total_steps=20, cycle_momentum=False),
    "OneCycleLR with momentum": lambda o: OneCycleLR(o, 0.3, total_steps=20),
    "OneCycleLR in three phases": lambda o: OneCycleLR(o, 0.3, total_steps=20, three_phase=True),
    "SequentialLR": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 7, eta_min=1e-3)], [8]
    ),
    "SequentialLR of OneCycleLR": lambda o: SequentialLR(
        o, [OneCycleLR(o, 0.3, total_steps=20), ExponentialLR(o, 0.5)], [9]
    ),
    "ChainedScheduler": lambda o: ChainedScheduler([ConstantLR(o, 0.5, 8), ExponentialLR(o, 0.8)]),
    "SWALR": lambda o: SWALR(o, [0.02, 0.2], anneal_epochs=8),
    # With this eps group 0 stops at 0.0125, before its min_lr, and group 1 at its min_lr.
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(
        o, factor=0.5, patience=0, eps=8e-3, min_lr=[1e-3, 0.015]
    ),
}
CYCLES = [name for name in SCHEDULERS if "momentum" in name or "phases" in name or "of OneCycle" in name]

PAIRS: dict[str, tuple[type[Optimizer], type[Optimizer]]] = {
    "SGD and TAM": (SGD, tam.TAM),
    "AdamW and AdaTAMW": (AdamW, tam.AdaTAMW),
}


def make(cls: type[Optimizer], **options: Any) -> Optimizer:
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters([(3,), (2,)]), RATES, strict=True)]
    return cls(groups, **({"momentum": 0.9} if cls is SGD else {}) | options)  # type: ignore[call-arg]


def move(scheduler: LRScheduler) -> None:
    """One step of the scheduler; a metric that never improves makes ReduceLROnPlateau reduce every time."""
    scheduler.step(*[1.0] if isinstance(scheduler, ReduceLROnPlateau) else [])


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def momenta(optimizer: Optimizer) -> list[float]:
    return [g["betas"][0] if "betas" in g else g["momentum"] for g in optimizer.param_groups]


def truth(cls: type[Optimizer], build: Callable[[Optimizer], LRScheduler]) -> list[tuple[Any, Any]]:
    """The lr and the momentum of each group at each step, without any hand-over."""
    optimizer = make(cls)
    scheduler = build(optimizer)
    found = []
    for t in range(STEPS):
        train(optimizer, 1, start=t)
        found.append((rates(optimizer), momenta(optimizer)))
        move(scheduler)
    return found


def factors(to: type[Optimizer], momentum: list[float]) -> list[float]:
    """What lr is multiplied by on the way to ours: 2, or 2 (1 - beta1) from Adam."""
    return [2.0 if to is tam.TAM else 2 * (1 - beta) for beta in momentum]


@pytest.mark.parametrize("there, back", [(0, 5), (6, 11)])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_lr_goes_on_times_the_factor(name: str, pair: str, there: int, back: int) -> None:
    """To our optimizer after one step, back after another; both between optimizer's and scheduler's step."""
    build, (theirs, ours) = SCHEDULERS[name], PAIRS[pair]
    expected = truth(theirs, build)
    optimizer = make(theirs)
    scheduler = build(optimizer)
    factor = [1.0, 1.0]
    for t in range(STEPS):
        train(optimizer, 1, start=t)
        lr, momentum = expected[t]
        assert rates(optimizer) == pytest.approx([x * f for x, f in zip(lr, factor, strict=True)], rel=1e-9)
        assert momenta(optimizer) == pytest.approx(momentum)
        if t == there:
            optimizer = tam.handover(optimizer, ours, scheduler=scheduler)
            factor = factors(ours, momentum)
        if t == back:
            optimizer = tam.handover(optimizer, theirs, scheduler=scheduler)
            factor = [f / g for f, g in zip(factor, factors(ours, momentum), strict=True)]
        assert scheduler.optimizer is optimizer
        assert scheduler.get_last_lr() == rates(optimizer)
        move(scheduler)
        assert scheduler.get_last_lr() == rates(optimizer)
    assert type(optimizer) is theirs and (name in CYCLES) == (len({m[0] for _, m in expected}) > 1)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_went_over_can_be_saved_and_loaded(name: str) -> None:
    build = SCHEDULERS[name]
    optimizer = make(SGD)
    scheduler = build(optimizer)
    for t in range(4):
        train(optimizer, 1, start=t)
        move(scheduler)
    optimizer = tam.TAM.from_sgd(optimizer, scheduler=scheduler)
    train(optimizer, 1)
    move(scheduler)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    state, scheduler_state = torch.load(file, weights_only=False)
    again = make(tam.TAM)
    again_scheduler = build(again)
    again.load_state_dict(state)
    again_scheduler.load_state_dict(scheduler_state)
    for t in range(8):
        for one, its_scheduler in ((optimizer, scheduler), (again, again_scheduler)):
            train(one, 1, start=t)
            move(its_scheduler)
        assert rates(again) == rates(optimizer) and momenta(again) == momenta(optimizer)


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "SequentialLR"])
def test_before_the_first_step(name: str) -> None:
    expected = truth(SGD, SCHEDULERS[name])
    sgd = make(SGD)
    scheduler = SCHEDULERS[name](sgd)
    optimizer = tam.TAM.from_sgd(sgd, scheduler=scheduler)
    for t in range(STEPS):
        assert rates(optimizer) == pytest.approx([2 * x for x in expected[t][0]], rel=1e-9)
        train(optimizer, 1, start=t)
        move(scheduler)


def test_a_scheduler_that_steps_before_the_new_optimizer_is_still_warned_of() -> None:
    sgd = make(SGD)
    scheduler = StepLR(sgd, 3)
    tam.TAM.from_sgd(sgd, scheduler=scheduler)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


def test_several_schedulers_of_one_optimizer() -> None:
    sgd = make(SGD)
    schedulers = [LinearLR(sgd, 0.1, total_iters=5), ReduceLROnPlateau(sgd, patience=0, factor=0.5)]
    optimizer = tam.TAM.from_sgd(sgd, scheduler=schedulers)
    for scheduler in schedulers:
        train(optimizer, 1)
        move(scheduler)
    # LinearLR goes from 0.1 to 0.28 of the lr; the first metric ReduceLROnPlateau sees is its best.
    assert rates(optimizer) == pytest.approx([2 * 0.28 * lr for lr in RATES])
    move(schedulers[1])
    assert rates(optimizer) == pytest.approx([0.28 * lr for lr in RATES])
    assert rates(sgd) == pytest.approx([0.1 * lr for lr in RATES])


def test_a_group_that_is_added_later_has_the_converted_min_lr() -> None:
    sgd = make(SGD)
    scheduler = ReduceLROnPlateau(sgd, patience=0, factor=0.1, min_lr=0.03)
    optimizer = tam.TAM.from_sgd(sgd, scheduler=scheduler)
    optimizer.add_param_group({"params": parameters([(4,)]), "lr": 0.5})
    for _ in range(3):
        move(scheduler)
    assert rates(optimizer) == pytest.approx([0.06, 0.06, 0.06])


def test_groups_with_factors_of_their_own() -> None:
    """2 (1 - beta1), in what a scheduler keeps for each group."""
    first, second = parameters([(3,), (2,)])
    adam = Adam([{"params": [first], "betas": (0.9, 0.99)}, {"params": [second], "betas": (0.5, 0.99)}])
    scheduler = OneCycleLR(adam, [0.1, 0.2], total_steps=10, cycle_momentum=False)
    before = rates(adam)
    optimizer = tam.AdaTAM.from_adam(adam, scheduler=scheduler)
    assert rates(optimizer) == pytest.approx([0.2 * before[0], before[1]])
    while scheduler.last_epoch < 2:  # the peak
        train(optimizer, 1)
        scheduler.step()
    assert rates(optimizer) == pytest.approx([0.02, 0.2])


# ---------------------------------------------------------------------- a given lr


def test_a_given_lr_sets_the_factor() -> None:
    sgd = make(SGD)
    scheduler = ExponentialLR(sgd, 0.5)
    train(sgd, 1)
    scheduler.step()
    optimizer = tam.handover(sgd, Adam, lr=1e-3, scheduler=scheduler)
    assert rates(optimizer) == [1e-3, 1e-3]
    train(optimizer, 1)
    scheduler.step()
    assert rates(optimizer) == pytest.approx([5e-4, 5e-4])
    assert scheduler.base_lrs == pytest.approx([2e-3, 2e-3])  # 0.1 and 0.04 by factors of 0.02 and 0.05
    assert [group["initial_lr"] for group in optimizer.param_groups] == pytest.approx([2e-3, 2e-3])


def test_an_lr_of_0_stays_and_the_given_one_is_the_base() -> None:
    adamw = make(AdamW, weight_decay=0.1)
    scheduler = LambdaLR(adamw, lambda t: t / 4)
    optimizer = tam.AdaTAMW.from_adam(adamw, lr=1e-3, scheduler=scheduler)
    assert rates(optimizer) == [0.0, 0.0]
    for t in range(1, 5):
        train(optimizer, 1)
        scheduler.step()
        assert rates(optimizer) == pytest.approx([1e-3 * t / 4] * 2)
    # lr times weight decay is what it would have been: 0.1 times RATES at full lr
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == pytest.approx([0.1 * lr / 1e-3 for lr in RATES])


def test_a_given_tensor_is_copied_for_each_group() -> None:
    """A scheduler multiplies the lr of each group in place: a shared tensor would be multiplied twice."""
    lr = torch.tensor(0.25)
    sgd = make(SGD)
    scheduler = ExponentialLR(sgd, 0.5)
    optimizer = tam.TAM.from_sgd(sgd, lr=lr, scheduler=scheduler)
    train(optimizer, 1)
    scheduler.step()
    assert rates(optimizer) == [0.125, 0.125] and float(lr) == 0.25


@pytest.mark.parametrize(
    "name", ["LambdaLR", "StepLR", "CosineAnnealingLR", "OneCycleLR", "ChainedScheduler"]
)
def test_lr_may_be_a_tensor(name: str) -> None:
    expected = truth(SGD, SCHEDULERS[name])
    sgd = make(SGD, foreach=False)
    for group in sgd.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    scheduler = SCHEDULERS[name](sgd)
    optimizer = tam.TAM.from_sgd(sgd, scheduler=scheduler)
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
    before = rates(sgd)
    for t in range(STEPS):
        assert rates(optimizer) == pytest.approx([2 * x for x in expected[t][0]], rel=1e-9)
        train(optimizer, 1, start=t)
        move(scheduler)
    assert rates(sgd) == before


# ---------------------------------------------------------------------- what is refused


class Mine(LambdaLR):
    """May keep anything."""


def of_two(build: Callable[[Optimizer], Any]) -> tuple[Optimizer, Any]:
    optimizer = make(AdamW)
    optimizer.param_groups[1]["betas"] = (0.5, 0.999)
    return optimizer, build(optimizer)


@pytest.mark.parametrize(
    "build, options, error, message",
    [
        (lambda o: StepLR(make(SGD), 3), {}, ValueError, "this StepLR holds another one, a SGD"),
        (lambda o: 3, {}, TypeError, "scheduler must be a torch LRScheduler or a list of them, got a int"),
        (lambda o: [StepLR(o, 3), None], {}, TypeError, "got a NoneType"),
        (lambda o: Mine(o, lambda t: 1.0), {}, ValueError, r"got a Mine.*scheduler=\[\]"),
        (
            lambda o: SequentialLR(o, [StepLR(o, 3), Mine(o, lambda t: 1.0)], [5]),
            {},
            ValueError,
            "got a Mine",
        ),
        (
            lambda o: CosineAnnealingLR(o, 9, eta_min=0.01),
            {},
            ValueError,
            r"eta_min=0.01 for all groups, .* by 0.2, 1: set scheduler.eta_min = 0, or make",
        ),
        (
            lambda o: OneCycleLR(o, 0.1, total_steps=9),
            {"betas": (0.8, 0.99)},
            ValueError,
            r"cycles the momentum, so group 0 must keep betas=\(0.95, 0.999\), got \(0.8, 0.99\)",
        ),
        (
            lambda o: CyclicLR(o, 0.1, 0.2),
            {"to": tam.TAM, "lr": 0.1, "weight_decay": 0.0},
            ValueError,
            r"cycles the momentum, .* got None: .* scheduler.cycle_momentum = False",
        ),
        (lambda o: StepLR(o, 3), {"lr": 0.0}, ValueError, "no factor leads from lr=0.1 to lr=0.0"),
        (lambda o: StepLR(o, 3), {"lr": torch.tensor(0.1, device="meta")}, ValueError, "lies on a device"),
        (lambda o: StepLR(o, 3), {"smoothing": 2.0}, ValueError, "smoothing"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_changes(
    build: Callable[[Optimizer], Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    optimizer, scheduler = of_two(build)
    groups = copy.deepcopy(optimizer.param_groups)
    kept = scheduler.state_dict() if isinstance(scheduler, LRScheduler) else None
    holder = getattr(scheduler, "optimizer", None)
    with pytest.raises(error, match=message):
        tam.handover(optimizer, **{"to": tam.AdaTAMW, "scheduler": scheduler, **options})
    assert [{**g, "params": 0} for g in optimizer.param_groups] == [{**g, "params": 0} for g in groups]
    assert getattr(scheduler, "optimizer", None) is holder
    assert kept is None or scheduler.state_dict() == kept


def test_the_least_change_of_a_plateau_scheduler_goes_by_the_smallest_factor() -> None:
    optimizer, scheduler = of_two(ReduceLROnPlateau)
    tam.handover(optimizer, tam.AdaTAMW, scheduler=scheduler)  # the lrs of its groups times 0.2 and 1
    assert scheduler.eps == pytest.approx(0.2e-8)


def test_the_ways_out_of_what_is_refused() -> None:
    optimizer, scheduler = of_two(lambda o: CosineAnnealingLR(o, 9, eta_min=0.01))
    scheduler.eta_min = 0
    assert scheduler.optimizer is not tam.handover(optimizer, tam.AdaTAMW, scheduler=[])
    assert tam.handover(optimizer, tam.AdaTAMW, scheduler=scheduler) is scheduler.optimizer
    optimizer, scheduler = of_two(lambda o: OneCycleLR(o, 0.1, total_steps=9))
    scheduler.cycle_momentum = False
    new = tam.handover(optimizer, tam.AdaTAMW, scheduler=scheduler, betas=(0.8, 0.99))
    train(new, 1)
    scheduler.step()
    assert momenta(new) == [0.8, 0.8]


# ---------------------------------------------------------------------- the warning


def test_a_scheduler_that_stays_behind_is_warned_of_once() -> None:
    sgd = make(SGD)
    scheduler = StepLR(sgd, 1, 0.5)
    for hand_over in (lambda: tam.TAM.from_sgd(sgd), lambda: tam.handover(sgd, tam.TAM)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = hand_over()
        (warning,) = caught
        assert warning.category is UserWarning and warning.filename == __file__
        assert "give scheduler=" in str(warning.message) and "SGD" in str(warning.message)
        train(optimizer, 1)
        train(sgd, 1)
        scheduler.step()
        assert scheduler.optimizer is sgd


def test_no_warning_without_a_scheduler_or_where_it_is_spoken_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tam.TAM.from_sgd(make(SGD))
        sgd = make(SGD)
        scheduler = StepLR(sgd, 1, 0.5)
        assert "scheduler: stays behind" in repr(tam.explain_handover(sgd, tam.TAM))
        tam.TAM.from_sgd(sgd, scheduler=[])
        plan = tam.explain_handover(sgd, tam.TAM, scheduler=scheduler)
        assert "scheduler: StepLR re-attached" in repr(plan)
        assert scheduler.optimizer is sgd
        tam.TAM.from_sgd(sgd, scheduler=scheduler)
