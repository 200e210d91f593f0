"""The loss of a batch's masked tokens, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tam.lab.core.errors import LabError
from tam.lab.models.language import transformers
from tam.lab.training.cuda_graph import CapturedStep
from tam.lab.training.metrics import autocast

UNMASKED = "unmasked"


class MaskedLoss:
    """A network's own loss, in bfloat16 on GPUs. The masked-LM head sees only the tokens to predict.

    The logits of all tokens can be the largest part of the work, and the loss needs no others.
    """

    def __init__(self, model: Any) -> None:
        output = model.get_output_embeddings()
        heads = [part for part in model.children() if any(module is output for module in part.modules())]
        if len(heads) != 1 or model.config.is_encoder_decoder:
            raise LabError(f"{type(model).__name__} is not an encoder with a masked-LM head")
        heads[0].register_forward_pre_hook(self._select_states)
        self.places: Tensor

    def _select_states(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *more = inputs
        # Not states[places]: its backward pass sorts.
        return (states.flatten(0, 1).index_select(0, self.places), *more)

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        self.places = batch["places"]
        with autocast(self.places.device):
            loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss


def compile_layers(model: Any) -> bool:
    """Compile a network's layers. Return False, and do nothing, if it has more than torch's attention.

    Each layer is compiled alone, once for all layers and all networks of a process. All tokens attend to all,
    and attention with a mask is several times slower. transformers sees that there is nothing to mask, but
    some versions do not look while they are compiled or captured. For an attention with a name that is not
    theirs they make no mask, not even for the windows that some networks have.
    """
    has_windows = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    if model.config._attn_implementation != "sdpa" or has_windows:
        return False
    attentions = transformers().AttentionInterface()
    attentions.register(UNMASKED, attentions["sdpa"])
    model.set_attn_implementation(UNMASKED)
    for part in model.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                layer.compile(dynamic=False)
    return True


class BackwardPass:
    """Computes loss and gradients of a batch. With `graph`, each shape of a batch has a CUDA graph."""

    def __init__(self, loss: MaskedLoss, device: torch.device, graph: bool) -> None:
        self.loss, self.device, self.graph = loss, device, graph
        self.steps: dict[torch.Size, tuple[dict[str, Tensor], CapturedStep]] = {}  # with the batch they read
        self.outputs: dict[torch.Size, tuple[Tensor, list[tuple[Tensor, Tensor | None]]]] = {}

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if not self.graph:
            return self._compute(model, batch)
        shape = batch["places"].shape
        if shape not in self.steps:
            own_batch = {key: value.clone() for key, value in batch.items()}
            self.steps[shape] = own_batch, CapturedStep(partial(self._step, model, own_batch), self.device)
        own_batch, step = self.steps[shape]
        for key, value in batch.items():
            own_batch[key].copy_(value)
        step()
        loss, gradients = self.outputs[shape]
        for p, gradient in gradients:
            p.grad = gradient  # the Trainer has set it to None
        return loss.clone()  # the next replay overwrites it

    def _step(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        shape = batch["places"].shape
        self.outputs.pop(shape, None)  # frees the last gradients
        self.outputs[shape] = self._compute(model, batch), [(p, p.grad) for p in model.parameters()]

    def _compute(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        model.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
