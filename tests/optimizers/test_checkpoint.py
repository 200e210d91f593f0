"""state_dict and load_state_dict, of this library's optimizers and of those they replace."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import tam
from tests.helpers import (
    ALL,
    TORQUE,
    WAYS,
    assert_close,
    assert_same,
    code_in,
    momentum_key,
    options_for,
    parameters,
    params_of,
    tensors,
    train,
)

SHAPES = [(3, 5), (7,), ()]
CLASSES = ALL
MUON = getattr(torch.optim, "Muon", None) and partial(torch.optim.Muon, nesterov=False)  # since torch 2.9


@pytest.fixture(params=TORQUE, ids=lambda cls: cls.__name__)
def torque(request: pytest.FixtureRequest) -> type:
    return request.param  # type: ignore[no-any-return]


def through_disk(state_dict: dict[str, Any], path: Path) -> dict[str, Any]:
    torch.save(state_dict, path / "checkpoint.pt")
    return torch.load(path / "checkpoint.pt", weights_only=True)  # type: ignore[no-any-return]


def fresh(cls: type, like: torch.optim.Optimizer, **options: Any) -> Any:
    """An optimizer with other options than the checkpoint's, on copies of its parameters."""
    groups = [[torch.nn.Parameter(p.detach().clone()) for p in g["params"]] for g in like.param_groups]
    return cls([{"params": group} for group in groups], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("keyword", [False, True])
def test_resuming_is_bit_identical(
    cls: type, way: dict[str, Any], dtype: torch.dtype, keyword: bool, tmp_path: Path
) -> None:
    options = {"lr": 0.01, "weight_decay": 0.1, **options_for(cls, max_grad_norm=1.0), **way}
    groups = [{"params": parameters(SHAPES[:2], dtype)}, {"params": parameters(SHAPES[2:], dtype), "lr": 0.3}]
    straight = train(cls(groups, **options), 4)
    saved = through_disk(straight.state_dict(), tmp_path)
    resumed = fresh(cls, straight, **way)
    if keyword:
        resumed.load_state_dict(state_dict=saved)
    else:
        resumed.load_state_dict(saved)
    train(straight, 4, start=4)
    train(resumed, 4, start=4)
    assert_same(straight, resumed)
    assert resumed.param_groups[1]["lr"] == 0.3
    kept = [{k: v for k, v in g.items() if k != "params"} for g in straight.param_groups]
    assert kept == [{k: v for k, v in g.items() if k != "params"} for g in resumed.param_groups]


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_alignment_is_shared_and_uncast_after_a_load(torque: type, scope: str, tmp_path: Path) -> None:
    groups = [{"params": parameters(SHAPES, torch.bfloat16)}, {"params": parameters([(4,)], torch.bfloat16)}]
    before = train(torque(groups, scope=scope), 3)
    after = fresh(torque, before, scope=scope)
    after.load_state_dict(through_disk(before.state_dict(), tmp_path))
    assert torch.equal(before.alignment, after.alignment)
    assert after.alignment.dtype == torch.float32
    assert not torch.equal(after.alignment, after.alignment.bfloat16())  # a cast would show
    distinct = {id(after.state[p]["alignment"]) for p in params_of(after)}
    assert len(distinct) == {"global": 1, "group": 2, "tensor": 4}[scope]
    assert all(after.state[p]["alignment"].shape == () for p in params_of(after))


def test_a_loaded_alignment_is_not_the_checkpoints_own_tensor(torque: type) -> None:
    before = train(torque(parameters(SHAPES)), 2)
    saved = copy.deepcopy(before.state_dict())
    value = float(saved["state"][0]["alignment"])
    after = fresh(torque, before)
    after.load_state_dict(saved)
    train(after, 2, start=2)
    assert float(saved["state"][0]["alignment"]) == value


def test_float64_alignment_where_all_parameters_are_float64(torque: type) -> None:
    assert train(torque(parameters(SHAPES, torch.float64)), 2).alignment.dtype == torch.float64
    mixed = torque([*parameters([(3,)], torch.float64), *parameters([(3,)], torch.float32)])
    assert train(mixed, 2).alignment.dtype == torch.float32
    growing = train(torque(parameters([(3,)], torch.float64)), 2)
    value = float(growing.alignment)
    growing.add_param_group({"params": parameters([(3,)], torch.float32)})
    assert growing.alignment.dtype == torch.float32
    assert float(growing.alignment) == pytest.approx(value, rel=1e-6)


def test_another_scope_is_refused_when_values_differ(torque: type) -> None:
    per_tensor = train(torque(parameters(SHAPES), scope="tensor"), 3)
    target = fresh(torque, per_tensor)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match=r"different alignments.*scope='global'.*scope='tensor'"):
        target.load_state_dict(per_tensor.state_dict())
    assert str(target.state_dict()) == str(before)
    # The other way round every tensor takes over the one s there was, and the scope stays.
    whole = train(torque(parameters(SHAPES)), 3)
    target = fresh(torque, whole, scope="tensor")
    target.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert target.param_groups[0]["scope"] == "tensor"
    assert target.alignment.tolist() == [float(whole.alignment)] * 3


