"""From one optimizer to another on the same parameters.

`transfer` converts learning rates. A hand-over is planned by `rules`, written down as a `plan`, and done by
`handover`, with the buffers moved by `carry` and schedulers re-attached by `schedulers`. `warmup` does it by itself.
"""

from tam.switching.handover import explain_handover, handover, match
from tam.switching.plan import Plan
from tam.switching.transfer import transfer_lr
from tam.switching.warmup import Warmup

__all__ = ["Plan", "Warmup", "explain_handover", "handover", "match", "transfer_lr"]
