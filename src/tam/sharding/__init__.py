"""Parameters whose shards lie on several ranks.

A step works on each rank's own shard. Only the sums of the cosine, and |g|, are over all shards: `Exchange`
adds them up between measuring and settling. A backend does the arithmetic. It does not communicate. With
other ranks it puts its sums into the table that the exchange adds up.
"""

from tam.sharding.agreement import SegmentInfo, agree_across_ranks
from tam.sharding.dtensor import (
    has_other_ranks,
    is_dtensor,
    local_tensor,
    redistribute_gradient,
    shard_groups,
)
from tam.sharding.exchange import Exchange, exchange_of, verdicts_differ
from tam.sharding.grad_scaler import GradScaler
from tam.sharding.shard_group import ShardGroup, set_shards, shards_of
from tam.sharding.sums import FOUND_INF, Sum

__all__ = [
    "FOUND_INF",
    "Exchange",
    "GradScaler",
    "SegmentInfo",
    "ShardGroup",
    "Sum",
    "agree_across_ranks",
    "exchange_of",
    "has_other_ranks",
    "is_dtensor",
    "local_tensor",
    "redistribute_gradient",
    "set_shards",
    "shard_groups",
    "shards_of",
    "verdicts_differ",
]  # fmt: skip