@pytest.mark.parametrize("saved_scope", ["group", "tensor"])
def test_a_checkpoint_of_a_finer_scope_is_refused_after_a_load_in_place(
    saved_scope: str, tmp_path: Path
) -> None:
    """torch.distributed.checkpoint writes into the state: every value into the one tensor of a segment."""
    models = [torch.nn.Linear(3, 2) for _ in range(3)]

    def make(model: torch.nn.Module, scope: str) -> Any:
        groups = [{"params": [p]} for p in model.parameters()]
        return train(tam.TAM(groups, lr=0.1, scope=scope), 3)

    def read(model: torch.nn.Module, optimizer: Any) -> None:
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
        set_optimizer_state_dict(model, optimizer, state)

    saved = make(models[0], saved_scope)
    state = {"optimizer": get_optimizer_state_dict(models[0], saved)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(
        ValueError, match=rf"has 2 different alignments.*scope='global'.*scope='{saved_scope}'.*in place"
    ):
        read(models[1], make(models[1], "global"))
    same = make(models[2], saved_scope)
    read(models[2], same)
    assert torch.equal(same.alignment, saved.alignment)


def test_own_choice_of_a_backend_is_kept(cls: type) -> None:
    saved = train(cls(parameters(SHAPES), foreach=True, capturable=True), 2).state_dict()
    target = cls(parameters(SHAPES), foreach=False, capturable=False)
    target.load_state_dict(saved)
    group = target.param_groups[0]
    assert group["foreach"] is False and group["capturable"] is False
    train(target, 1)


def test_pickle_and_deepcopy(cls: type, way: dict[str, Any]) -> None:
    optimizer = train(cls(parameters(SHAPES), **way), 3)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert_same(optimizer, twin)
        if cls in TORQUE:
            assert torch.equal(twin.grad_norm, optimizer.grad_norm)
            assert len({id(twin.state[p]["alignment"]) for p in params_of(twin)}) == 1
        straight = train(copy.deepcopy(optimizer), 2, start=3)
        assert_same(train(twin, 2, start=3), straight)


def test_a_state_dict_saved_before_the_first_step(cls: type, tmp_path: Path) -> None:
    optimizer = cls(parameters(SHAPES), lr=0.3)
    target = fresh(cls, optimizer)
    target.load_state_dict(through_disk(optimizer.state_dict(), tmp_path))
    assert_same(train(optimizer, 2), train(target, 2))


def test_user_hooks_see_and_change_the_checkpoint(cls: type) -> None:
    saved = train(cls(parameters(SHAPES)), 2).state_dict()
    target, seen = cls(parameters(SHAPES)), []

    def rename(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "param_groups": [{**g, "lr": 0.7} for g in state_dict["param_groups"]]}

    target.register_load_state_dict_pre_hook(rename)
    target.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(set(optimizer.state[params_of(optimizer)[0]]))
    )
    target.load_state_dict(saved)
    assert target.param_groups[0]["lr"] == 0.7
    assert seen == [set(saved["state"][0])]
    assert len(target._optimizer_load_state_dict_pre_hooks) == 1  # ours does not stay behind


