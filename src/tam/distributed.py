"""The former name of `tam.sharding`."""

from tam.sharding import *  # noqa: F403
from tam.sharding import __all__ as __all__
