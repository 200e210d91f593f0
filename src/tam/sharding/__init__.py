"""Parameters whose shards lie on several ranks.

A step works on each rank's own shard. Only the sums of the cosine, and |g|, are over all shards: `Exchange`
adds them up between measuring and settling. A backend does the arithmetic. It does not communicate. With
other ranks it puts its sums into the table that the exchange adds up.
"""

from tam.sharding.exchange import Exchange
from tam.sharding.grad_scaler import GradScaler
from tam.sharding.shard_group import ShardGroup

__all__ = ["Exchange", "GradScaler", "ShardGroup"]
