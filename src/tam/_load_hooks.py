"""Hooks that run last in `Optimizer.load_state_dict`, after all hooks that the user has registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


@contextmanager
def hooks_around_load(
    optimizer: Optimizer,
    before: Callable[[Optimizer, dict[str, Any]], dict[str, Any]],
    after: Callable[[Optimizer], None],
) -> Iterator[None]:
    """Inside, a load runs `before` after all of the users' own hooks, and `after` before all of them."""
    pre = optimizer.register_load_state_dict_pre_hook(before)
    post = optimizer.register_load_state_dict_post_hook(after, prepend=True)
    try:
        yield
    finally:
        pre.remove()
        post.remove()
