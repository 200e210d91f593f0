"""How the classes are called: in torch's order, with another optimizer's options, with misspelled keys."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from typing import Any

import pytest
import torch

import tam
from tests.helpers import ALL, TORQUE, WAYS, assert_same, gradients, parameters, params_of, train

SHAPES = [(3, 5), (7,)]
THEIRS = {
    tam.TAM: (torch.optim.SGD, tam.TAM.matching_sgd),
    tam.AdaTAM: (torch.optim.Adam, tam.AdaTAM.matching_adam),
    tam.AdaTAMW: (torch.optim.AdamW, tam.AdaTAMW.matching_adamw),
}


PUBLIC = {
    "alignment", "damping", "grad_norm", "backend", "lr_family", "adaptive", "decoupled", "shard_group",
}  # fmt: skip
CONVERSIONS = {
    tam.TAM: {"matching_sgd", "from_sgd"},
    tam.AdaTAM: {"matching_adam", "from_adam"},
    tam.AdaTAMW: {"matching_adam", "from_adam", "matching_adamw"},
}


@pytest.mark.parametrize("cls", ALL)
def test_a_class_adds_few_names_to_torchs(cls: type) -> None:
    public = {name for name in dir(cls) if not name.startswith("_")} - {*dir(torch.optim.Optimizer)}
    assert public == (PUBLIC | CONVERSIONS[cls] if cls in TORQUE else {"backend", "decoupled"})


@pytest.mark.parametrize("torque", TORQUE)
def test_what_a_class_says_about_itself(torque: type) -> None:
    assert torque.lr_family == ("sgd" if torque is tam.TAM else "adam")
    assert torque.adaptive is (torque is not tam.TAM)
    assert torque.decoupled is (torque is tam.AdaTAMW)


def positional(function: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


@pytest.mark.parametrize("torque", TORQUE)
def test_a_positional_call_in_torchs_order_means_the_same_or_is_refused(torque: type) -> None:
    theirs, _ = THEIRS[torque]
    ours = positional(torque)
    assert ours == positional(theirs)[: len(ours)]


def test_torchs_calls_by_position() -> None:
    optimizer = tam.AdaTAM(parameters(SHAPES), 1e-4, (0.8, 0.99), 1e-6, 1e-2)
    (group,) = optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.99), 1e-6, 1e-2)
    assert group["smoothing"] == 0.9
    with pytest.raises(TypeError):
        tam.TAM(parameters(SHAPES), 0.1, 0.9, 0, 5e-4)  # SGD's fourth is dampening


@pytest.mark.parametrize("torque", TORQUE)
def test_matching_takes_what_the_other_takes(torque: type) -> None:
    theirs, matching = THEIRS[torque]
    known = {k: p for k, p in inspect.signature(theirs).parameters.items() if k != "decoupled_weight_decay"}
    ours = inspect.signature(matching).parameters
    for (name, mine), (their_name, their) in zip(ours.items(), known.items(), strict=False):
        assert (name, mine.kind, mine.default) == (their_name, their.kind, their.default)
    assert len(ours) == len(known) + 1  # the rest are options of ours


def test_matching_sgd_converts_the_lr_of_every_group() -> None:
    first, second = parameters(SHAPES)
    groups = [{"params": [first]}, {"params": [second], "lr": 0.3, "weight_decay": 0.5}]
    optimizer = tam.TAM.matching_sgd(groups, 0.1, 0.9, 0, 1e-4, scope="group", max_grad_norm=2.0)
    one, other = optimizer.param_groups
    assert (one["lr"], one["momentum"], one["weight_decay"]) == (0.2, 0.9, 1e-4)
    assert (other["lr"], other["weight_decay"]) == (0.6, 0.5)
    assert one["scope"] == "group" and one["max_grad_norm"] == 2.0
    assert "nesterov" not in one and "dampening" not in one


def test_matching_adamw_converts_lr_weight_decay_and_bias_correction() -> None:
    (group,) = tam.AdaTAMW.matching_adamw(parameters(SHAPES), 1e-3, (0.9, 0.95), 1e-6, 0.1).param_groups
    assert group["lr"] == pytest.approx(2e-4) and group["weight_decay"] == pytest.approx(0.5)
    assert group["betas"] == (0.9, 0.95) and group["eps"] == 1e-6 and group["bias_correction"] is True
    (group,) = tam.AdaTAM.matching_adam(parameters(SHAPES), 1e-3, weight_decay=0.1).param_groups
    assert group["lr"] == pytest.approx(2e-4) and group["weight_decay"] == 0.1


@pytest.mark.parametrize("torque", TORQUE)
def test_matching_goes_by_a_measured_alignment(torque: type) -> None:
    """A settled gradient has the weight (1 + s) / 2, so the lr is divided by 1 + s."""
    (assumed,) = THEIRS[torque][1](parameters(SHAPES), lr=0.1).param_groups
    (measured,) = THEIRS[torque][1](parameters(SHAPES), lr=0.1, alignment=torch.tensor(0.75)).param_groups
    assert measured["lr"] == pytest.approx(assumed["lr"] / 1.75)
    if torque is tam.AdaTAMW:
        assert measured["weight_decay"] == pytest.approx(assumed["weight_decay"] * 1.75)


@pytest.mark.parametrize("torque", TORQUE)
def test_with_fixed_damping_a_settled_match_takes_the_others_step(torque: type) -> None:
    """On a constant gradient, with s at 0, the settled steps are equal."""
    theirs, matching = THEIRS[torque]
    options = {"momentum": 0.9} if torque is tam.TAM else {"weight_decay": 0.0}
    (p,), (q,) = parameters([(4,)]), parameters([(4,)])
    ours, other = matching([p], lr=0.01, smoothing=1.0, **options), theirs([q], lr=0.01, **options)
    for _ in range(300):
        p.grad = q.grad = torch.tensor([1.0, -2.0, 0.5, 3.0])
        before = [x.detach().clone() for x in (p, q)]
        ours.step()
        other.step()
    steps = [x.detach() - y for x, y in zip((p, q), before, strict=True)]
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("torque", TORQUE)
def test_matching_is_silent_and_steps_with_every_backend(torque: type) -> None:
    for way in WAYS.values():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = THEIRS[torque][1](parameters(SHAPES), lr=0.1, **way)
        train(optimizer, 2)
        assert {k: optimizer.param_groups[0][k] for k in way} == way


def test_what_has_no_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot match this SGD.*: leave nesterov out$") as error:
        tam.TAM.matching_sgd(parameters(SHAPES), 0.1, 0.9, nesterov=True)
    assert "optimizer.param_groups" not in str(error.value)  # there is none yet
    with pytest.raises(ValueError, match=r"cannot match this Adam.*decoupled.*: leave weight_decay out$"):
        tam.AdaTAMW.matching_adam(parameters(SHAPES), weight_decay=0.1)
    with pytest.raises(ValueError, match="amsgrad"):
        tam.AdaTAM.matching_adam(parameters(SHAPES), amsgrad=True)
    with pytest.raises(TypeError, match="smothing"):
        tam.TAM.matching_sgd(parameters(SHAPES), smothing=0.5)


@pytest.mark.parametrize("cls", [tam.AdaTAM, tam.AdaTAMW])
def test_an_lr_of_adams_scale_warns_once_and_names_the_remedy(cls: type) -> None:
    remedy = "matching_adamw" if cls is tam.AdaTAMW else "matching_adam"
    for lr in (1e-3, torch.tensor(3e-3)):
        with pytest.warns(UserWarning, match=remedy) as caught:
            cls(parameters(SHAPES), lr=lr)
        assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(parameters(SHAPES), lr=9e-4)
        for chosen in (False, True):
            (group,) = cls(parameters(SHAPES), lr=1e-2, bias_correction=chosen).param_groups
            assert group["bias_correction"] is chosen
    (group,) = cls(parameters(SHAPES)).param_groups
    assert group["bias_correction"] is False  # the paper's rule


def momentum_option(cls: type, beta: float) -> dict[str, Any]:
    return {"momentum": beta} if cls is tam.TAM else {"betas": (beta, 0.999)}


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("beta, smoothing", [(0.99, 0.9), (0.9, 0.0), (0.9, 0.74), (0.8, 0.49), (0.99, 0.97)])
def test_a_cosine_averaged_too_briefly_for_the_momentum_warns_once(
    cls: type, beta: float, smoothing: float
) -> None:
    groups = [{"params": [p]} for p in parameters(SHAPES)]
    with pytest.warns(UserWarning, match=rf"accelerating.*Use smoothing={beta} or more") as caught:
        cls(groups, **momentum_option(cls, beta), smoothing=smoothing)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cls", TORQUE)
def test_a_cosine_averaged_long_enough_does_not_warn(cls: type) -> None:
    # 0.75 and 0.5 are 2.5 times shorter, exactly.
    usual = [(0.9, 0.9), (0.95, 0.9), (0.99, 0.99), (0.9, 0.75), (0.8, 0.5)]
    for beta, smoothing in [*usual, (0.5, 0.0), (0.0, 0.0), (0.99, 1.0)]:
        cls(parameters(SHAPES), **momentum_option(cls, beta), smoothing=smoothing)
    brief = {**momentum_option(cls, 0.99), "smoothing": 0.9}
    for gain in (0.0, -1.0, 0.25):  # 10 times shorter, with a quarter of the effect
        cls(parameters(SHAPES), **brief, gain=gain)
    if cls is not tam.TAM:
        cls(parameters(SHAPES), **brief, ema=True)  # there is no beta1


@pytest.mark.parametrize("cls", TORQUE)
def test_a_small_gain_warns_of_a_brief_average_if_it_is_brief_enough(cls: type) -> None:
    with pytest.warns(UserWarning, match="averages the cosine"):
        cls(parameters(SHAPES), **momentum_option(cls, 0.99), smoothing=0.9, gain=0.26)


@pytest.mark.parametrize("cls", TORQUE)
def test_an_added_group_warns_of_its_own_momentum_alone(cls: type) -> None:
    first, second, third, fourth = ([p] for p in parameters([(2,)] * 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = cls(first)
        optimizer.add_param_group({"params": second})
    with pytest.warns(UserWarning, match="averages the cosine") as caught:
        optimizer.add_param_group({"params": third, **momentum_option(cls, 0.99)})
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": fourth, **momentum_option(cls, 0.99)})


@pytest.mark.parametrize("matching, options", [
    (tam.TAM.matching_sgd, {"momentum": 0.99}), (tam.AdaTAM.matching_adam, {"betas": (0.99, 0.999)}),
    (tam.AdaTAMW.matching_adamw, {"betas": (0.99, 0.999)}),
])  # fmt: skip
def test_a_converted_optimizer_warns_of_a_brief_average_once(matching: Any, options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="averages the cosine") as caught:
        matching(parameters(SHAPES), **options)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("cls", TORQUE)
def test_copies_checkpoints_and_schedulers_do_not_repeat_the_warning(cls: type) -> None:
    with pytest.warns(UserWarning, match="averages the cosine"):
        brief = cls(parameters(SHAPES), **momentum_option(cls, 0.99))
    usual = cls(parameters(SHAPES))
    train(brief, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(brief)
        brief.load_state_dict(brief.state_dict())
        usual.load_state_dict(brief.state_dict())
        cycle = torch.optim.lr_scheduler.OneCycleLR(usual, 0.1, total_steps=8, max_momentum=0.99)
        for step in range(4):
            train(usual, 1, start=step)
            cycle.step()


@pytest.mark.parametrize("cls", ALL)
def test_a_misspelled_option_of_a_group_warns_once(cls: type) -> None:
    groups = [{"params": [p], "weight_decya": 0.1} for p in parameters(SHAPES)]
    with pytest.warns(UserWarning, match="weight_decya.*weight_decay") as caught:
        optimizer = cls(groups)
    assert len(caught) == 1 and caught[0].filename == __file__
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {optimizer.defaults["weight_decay"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others = ("lr_scale", "name", "initial_lr", "max_lr", "max_momentum", "base_momentum", "swa_lr")
        cls([{"params": parameters(SHAPES), **dict.fromkeys(others, 1.0)}])


@pytest.mark.parametrize("torque", TORQUE)
@pytest.mark.parametrize("gain, error", [(math.nan, ValueError), (math.inf, ValueError), ("1", TypeError),
                                         (None, TypeError), (True, TypeError)])  # fmt: skip
def test_a_gain_that_is_no_finite_number_is_refused(torque: type, gain: Any, error: type) -> None:
    with pytest.raises(error, match="gain must be a finite number"):
        torque(parameters(SHAPES), gain=gain)


@pytest.mark.parametrize("torque", TORQUE)
@pytest.mark.parametrize("way", WAYS)
def test_gain_zero_is_damping_of_one_half(torque: type, way: str) -> None:
    a = train(torque(parameters(SHAPES), gain=0.0, **WAYS[way]), 6)
    b = train(torque(parameters(SHAPES), smoothing=1.0, **WAYS[way]), 6)
    assert all(torch.equal(p, q) for p, q in zip(params_of(a), params_of(b), strict=True))
    assert float(a.damping) == 0.5 and float(a.alignment) != 0


@pytest.mark.parametrize("torque", TORQUE)
def test_a_large_gain_is_clipped(torque: type) -> None:
    (p,) = params = parameters([(50,)])
    optimizer = torque(params, gain=1e6, smoothing=0.5, floor=0.0)
    p.grad = gradients(params, 0)[0]
    optimizer.step()  # S = 0
    optimizer.step()  # along the momentum
    assert float(optimizer.damping) == 1
    p.grad = -p.grad
    optimizer.step()
    optimizer.step()
    assert float(optimizer.damping) == 0


@pytest.mark.parametrize("torque", TORQUE)
def test_a_checkpoint_without_a_gain_has_the_papers(torque: type) -> None:
    source = train(torque(parameters(SHAPES)), 3)
    saved = copy.deepcopy(source.state_dict())
    for group in saved["param_groups"]:
        del group["gain"]
    target = torque(parameters(SHAPES), gain=2.0)
    for p, q in zip(params_of(target), params_of(source), strict=True):
        p.data.copy_(q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(saved)
    assert target.param_groups[0]["gain"] == 1.0
    assert_same(train(source, 2, start=3), train(target, 2, start=3))


@pytest.mark.parametrize("cls", [tam.AdaTAM, tam.AdaTAMW, tam.AngularGrad])
def test_float16_parameters_are_refused(cls: type) -> None:
    half = parameters(SHAPES, torch.float16)
    with pytest.raises(ValueError, match="does not support float16"):
        cls(half)
    optimizer = cls(parameters(SHAPES))
    with pytest.raises(ValueError, match="does not support float16"):
        optimizer.add_param_group({"params": half})
    assert len(optimizer.param_groups) == 1
    wide = train(cls(parameters(SHAPES, torch.float64)), 3)
    before = copy.deepcopy(wide.state_dict())
    for group in ({"params": iter(half)}, {"params": half[0]}, {"params": [("w", half[0])]}):
        with pytest.raises(ValueError, match="does not support float16"):
            wide.add_param_group(group)
    assert str(wide.state_dict()) == str(before)
    for init in (tam.functional.init_adatam, tam.functional.init_angular_grad):
        with pytest.raises(ValueError, match="float16"):
            init(half)
