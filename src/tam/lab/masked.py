"""The loss of a batch's masked tokens, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tam.lab.graphed import Graphed
from tam.lab.models.language import transformers
from tam.lab.store import LabError


class Loss:
    """A network's own, in bfloat16 on GPUs; the part that makes logits sees the tokens to be predicted alone.

    It needs no others, and of all a network does for a batch, their logits may be the largest part.
    """

    def __init__(self, model: Any) -> None:
        last = model.get_output_embeddings()
        parts = [part for part in model.children() if any(one is last for one in part.modules())]
        if len(parts) != 1 or model.config.is_encoder_decoder:
            raise LabError(f"{type(model).__name__} is no encoder with a masked-LM head")
        parts[0].register_forward_pre_hook(self._choose)
        self.places: Tensor

    def _choose(self, head: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *more = given
        return (states.flatten(0, 1).index_select(0, self.places), *more)  # going back, an index would sort

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        self.places = batch["places"]
        device = self.places.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found: Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return found


def quicken(model: Any) -> bool:
    """Compiles a network's layers; False where attention is more than torch's, and all is left as it is.

    Each layer alone: they are compiled once for all of them, and for all networks of a process. All tokens
    attend to all, and attention with a mask is several times slower. transformers sees that, but some
    versions do not look while they are compiled or captured; for an attention by a name that is not theirs
    they make none, not even the windows that some networks have.
    """
    windows = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    if model.config._attn_implementation != "sdpa" or windows:
        return False
    attentions = transformers().AttentionInterface()
    attentions.register(UNMASKED, attentions["sdpa"])
    model.set_attn_implementation(UNMASKED)
    for part in model.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                layer.compile(dynamic=False)
    return True


UNMASKED = "unmasked"


class Backward:
    """Loss and gradients of a batch; if wanted, after some batches of its shape, as a CUDA graph."""

    def __init__(self, loss: Loss, device: torch.device, graph: bool) -> None:
        self.loss, self.device, self.graph = loss, device, graph
        self.steps: dict[torch.Size, tuple[dict[str, Tensor], Graphed]] = {}  # by shape, with what they read
        self.found: dict[torch.Size, tuple[Tensor, list[tuple[Tensor, Tensor | None]]]] = {}

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if not self.graph:
            return self._backward(model, batch)
        shape = batch["places"].shape
        if shape not in self.steps:
            read = {key: value.clone() for key, value in batch.items()}
            self.steps[shape] = read, Graphed(partial(self._step, model, read), self.device)
        read, step = self.steps[shape]
        for key, value in batch.items():
            read[key].copy_(value)
        step()
        loss, gradients = self.found[shape]
        for p, gradient in gradients:
            p.grad = gradient  # the Trainer has taken it away
        return loss.clone()  # the next replay overwrites it

    def _step(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        shape = batch["places"].shape
        self.found.pop(shape, None)  # the last gradients make room
        self.found[shape] = self._backward(model, batch), [(p, p.grad) for p in model.parameters()]

    def _backward(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        model.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
