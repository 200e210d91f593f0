"""The former name of `tam.sharding`."""

from tam.sharding import Exchange, GradScaler, ShardGroup

__all__ = ["Exchange", "GradScaler", "ShardGroup"]