# ---------------------------------------------------------------------- torch's checkpoints

PAIRS = [
    (torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.1}, tam.TAM),
    (torch.optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0.1}, tam.AdaTAM),
    (torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.1}, tam.AdaTAMW),
    (torch.optim.Adam, {"betas": (0.8, 0.9)}, tam.AdaTAMW),
]


@pytest.mark.parametrize("theirs, options, ours", PAIRS)
def test_loading_torchs_checkpoint(theirs: type, options: dict[str, Any], ours: type, tmp_path: Path) -> None:
    source = train(theirs(parameters(SHAPES), lr=0.05, **options), 3)
    target = fresh(ours, source, lr=0.2, smoothing=0.5)
    with pytest.warns(UserWarning, match=r"keeps lr=0.2.*smoothing=0.5.*sets .*\(was") as caught:
        target.load_state_dict(through_disk(source.state_dict(), tmp_path))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    group = target.param_groups[0]
    assert group["lr"] == 0.2 and group["smoothing"] == 0.5
    assert {k: group[k] for k in options} == options
    assert not {"nesterov", "dampening", "amsgrad", "decoupled_weight_decay"} & set(group)
    for p, q in zip(params_of(source), params_of(target), strict=True):
        for key, value in source.state[p].items():
            assert torch.equal(target.state[q][key], value)
        assert float(target.state[q]["alignment"]) == 0
    train(target, 2, start=3)
    # The complete checkpoint it writes now loads without a warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh(ours, target).load_state_dict(copy.deepcopy(target.state_dict()))


def test_a_scheduled_checkpoint_of_torch_leaves_our_schedule_alone() -> None:
    source = torch.optim.SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(source, max_lr=1.0, total_steps=10)
    train(source, 1)
    schedule.step()
    target = fresh(tam.TAM, source, lr=0.2)
    ours = torch.optim.lr_scheduler.OneCycleLR(target, max_lr=0.2, total_steps=10, cycle_momentum=False)
    before = {k: v for k, v in target.param_groups[0].items() if "lr" in k}
    saved = copy.deepcopy(source.state_dict())
    saved["state"][0]["stranger"] = torch.ones(1)
    with pytest.warns(UserWarning, match="keeps lr="):
        target.load_state_dict(saved)
    assert {k: v for k, v in target.param_groups[0].items() if "lr" in k} == before
    assert "base_momentum" not in target.param_groups[0]
    assert set(target.state[params_of(target)[0]]) == {"momentum_buffer", "alignment"}
    train(target, 1)
    ours.step()


@pytest.mark.parametrize(
    "ours, theirs, remark",
    [
        (tam.AdaTAM, True, "was decoupled and is coupled here"),
        (tam.AdaTAMW, False, "was coupled and is decoupled here"),
        (tam.AdaTAM, None, r"was coupled \(Adam\) or decoupled \(AdamW\) and is coupled here"),
        (tam.AdaTAMW, None, r"was coupled \(Adam\) or decoupled \(AdamW\) and is decoupled here"),
        (tam.AdaTAM, False, ""),
        (tam.AdaTAMW, True, ""),
    ],
)
def test_the_kind_of_weight_decay_does_not_change_without_a_word(
    ours: type, theirs: bool | None, remark: str
) -> None:
    source = train(torch.optim.Adam(parameters(SHAPES), weight_decay=0.1), 2)
    saved = source.state_dict()
    saved["param_groups"][0].pop("decoupled_weight_decay", None)
    if theirs is not None:  # torch writes the key since 2.7
        saved["param_groups"][0]["decoupled_weight_decay"] = theirs
    with pytest.warns(UserWarning, match=remark or "keeps lr=") as caught:
        fresh(ours, source).load_state_dict(saved)
    assert remark or "its weight decay" not in str(caught[0].message)


