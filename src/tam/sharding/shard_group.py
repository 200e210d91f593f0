"""The process group over which plain tensors are sharded: `shard_group=` and `whole_tensors=`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.optim import Optimizer

from tam._wrappers import unwrap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ShardGroup:
    """What `shard_group=` and `whole_tensors=` say about plain tensors.

    A deep copy shares the process group; a pickle does not contain it.
    """

    def __init__(self, group: ProcessGroup | None, whole_tensors: bool) -> None:
        self.group, self.whole_tensors = group, whole_tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardGroup, (None, self.whole_tensors)

    @staticmethod
    def from_options(group: ProcessGroup | None, whole_tensors: bool, scope: str) -> ShardGroup | None:
        """Return the checked options; None without a group."""
        if not isinstance(whole_tensors, bool):
            raise ValueError(f"whole_tensors must be True or False, got {whole_tensors!r}")
        if group is None:
            if whole_tensors:
                raise ValueError(
                    "whole_tensors=True says how the ranks of shard_group hold tensors: give shard_group, too"
                )
            return None
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            not_in_group: object = dist.GroupMember.NON_GROUP_MEMBER
            outside = " (this rank is not in it)" if group == not_in_group else ""
            raise ValueError(
                "shard_group must be a torch.distributed process group this rank is in, "
                f"got {group!r}{outside}"
            )
        shards = ShardGroup(group, whole_tensors)
        shards.check_scope(scope)
        return shards

    def check_scope(self, scope: str) -> None:
        """Raise if the scope needs to know which tensors of other ranks belong together."""
        if scope == "tensor" and not self.whole_tensors:
            raise ValueError(
                'scope="tensor" with shard_group needs whole_tensors=True: which tensors of other ranks '
                "belong to one of this rank's is not known. ZeroRedundancyOptimizer, for example, splits none"
            )


# torch's own optimizers have no such option, but a Recorder and our GradScaler need to know.
_SHARDS_OF_OTHERS: WeakKeyDictionary[Optimizer, ShardGroup] = WeakKeyDictionary()


def set_shards(optimizer: Optimizer, shards: ShardGroup | None) -> None:
    """Remember how the plain tensors of one of torch's optimizers are sharded."""
    if shards is not None and not hasattr(optimizer, "shards"):
        _SHARDS_OF_OTHERS[optimizer] = shards


def shards_of(optimizer: Optimizer) -> ShardGroup | None:
    """Return how the plain tensors of an optimizer, wrapped or not, are sharded; None if they are not."""
    inner = unwrap(optimizer)
    shards = getattr(inner, "shards", None)
    return shards if isinstance(shards, ShardGroup) else _SHARDS_OF_OTHERS.get(inner)
