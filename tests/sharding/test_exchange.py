"""Which sums are added up over which ranks: a rank alone, which is made to exchange with itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tam
from tam.sharding import Exchange, GradScaler, ShardGroup, exchange
from tam.sharding.exchange import exchange_of, verdicts_differ
from tam.sharding.shard_group import set_shards, shards_of
from tam.sharding.sums import FOUND_INF, Sum
from tests.helpers import TORQUE, assert_same, parameters, train
from tests.sharding.harness import counted

SHAPES = [(3, 5), (7,), (2, 2)]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(exchange, "has_other_ranks", lambda group: True)
    yield dist.group.WORLD
    dist.destroy_process_group()


def segments_of(*counts: int) -> list[list[torch.Tensor]]:
    return [[torch.zeros(2) for _ in range(count)] for count in counts]


def test_plain_tensors_without_a_group_have_nobody_to_exchange_with() -> None:
    alone = Exchange(segments_of(2, 1), "group", None)
    assert alone.groups == [] and not alone.is_needed(1.0, torch.tensor(0.0))
    sums = torch.arange(12, dtype=torch.float64).reshape(3, 4)
    before = sums.clone()
    alone.all_reduce_sums(sums)
    assert torch.equal(sums[:2], before[:2])
    assert sums[-1].tolist() == [0, 0, float(before[:2, Sum.GG].sum()), 0]


def test_every_segment_has_a_share_even_if_this_rank_has_none_of_it(group: dist.ProcessGroup) -> None:
    segments = segments_of(2, 0, 1)
    shared = Exchange(segments, "group", ShardGroup(group, False))
    assert [k for k, _ in shared.shares] == [0, 1, 2] and shared.share_counts == [1, 1, 1]
    assert [shared.share_of[p] for segment in segments for p in segment] == [0, 0, 2]
    assert shared.groups == [group] and shared.rows_of_group == [[0, 1, 2]]
    assert shared.is_needed(None, None)


def test_whole_tensors_exchange_only_what_all_of_them_need(group: dist.ProcessGroup) -> None:
    shared = Exchange(segments_of(1, 1), "tensor", ShardGroup(group, True))
    assert shared.local_rows == [0, 1] and shared.summed_rows == []
    assert not shared.is_needed(None, None)
    assert shared.is_needed(1.0, None) and shared.is_needed(None, torch.tensor(0.0))
    sums = torch.ones(3, 4, dtype=torch.float64)
    with counted() as sizes:
        shared.all_reduce_sums(sums, torch.tensor(1.0))
    assert sizes == [4]  # one row: |g|^2 and the verdict
    assert torch.equal(sums[:2], torch.ones(2, 4, dtype=torch.float64))
    assert float(sums[-1, Sum.GG]) == 2 and float(sums[-1, FOUND_INF]) == 1


def test_one_message_of_one_size(group: dist.ProcessGroup) -> None:
    shared = Exchange(segments_of(3, 0), "group", ShardGroup(group, False))
    for found_inf in (None, torch.tensor(1.0)):
        sums = torch.full((3, 4), 2.0, dtype=torch.float64)
        with counted() as sizes:
            shared.all_reduce_sums(sums, found_inf)
        assert sizes == [12]
        assert sums[-1].tolist() == [0.0 if found_inf is None else 1.0, 0, 4, 0]


def test_rows_of_shares_are_added_up(group: dist.ProcessGroup) -> None:
    shared = Exchange(segments_of(1, 1), "group", ShardGroup(group, False))
    rows = torch.arange(4.0).reshape(2, 2)
    with counted() as sizes:
        shared.all_reduce_rows(rows)
    assert sizes == [4] and rows.tolist() == [[0, 1], [2, 3]]


def test_an_exchange_fits_its_parameters_and_options_alone(group: dist.ProcessGroup) -> None:
    segments, shards = segments_of(2, 1), ShardGroup(group, False)
    shared = Exchange(segments, "group", shards)
    assert shared.fits([[*segment] for segment in segments], "group", shards)
    assert not shared.fits(segments, "global", shards)
    assert not shared.fits(segments, "group", None)
    assert not shared.fits(segments, "group", ShardGroup(group, False))  # somebody has set it again
    assert not shared.fits([segments[0][:1], [segments[0][1], *segments[1]]], "group", shards)
    assert not shared.fits([segments[0], segments_of(1)[0]], "group", shards)
    assert not shared.fits(segments[:1], "group", shards)


def test_indices_are_copied_to_a_device_once() -> None:
    alone = Exchange(segments_of(1), "group", None)
    cpu = torch.device("cpu")
    first = alone.index_tensor([0, 2], cpu)
    assert first.tolist() == [0, 2] and alone.index_tensor([0, 2], cpu) is first
    assert alone.index_tensor([0, 2], torch.device("meta")).is_meta
    for i in range(200):  # they do not pile up
        alone.index_tensor([i], cpu)
    again = alone.index_tensor([0, 2], cpu)
    assert again is not first and torch.equal(again, first)


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("cls", TORQUE)
def test_an_exchange_with_oneself_changes_nothing(
    group: dist.ProcessGroup, cls: type, way: dict[str, Any]
) -> None:
    alone, together = cls(parameters(SHAPES), **way), cls(parameters(SHAPES), shard_group=group, **way)
    for step in range(3):
        train(alone, 1, start=step)
        with counted() as sizes:
            train(together, 1, start=step)
        assert sizes == [8]  # one share and the whole
    assert torch.equal(alone.grad_norm, together.grad_norm)
    assert_same(alone, together)


# ---------------------------------------------------------------------- the options


def test_a_copy_shares_the_group_and_a_pickle_does_not_contain_it(group: dist.ProcessGroup) -> None:
    shards = ShardGroup(group, True)
    assert copy.deepcopy(shards) is shards
    thawed = pickle.loads(pickle.dumps(shards))
    assert thawed.group is None and thawed.whole_tensors


def test_shards_of_torchs_optimizers_are_remembered(group: dist.ProcessGroup) -> None:
    sgd = torch.optim.SGD(parameters(SHAPES), lr=0.1)
    ours = tam.TAM(parameters(SHAPES), shard_group=group)
    assert shards_of(sgd) is None
    names = {*vars(sgd)}
    set_shards(sgd, shards_of(ours))
    assert shards_of(sgd) is ours.shards and ours.shards is not None
    assert {*vars(sgd)} == names  # nothing is written on it
    set_shards(ours, ShardGroup(group, True))
    assert shards_of(ours) is ours.shards and not ours.shards.whole_tensors


def test_an_exchange_of_any_optimizer_is_kept_while_it_fits(group: dist.ProcessGroup) -> None:
    sgd = torch.optim.SGD(parameters(SHAPES), lr=0.1)
    first = exchange_of(sgd)
    assert first.groups == [] and exchange_of(sgd, first) is first
    set_shards(sgd, ShardGroup(group, False))
    second = exchange_of(sgd, first)
    assert second.groups == [group] and exchange_of(sgd, second) is second
    sgd.add_param_group({"params": parameters([(4,)])})
    assert exchange_of(sgd, second) is not second


def test_verdicts_of_ranks_differ_only_where_there_are_shards(group: dist.ProcessGroup) -> None:
    params: list[torch.Tensor] = [*parameters(SHAPES)]
    assert not verdicts_differ(params, None)
    assert not verdicts_differ(params, ShardGroup(None, False))
    assert verdicts_differ(params, ShardGroup(group, False))


def test_our_grad_scaler_asks_the_other_ranks_and_can_be_pickled(group: dist.ProcessGroup) -> None:
    (p,) = params = parameters([(3,)])
    sgd = torch.optim.SGD(params, lr=0.1)
    set_shards(sgd, ShardGroup(group, False))
    scaler = GradScaler("cpu", init_scale=8.0)
    for step in range(2):
        scaler.scale(torch.ones(()))
        p.grad = torch.full((3,), torch.inf if step else 8.0)
        before = p.detach().clone()
        with counted() as sizes:
            scaler.step(sgd)
        scaler.update()
        assert sizes == [1] and torch.equal(p, before) == bool(step)
        scaler = pickle.loads(pickle.dumps(scaler))
    assert scaler.get_scale() == 4.0