def test_an_old_adam_counts_steps_in_python() -> None:
    source = train(torch.optim.Adam(parameters(SHAPES)), 2)
    saved = copy.deepcopy(source.state_dict())
    for entry in saved["state"].values():
        entry["step"] = 2
    target = fresh(tam.AdaTAM, source)
    with pytest.warns(UserWarning, match="keeps lr="):
        target.load_state_dict(saved)
    assert all(float(target.state[p]["step"]) == 2 for p in params_of(target))
    train(target, 1)


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (partial(torch.optim.RMSprop, momentum=0.9), tam.TAM),
        (partial(torch.optim.ASGD), tam.TAM),
        (torch.optim.NAdam, tam.AdaTAM),
        (partial(torch.optim.RAdam, decoupled_weight_decay=True), tam.AdaTAMW),
        pytest.param(MUON, tam.TAM, marks=pytest.mark.skipif(MUON is None, reason="this torch has no Muon")),
    ],
    ids=["RMSprop", "ASGD", "NAdam", "RAdam", "Muon"],
)
def test_buffers_of_another_meaning_are_refused(theirs: Any, ours: type) -> None:
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.ones(3, 3)
    optimizer = theirs([p], lr=0.01)
    optimizer.step()
    with pytest.raises(ValueError, match="cannot load this checkpoint"):
        ours([p]).load_state_dict(optimizer.state_dict())


def test_sgd_without_momentum_has_no_buffers_to_take() -> None:
    source = train(torch.optim.SGD(parameters(SHAPES), lr=0.05), 2)
    target = fresh(tam.TAM, source)
    with pytest.warns(UserWarning, match="of another optimizer was loaded into TAM"):
        target.load_state_dict(source.state_dict())
    assert len(target.state) == 0
    train(target, 1)


def test_at_fixed_damping_training_goes_on_as_sgds_would() -> None:
    source = train(torch.optim.SGD(parameters(SHAPES), lr=0.05, momentum=0.9), 3)
    target = fresh(tam.TAM, source, lr=0.05, smoothing=1.0, floor=0.5)
    with pytest.warns(UserWarning, match="of another optimizer was loaded into TAM"):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    for p, q in zip(params_of(train(source, 3)), params_of(train(target, 3)), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "source, ours, name",
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), tam.TAM, "nesterov=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), tam.TAM, "dampening=0.5"),
        (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), tam.AdaTAM, "amsgrad=True"),
    ],
)
def test_options_without_a_rule_are_refused_by_name(source: Any, ours: type, name: str) -> None:
    saved = train(source(parameters(SHAPES)), 2).state_dict()
    target = ours(parameters(SHAPES))
    with pytest.raises(ValueError, match=name) as error:
        target.load_state_dict(saved)
    assert len(target.state) == 0
    exec(code_in(error), {"checkpoint": saved})
    with pytest.warns(UserWarning, match="of another optimizer was loaded"):
        target.load_state_dict(saved)
    assert len(train(target, 1).state) == len(SHAPES)


# ---------------------------------------------------------------------- checkpoints that do not fit


def refused(target: Any, saved: dict[str, Any], match: str) -> None:
    before = (copy.deepcopy(target.state_dict()), [p.detach().clone() for p in params_of(target)])
    with pytest.raises(ValueError, match=match):
        target.load_state_dict(saved)
    assert str(target.state_dict()) == str(before[0])
    assert all(torch.equal(p, q) for p, q in zip(params_of(target), before[1], strict=True))


