"""The check that all ranks have the same parameters and options, and their agreement on each segment's s.

It is done once, before the first exchange: ranks that differ would add up what does not belong together, or
wait for each other forever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from tam.sharding.dtensor import is_dtensor
from tam.sharding.exchange import Exchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class SegmentInfo:
    """What a rank knows about a segment: s if it has state, the dtype of s if it has parameters."""

    alignment: float | None
    is_float64: bool | None


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others."""

    digest: str  # of its list of parameters
    options: dict[str, object]
    device: torch.device | None
    segments: list[SegmentInfo]
    own_segments: set[int]  # with a parameter that not all ranks of the group hold, such as an expert's
    difference: str  # found in another group


def agree_across_ranks(
    exchange: Exchange, segments: list[SegmentInfo], options: dict[str, object]
) -> list[SegmentInfo]:
    """Return what all ranks know together about each segment, given what this one knows.

    Raises:
        RuntimeError: on all ranks, if ranks that add up their sums differ in parameters or options.
    """
    listed, difference = _list_parameters(exchange), ""
    digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()
    for group in exchange.groups:
        ranks = set(dist.get_process_group_ranks(group))
        mine = {k for k, holders in enumerate(exchange.holders) if not ranks <= holders}
        # A difference found in one group is passed on to the next: some ranks are only in that one.
        report = _Report(digest, options, exchange.device, segments, mine, difference)
        reports = _all_gather(report, group)
        # The ranks need not agree on these. All must leave out the same ones, or some would wait for others.
        own_segments = {k for report in reports for k in report.own_segments}
        lists = [listed] * len(reports)
        if len({report.digest for report in reports}) > 1:
            lists = _all_gather(listed, group)
        first = reports[0]
        for i, report in enumerate(reports):
            names = [f"rank {dist.get_global_rank(group, j)}" for j in (i, 0)]
            difference = difference or report.difference or _compare_lists(lists[0], lists[i], *names)
            difference = difference or _compare_options(first.options, report.options, *names)
            if not exchange.has_whole_tensors:
                difference = difference or _compare_alignments(first, report, own_segments, *names)
        kinds = sorted({report.device.type for report in reports if report.device is not None})
        if len(kinds) > 1:
            difference = difference or f"the ranks' parameters are on different kinds of devices: {kinds}"
        elif exchange.device is None and kinds:
            index = torch.cuda.current_device() if kinds == ["cuda"] else 0
            exchange.device = torch.device("cuda", index) if kinds == ["cuda"] else torch.device(kinds[0])
        if not exchange.has_whole_tensors and not difference:
            everyones = zip(*(report.segments for report in reports), strict=True)
            segments = [
                own if k in own_segments else _combine(infos)
                for k, (own, infos) in enumerate(zip(segments, everyones, strict=True))
            ]
    if difference:
        raise RuntimeError(difference)
    exchange.has_agreed = True
    return segments


def _list_parameters(exchange: Exchange) -> list[str]:
    """Describe what must be the same on all ranks: with `shard_group` nothing of plain tensors."""
    listed = []
    for i, p in enumerate(exchange.params):
        if is_dtensor(p):
            mesh: Any = p.device_mesh  # type: ignore[attr-defined]
            # Plain shards are added over one group, so DTensors among them must be on one mesh.
            where = "" if exchange.plain_group is None else f" over ranks {mesh.mesh.flatten().tolist()}"
            kind = f"{tuple(p.shape)} {p.dtype} {p.placements}"  # type: ignore[attr-defined]
            listed.append(f"parameter {i} is {kind}{where}")
        elif exchange.shards is None:
            listed.append(f"parameter {i} is {tuple(p.shape)} {p.dtype}")
    return listed


def _all_gather(mine: T, group: ProcessGroup) -> list[T]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _combine(infos: Sequence[SegmentInfo]) -> SegmentInfo:
    """Return s of the first rank that knows it, and float64 if all ranks with parameters have it."""
    s = next((info.alignment for info in infos if info.alignment is not None), None)
    wide = [info.is_float64 for info in infos if info.is_float64 is not None]
    return SegmentInfo(s, all(wide) if wide else None)


def _compare_lists(ours: list[str], theirs: list[str], there: str, here: str) -> str:
    """Return the first difference of two lists; empty if there is none."""
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return f"{b} on {there}, but {a} on {here}"
    if len(ours) != len(theirs):
        return f"{there} has {len(theirs)} parameters and {here} has {len(ours)}"
    return ""


def _compare_options(ours: dict[str, object], theirs: dict[str, object], there: str, here: str) -> str:
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name)!r} on {there} and {ours.get(name)!r} on {here}"
    return ""


def _compare_alignments(ours: _Report, theirs: _Report, own_segments: set[int], there: str, here: str) -> str:
    for k, (a, b) in enumerate(zip(ours.segments, theirs.segments, strict=False)):
        if k in own_segments or a.alignment is None or b.alignment is None:
            continue
        if abs(a.alignment - b.alignment) > 1e-6:
            return f"the alignment of segment {k} is {b.alignment} on {there} and {a.alignment} on {here}"
    return ""
