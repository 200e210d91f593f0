"""From one optimizer to another on the same parameters.

`transfer` converts learning rates. For a hand-over, `rules` decides what changes, `plan` holds the decisions
and explains them, `carry` moves the buffers, `schedulers` re-attaches schedulers, and `handover` does it all.
`warmup` is an optimizer that hands over by itself.
"""

from tam.switching.handover import handover, match
from tam.switching.plan import Plan
from tam.switching.rules import explain_handover
from tam.switching.transfer import transfer_lr
from tam.switching.warmup import Warmup

__all__ = ["Plan", "Warmup", "explain_handover", "handover", "match", "transfer_lr"]