def test_checkpoints_that_do_not_fit_are_refused(cls: type) -> None:
    target = train(cls(parameters(SHAPES)), 2)
    refused(target, train(cls(parameters(SHAPES[:2])), 2).state_dict(), r"group 0: .* 2 parameters.* 3")
    two = cls([{"params": parameters(SHAPES[:1])}, {"params": parameters(SHAPES[1:])}])
    refused(target, train(two, 2).state_dict(), r"2 parameter groups.* 1")
    other = train(cls(parameters([(3, 5), (8,), ()])), 2)
    refused(target, other.state_dict(), r"parameter 1 of group 0 \(shape \(7,\)\).*\(8,\)")
    sgd = train(torch.optim.SGD(parameters(SHAPES), lr=0.1, momentum=0.9), 2).state_dict()
    if momentum_key(target.state_dict()["state"][0]) == "exp_avg":
        refused(target, sgd, r"parameter 0 of group 0 .* has no (step|exp_avg)")
    saved = copy.deepcopy(target.state_dict())
    saved["param_groups"][0]["weight_decay"] = -1.0
    refused(target, saved, r"weight_decay must be .*got -1.0")


@pytest.mark.parametrize("value", [7.0, -3.0, float("nan"), float("inf")])
def test_an_impossible_alignment_is_refused(torque: type, value: float) -> None:
    target = train(torque(parameters(SHAPES)), 2)
    saved = copy.deepcopy(target.state_dict())
    for entry in saved["state"].values():
        entry["alignment"] = torch.tensor(value)
    refused(target, saved, r"alignment .*\[-1, 1\]")
    for entry in saved["state"].values():
        del entry["alignment"]
    refused(target, saved, "no alignment for parameter 0")


def test_what_is_no_optimizers_state_dict_is_refused(cls: type) -> None:
    refused(train(cls(parameters(SHAPES)), 1), {"weight": torch.ones(2)}, "no optimizer's state_dict.*weight")


def test_a_group_added_after_a_load_has_the_loaded_shared_options(torque: type) -> None:
    source = train(torque(parameters(SHAPES), smoothing=0.5), 2)
    target = fresh(torque, source)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    target.add_param_group({"params": parameters([(4,)])})
    assert target.param_groups[1]["smoothing"] == 0.5
    train(target, 1)


def test_angulargrads_vote_comes_with_its_checkpoint() -> None:
    for vote in (False, True):
        source = train(tam.AngularGrad(parameters(SHAPES), vote=vote), 2)
        target = fresh(tam.AngularGrad, source, vote=not vote)
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        assert_same(train(source, 2, start=2), train(target, 2, start=2))


def test_names_are_in_the_message(cls: type) -> None:
    model, wider = torch.nn.Linear(3, 2), torch.nn.Linear(3, 4)
    saved = train(cls(wider.named_parameters()), 1).state_dict()
    with pytest.raises(ValueError, match=r"parameter 0 'weight' of group 0"):
        cls(model.named_parameters()).load_state_dict(saved)


def test_differing_shared_options_in_a_checkpoint(torque: type) -> None:
    groups = [{"params": parameters(SHAPES[:1])}, {"params": parameters(SHAPES[1:])}]
    target = train(torque(groups), 2)
    saved = copy.deepcopy(target.state_dict())
    saved["param_groups"][1]["smoothing"] = 0.5
    refused(target, saved, r"smoothing must be the same in all groups.*0\.9, 0\.5")


def test_a_checkpoint_of_an_older_version_keeps_its_lr(torque: type) -> None:
    source = train(torque(parameters(SHAPES), lr=0.3), 2)
    saved = copy.deepcopy(source.state_dict())
    del saved["param_groups"][0]["floor"]
    target = fresh(torque, source, lr=0.1, floor=0.25)
    with pytest.warns(UserWarning, match=r"floor=0.25"):
        target.load_state_dict(saved)
    assert target.param_groups[0]["lr"] == 0.3 and target.param_groups[0]["floor"] == 0.25


