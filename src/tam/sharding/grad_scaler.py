"""torch's GradScaler for gradients whose shards lie on several ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tam.sharding.dtensor import local_tensor
from tam.sharding.exchange import Exchange, exchange_of

# Not in the GradScaler, which can be pickled.
_EXCHANGES: WeakKeyDictionary[Optimizer, Exchange] = WeakKeyDictionary()


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gradients whose shards lie on several ranks.

    torch's own class accepts DTensors of one mesh only. This one accepts all that the optimizer accepts:
    several meshes, plain parameters among DTensors, `shard_group`, ranks without gradients. All ranks that
    exchange sums get the same verdict, so they skip the same steps and keep the same scale.

    Args:
        device: the type of the device, "cuda" or "cpu"
        init_scale: the scale at the start
        growth_factor: multiplies the scale after `growth_interval` steps in a row without inf or NaN
        backoff_factor: multiplies the scale after a step with inf or NaN, which is skipped
        growth_interval: see `growth_factor`
        enabled: False turns scaling off; `step` then only calls the optimizer's

    Examples:
        >>> import torch, tam
        >>> from tam.sharding import GradScaler
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> optimizer, scaler = tam.TAM([w], lr=0.2), GradScaler("cpu", init_scale=8.0)
        >>> scaler.scale(w.sum()).backward()
        >>> w.grad
        tensor([8., 8.])
        >>> scaler.step(optimizer)  # with the gradient divided by 8
        >>> scaler.update()
        >>> w.data
        tensor([0.9000, 0.9000])
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups = []  # what torch's own code reads of an optimizer, with each rank's shards as gradients
        for group in optimizer.param_groups:
            shards = [local_tensor(p.grad) for p in group["params"] if p.grad is not None]
            holders = [g.detach() for g in shards]
            for holder, g in zip(holders, shards, strict=True):
                holder.grad = g
            groups.append({"params": holders})
        stand_in: Any = SimpleNamespace(param_groups=groups)
        verdicts = super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)
        if not verdicts:
            verdicts[found_inf.device] = found_inf
        exchange = exchange_of(optimizer, _EXCHANGES.get(optimizer))
        _EXCHANGES[optimizer] = exchange
        for verdict in verdicts.values():
            for process_group in exchange.groups:
                dist.all_reduce(verdict, group=process_group)
        return verdicts
