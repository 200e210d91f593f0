"""Which parameters share an alignment, and the tensors in which they share it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tam
from tam.segments import new_scalar, scalar_dtype
from tests.helpers import TORQUE, WAYS, assert_same, parameters, params_of, train

SHAPES = [(3, 5), (7,), (2, 2)]
SCOPES = ["global", "group", "tensor"]
MEMBERS = {"global": [[0, 1, 2]], "group": [[0, 1], [2]], "tensor": [[0], [1], [2]]}


def in_two_groups(cls: type, scope: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    params = parameters(SHAPES, dtype)
    return cls([{"params": params[:2]}, {"params": params[2:]}], scope=scope, **options)


def alignments_of(optimizer: Any) -> list[Tensor]:
    """The tensor that each parameter has as its alignment."""
    return [optimizer.state[p]["alignment"] for p in params_of(optimizer)]


def assert_shared(optimizer: Any, scope: str) -> None:
    shared = alignments_of(optimizer)
    for members, s in zip(MEMBERS[scope], optimizer.segments.alignments(), strict=True):
        assert all(shared[i] is s for i in members)
    assert len(set(map(id, shared))) == len(MEMBERS[scope])


# ---------------------------------------------------------------------- membership and sharing


@pytest.mark.parametrize("scope", SCOPES)
def test_the_scope_says_who_belongs_together(scope: str) -> None:
    optimizer = in_two_groups(tam.TAM, scope)
    index = {p: i for i, p in enumerate(params_of(optimizer))}
    assert [[index[p] for p in segment] for segment in optimizer.segments.members()] == MEMBERS[scope]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("cls", TORQUE)
def test_parameters_of_a_segment_share_one_tensor(cls: type, scope: str, way: dict[str, Any]) -> None:
    optimizer = in_two_groups(cls, scope, **way)
    assert [float(s) for s in optimizer.segments.alignments()] == [0.0] * len(MEMBERS[scope])
    assert len(optimizer.state) == 0  # a look makes no state
    assert_shared(train(optimizer, 3), scope)
    readings = optimizer.alignment.reshape(-1).tolist()
    assert readings == [float(s) for s in optimizer.segments.alignments()] and all(readings)


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("scope", SCOPES)
def test_after_a_differentiable_step_parameters_without_a_gradient_share_it(cls: type, scope: str) -> None:
    params = [p.detach() for p in parameters(SHAPES)]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = train(cls(groups, scope=scope, differentiable=True), 2)
    params[0].grad = None
    optimizer.step()
    assert_shared(optimizer, scope)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_parameter_takes_over_the_alignment_of_its_segment(way: dict[str, Any]) -> None:
    optimizer = in_two_groups(tam.TAM, "group", **way)
    late = params_of(optimizer)[1]
    late.requires_grad_(False)
    for step in range(3):
        train(optimizer, 1, start=step)
        late.grad = None
        optimizer.state.pop(late, None)
    (first, _), s = optimizer.segments.alignments(), float(optimizer.alignment[0])
    late.grad = torch.zeros_like(late)
    optimizer.step()
    assert optimizer.state[late]["alignment"] is first and s != 0


@pytest.mark.parametrize("scope", SCOPES)
def test_copies_of_an_alignment_become_one_again(scope: str) -> None:
    """ZeroRedundancyOptimizer loads state by itself: each parameter then has its own tensor."""
    for way in WAYS.values():
        optimizer, twin = (train(in_two_groups(tam.TAM, scope, **way), 2) for _ in range(2))
        for state in optimizer.state.values():
            state["alignment"] = state["alignment"].clone()
        train(optimizer, 2, start=2)
        assert_shared(optimizer, scope)
        assert_same(optimizer, train(twin, 2, start=2))


def test_given_alignments_are_shared_with_those_that_have_state() -> None:
    optimizer = in_two_groups(tam.TAM, "group")
    first, second, third = params_of(optimizer)
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.segments.share_alignments({second: torch.tensor([0.25]), third: torch.tensor(0.5)})
    assert optimizer.alignment.tolist() == [0.25, 0.0]
    assert optimizer.state[first]["alignment"] is optimizer.state[second]["alignment"]
    assert third not in optimizer.state


def test_users_entries_are_no_state() -> None:
    optimizer = in_two_groups(tam.TAM, "global")
    p = params_of(optimizer)[0]
    optimizer.state[p]["note"] = "mine"
    assert not optimizer.segments.has_state(p)
    train(optimizer, 1)
    assert optimizer.segments.has_state(p) and optimizer.state[p]["note"] == "mine"


# ---------------------------------------------------------------------- dtype and device


@pytest.mark.parametrize(
    "dtypes, expected",
    [
        ([torch.float64], torch.float64),
        ([torch.complex128, torch.float64], torch.float64),
        ([torch.float64, torch.float32], torch.float32),
        ([torch.bfloat16], torch.float32),
        ([torch.complex64], torch.float32),
        ([], torch.float32),
    ],
)
def test_scalars_are_float64_if_all_parameters_are(dtypes: list[torch.dtype], expected: torch.dtype) -> None:
    params = [torch.zeros(2, dtype=dtype) for dtype in dtypes]
    assert scalar_dtype(params) == new_scalar(params).dtype == expected


def test_a_scalar_is_where_the_first_gradient_is() -> None:
    params: list[Tensor] = [torch.zeros(2, requires_grad=True), torch.zeros(2, device="meta")]
    assert new_scalar(params).device.type == "cpu"
    params[1].requires_grad_().grad = torch.zeros(2, device="meta")
    assert new_scalar(params).device.type == "meta"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_segment_with_another_dtype_has_float32(way: dict[str, Any]) -> None:
    wide = parameters(SHAPES, torch.float64)
    optimizer = train(tam.TAM(wide, **way), 2)
    before = optimizer.alignment
    assert before.dtype == torch.float64 and optimizer.grad_norm.dtype == torch.float64
    optimizer.add_param_group({"params": parameters([(4,)])})
    assert optimizer.alignment.dtype == torch.float32
    assert float(optimizer.alignment) == float(before.float())
    train(optimizer, 1, start=2)
    assert {s.dtype for s in alignments_of(optimizer)} == {torch.float32}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("scope", SCOPES)
def test_alignment_and_norm_follow_parameters_that_are_cast(scope: str, way: dict[str, Any]) -> None:
    optimizer = train(in_two_groups(tam.TAM, scope, **way), 2)
    before = optimizer.alignment.double()
    for p in params_of(optimizer):
        p.data = p.data.double()
        p.grad = torch.zeros_like(p)
    optimizer.step()  # all-zero gradients: s shrinks by gamma
    assert optimizer.alignment.dtype == optimizer.grad_norm.dtype == torch.float64
    torch.testing.assert_close(optimizer.alignment, 0.9 * before, rtol=1e-12, atol=0)
    assert_shared(optimizer, scope)


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("scope", SCOPES)
def test_state_comes_to_the_device_of_its_parameter(cls: type, scope: str) -> None:
    params: list[Any] = [torch.zeros(shape, device="meta", requires_grad=True) for shape in SHAPES]
    optimizer: Any = cls([{"params": params[:2]}, {"params": params[2:]}], scope=scope)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for state in optimizer.state.values():  # as if the parameters had come from there
        state.update({key: torch.zeros_like(x, device="cpu") for key, x in state.items()})
    optimizer.segments.grad_norm = torch.zeros(())
    optimizer.step()
    for p in params:
        kinds = {key: x.device.type for key, x in optimizer.state[p].items()}
        assert kinds.pop("step", "cpu") == "cpu" and set(kinds.values()) == {"meta"}
    assert optimizer.grad_norm.is_meta and optimizer.alignment.is_meta
    assert_shared(optimizer, scope)


# ---------------------------------------------------------------------- copies, and the end


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_copy_has_segments_of_its_parameters(scope: str, how: Any) -> None:
    optimizer = train(in_two_groups(tam.TAM, scope), 2)
    twin = how(optimizer)
    assert twin.segments is not optimizer.segments
    members = [p for segment in twin.segments.members() for p in segment]
    assert all(p is q for p, q in zip(members, params_of(twin), strict=True))
    assert_shared(twin, scope)
    assert torch.equal(twin.grad_norm, optimizer.grad_norm)
    kept = [x.clone() for x in (twin.alignment, twin.grad_norm)]
    train(optimizer, 1, start=2)
    assert torch.equal(twin.alignment, kept[0]) and torch.equal(twin.grad_norm, kept[1])
    assert_same(train(twin, 1, start=2), optimizer)


@pytest.fixture
def without_gc() -> Iterator[None]:
    train(tam.TAM(parameters(SHAPES)), 1)  # torch's imports at the first one make cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("options", [*WAYS.values(), {"differentiable": True}], ids=[*WAYS, "pure"])
@pytest.mark.parametrize("cls", TORQUE)
def test_a_dropped_optimizer_frees_its_memory_at_once(
    cls: type, options: dict[str, Any], without_gc: None
) -> None:
    optimizer = train(cls([p.detach() for p in parameters(SHAPES)], **options), 2)
    copied = copy.deepcopy(optimizer)
    held = [
        weakref.ref(x)
        for o in (optimizer, copied)
        for state in o.state.values()
        for x in (*state.values(), o.segments.grad_norm)
    ]
    del optimizer, copied
    assert [ref() for ref in held] == [None] * len(held)


@pytest.mark.parametrize("way", WAYS)
def test_a_shallow_copy_leaves_the_original_alone(way: str) -> None:
    optimizer = train(tam.TAM(parameters(SHAPES), **WAYS[way]), 2)
    twin = train(tam.TAM(parameters(SHAPES), **WAYS[way]), 2)
    copied = copy.copy(optimizer)
    assert torch.equal(copied.alignment, optimizer.alignment)
    del copied
    assert_same(train(optimizer, 2, start=2), train(twin, 2, start=2))
    assert torch.equal(optimizer.grad_norm, twin.grad_norm)


def test_segments_do_not_keep_their_optimizer_alive(without_gc: None) -> None:
    optimizer = tam.TAM(parameters(SHAPES))
    segments, alive = optimizer.segments, weakref.ref(optimizer)
    del optimizer
    assert alive() is None
    with pytest.raises(ReferenceError):
        segments.members()


def test_an_unknown_scope_in_a_group_is_an_error() -> None:
    optimizer = train(tam.TAM(parameters(SHAPES)), 1)
    optimizer.param_groups[0]["scope"] = "layer"
    with pytest.raises(ValueError, match=r"scope must be .* got 'layer'"):
        train(optimizer, 1)


@pytest.mark.parametrize("scope", ["group", "tensor"])
def test_a_finer_scope_midway_gives_each_segment_its_own_s(scope: str) -> None:
    steps = []
    for way in WAYS.values():
        optimizer = train(in_two_groups(tam.TAM, "global", **way), 2)
        for group in optimizer.param_groups:
            group["scope"] = scope
        train(optimizer, 2, start=2)
        assert_shared(optimizer, scope)
        steps.append(optimizer.alignment)
    for s in steps[1:]:
        torch.testing.assert_close(s, steps[0], rtol=0, atol=1e-6)