def test_scheduler_and_optimizer_resume_together(cls: type) -> None:
    def pair(params: list[torch.nn.Parameter]) -> tuple[Any, Any]:
        optimizer = cls(params, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def go(optimizer: Any, scheduler: Any, start: int) -> None:
        for step in range(start, start + 3):
            train(optimizer, 1, start=step)
            scheduler.step()

    a, sa = pair(parameters(SHAPES))
    go(a, sa, 0)
    buffer = io.BytesIO()
    torch.save({"optimizer": a.state_dict(), "scheduler": sa.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    b, sb = pair([torch.nn.Parameter(p.detach().clone()) for p in params_of(a)])
    b.load_state_dict(saved["optimizer"])
    sb.load_state_dict(saved["scheduler"])
    go(a, sa, 3)
    go(b, sb, 3)
    assert_same(a, b)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_state_is_what_torchs_optimizer_keeps_plus_scalars(torque: type, way: dict[str, Any]) -> None:
    ours = train(torque(parameters([(100, 10), (50,)]), **way), 2)
    twin = torch.optim.SGD if torque is tam.TAM else torch.optim.Adam
    options = {"momentum": 0.9} if torque is tam.TAM else {}
    theirs = train(twin(parameters([(100, 10), (50,)]), lr=0.1, **options), 2)

    def size(optimizer: torch.optim.Optimizer) -> int:
        distinct = {x.untyped_storage().data_ptr(): x for s in optimizer.state.values() for x in s.values()}
        return sum(x.untyped_storage().nbytes() for x in distinct.values())

    assert size(ours) == size(theirs) + 4  # one float32 alignment
    per_tensor = train(torque(parameters([(100, 10), (50,)]), scope="tensor", **way), 2)
    assert size(per_tensor) == size(theirs) + 2 * 4


def test_low_precision_resume_keeps_every_bit_of_alignment(torque: type) -> None:
    source = train(torque(parameters(SHAPES, torch.bfloat16)), 5)
    target = fresh(torque, source)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for a, b in zip(tensors(source), tensors(target), strict=True):
        assert_close(a.float(), b.float(), 0.0)


# ---------------------------------------------------------------------- everything is checked first


def _with_extra_step(value: Any) -> Any:
    def change(saved: dict[str, Any]) -> None:
        for entry in saved["state"].values():
            entry["step"] = value

    return change


def _sparse_momentum(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        key = momentum_key(entry)
        entry[key] = entry[key].to_sparse()


def _meta_momentum(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        key = momentum_key(entry)
        entry[key] = entry[key].to("meta")


def _meta_lr(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["lr"] = torch.tensor(0.1, device="meta")


def _entry_that_is_no_dict(saved: dict[str, Any]) -> None:
    saved["state"][0] = [1, 2]


def _quantized(key: str) -> Any:
    def change(saved: dict[str, Any]) -> None:
        for entry in saved["state"].values():
            if key in entry:
                entry[key] = torch.quantize_per_tensor(entry[key].float(), 0.1, 0, torch.qint8)

    return change


def _sparse_alignment(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        entry["alignment"] = entry["alignment"].to_sparse()


@pytest.mark.parametrize("change", [_quantized("alignment"), _sparse_alignment])
def test_an_alignment_that_is_no_plain_number_is_refused(torque: type, change: Any) -> None:
    target = train(torque(parameters([(3, 5), (7,)])), 2)
    saved = copy.deepcopy(target.state_dict())
    change(saved)
    refused(target, saved, "alignment")


def test_a_quantized_step_count_is_refused(cls: type) -> None:
    target = train(cls(parameters([(3, 5), (7,)])), 2)
    saved = copy.deepcopy(target.state_dict())
    if "step" in saved["state"][0]:
        _quantized("step")(saved)
        refused(target, saved, "step")


def _real_momentum(entry: dict[str, Any], key: str) -> None:
    entry[key] = entry[key].real.contiguous()


def _expanded_momentum(entry: dict[str, Any], key: str) -> None:
    entry[key] = entry[key].flatten()[:1].expand(entry[key].numel()).view(entry[key].shape)


def _negated_momentum(entry: dict[str, Any], key: str) -> None:
    entry[key] = torch._neg_view(entry[key])


@pytest.mark.parametrize("change", [_real_momentum, _expanded_momentum, _negated_momentum])
def test_buffers_of_another_kind_are_copied(cls: type, way: dict[str, Any], change: Any) -> None:
    """Whatever loads can step, in every way alike."""
    params = parameters([(6,)], torch.complex64 if change is _real_momentum else torch.float32)
    source = train(cls(params), 2)
    key = momentum_key(source.state[params[0]])
    found = []
    for options in (way, {"foreach": False}):
        saved = copy.deepcopy(source.state_dict())
        change(saved["state"][0], key)
        expected = saved["state"][0][key].to(params[0].dtype).clone()
        target = fresh(cls, source, **options)
        target.load_state_dict(saved)
        (p,) = params_of(target)
        torch.testing.assert_close(target.state[p][key], expected)
        found.append(train(target, 2, start=2))
    for p, q in zip(*map(params_of, found), strict=True):
        assert_close(torch.view_as_real(p) if p.is_complex() else p,
                     torch.view_as_real(q) if q.is_complex() else q, 2e-5)  # fmt: skip


@pytest.mark.parametrize(
    "change, match",
    [
        (_sparse_momentum, "must be a dense tensor"),
        (_meta_momentum, "meta"),
        (_meta_lr, "lr must be .*meta"),
        (_entry_that_is_no_dict, "must be a dict"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(cls: type, change: Any, match: str) -> None:
    target = train(cls(parameters([(3, 5), (7,)])), 2)
    saved = copy.deepcopy(target.state_dict())
    change(saved)
    refused(target, saved, match)
    train(target, 2, start=2)


@pytest.mark.parametrize("value", ["7", True, None])
def test_a_step_count_that_is_none_is_refused(cls: type, value: Any) -> None:
    target = train(cls(parameters(SHAPES)), 2)
    saved = copy.deepcopy(target.state_dict())
    if "step" in saved["state"][0]:  # for the others see the next test
        _with_extra_step(value)(saved)
        refused(target, saved, "step")


@pytest.mark.parametrize("value", [7, "7", True, None, torch.tensor(3.0)])
@pytest.mark.parametrize("way", WAYS)
def test_an_entry_tam_does_not_know_does_no_harm(value: Any, way: str) -> None:
    source = train(tam.TAM(parameters(SHAPES), **WAYS[way]), 3)
    saved = copy.deepcopy(source.state_dict())
    _with_extra_step(value)(saved)
    target = tam.TAM(parameters(SHAPES), **WAYS[way])
    for p, q in zip(params_of(target), params_of(source), strict=True):
        p.data.copy_(q)
    target.load_state_dict(saved)
    train(source, 3, start=3)
    train(target, 3, start=3)
    for p, q in zip(params_of(target), params_of(source), strict=True):
        assert torch.equal(p, q)


def test_a_users_own_state_comes_along(cls: type) -> None:
    source = cls(parameters(SHAPES))
    note = torch.tensor([1.0, 2.0])
    source.state[params_of(source)[0]]["note"] = note
    target = cls(parameters(SHAPES))
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert torch.equal(target.state[params_of(target)[0]]["note"], note)
    train(target, 2)


# ---------------------------------------------------------------------- checkpoints of older versions

DATA = Path(__file__).parents[1] / "data"
OLD = torch.load(DATA / "checkpoints-0.1.0.pt", weights_only=True)


@pytest.mark.parametrize("name", OLD)
def test_a_checkpoint_of_version_0_1_0_goes_on_as_it_did_there(name: str) -> None:
    """The file was written by that version: checkpoints after 5 steps, and the parameters after 3 more."""
    old = OLD[name]
    params = [torch.nn.Parameter(p.clone()) for p in old["before"]]
    if old["cls"] == "Warmup":
        optimizer: Any = tam.Warmup(tam.TAM(params, lr=0.2, foreach=False), torch.optim.SGD, 3)
        start = 2
    else:
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer, start = getattr(tam, old["cls"])(groups, foreach=False, **old["options"]), 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(old["state_dict"])
    train(optimizer, 3, start=start)
    for p, expected in zip(params, old["after"], strict=True):
        assert torch.equal(p, expected)


def old_optimizers() -> dict[str, Any]:
    """TAM and AdaTAMW after 3 steps, as version 0.1.0 has pickled them."""
    return pickle.loads((DATA / "optimizers-0.1.0.pkl").read_bytes())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["TAM", "AdaTAMW"])
def test_a_pickle_of_version_0_1_0_goes_on_as_if_nothing_had_happened(name: str) -> None:
    old = old_optimizers()[name]
    options = {
        "TAM": {"lr": 0.1, "weight_decay": 0.1},
        "AdaTAMW": {"lr": 1e-4, "scope": "group", "bias_correction": True},
    }
    params = parameters(SHAPES)
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
    uninterrupted = train(getattr(tam, name)(groups, foreach=False, **options[name]), 3)
    assert_same(old, uninterrupted)
    assert torch.equal(old.grad_norm, uninterrupted.grad_norm)
    assert_same(train(old, 3, start=3), train(uninterrupted, 3, start=3))
    assert torch.equal(old.alignment, uninterrupted.alignment)
    assert old.backend == "loop"


@pytest.mark.parametrize("name", ["TAM", "AdaTAMW"])
def test_a_pickle_of_version_0_1_0_is_an_optimizer_like_any_other(name: str) -> None:
    """It takes the fused step, a further group, a checkpoint; and can be copied and pickled again."""
    old = old_optimizers()[name]
    twins = [copy.deepcopy(old), pickle.loads(pickle.dumps(old)), old_optimizers()[name]]
    twins[2].load_state_dict(copy.deepcopy(old.state_dict()))
    for optimizer in (old, *twins):
        optimizer.add_param_group({"params": parameters([(4,)])})
        for group in optimizer.param_groups:
            group["foreach"] = None
        train(optimizer, 2, start=3)
        assert optimizer.backend == "c"
    for twin in twins:
        assert_same(twin, old)


def test_a_checkpoint_under_a_scheduler_says_that_its_lr_is_lost() -> None:
    sgd = torch.optim.SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    train(sgd, 1)
    scheduler.step()
    with pytest.warns(UserWarning, match=r"from 0\.1 to 0\.05, which is lost.*scheduler="):
        tam.TAM(parameters(SHAPES)).load_state_dict(sgd.state_dict())


def test_a_pickle_of_an_older_version_gets_the_options_that_came_later(torque: type) -> None:
    old = train(torque(parameters(SHAPES)), 2)
    for options in (old.defaults, *old.param_groups):
        del options["gain"]
    new = pickle.loads(pickle.dumps(old))
    new.add_param_group({"params": parameters([(4,)])})
    train(new, 2, start=2)
    assert [group["gain"] for group in new.param_groups] == [1.0, 1.0]


@pytest.mark.parametrize(
    "saved, loading", [(tam.TAM, tam.AdaTAM), (tam.AdaTAM, tam.TAM), (tam.TAM, tam.AdaTAMW)]
)
def test_a_checkpoint_of_the_other_family_is_refused(saved: type, loading: type) -> None:
    checkpoint = train(saved(parameters([(3,)]), lr=1e-4), 2).state_dict()
    optimizer = loading(parameters([(3,)]), lr=1e-4)
    with pytest.raises(ValueError, match="cannot load this checkpoint, whose groups have no"):
        optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0]["lr"] == 1e-4 and not optimizer.state
