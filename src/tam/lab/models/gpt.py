"""Byte-level GPTs, stacked: the parameters of all runs of a population are [runs, ...].

Pre-norm blocks with rotary positions, GELU, no biases and no dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BYTES = 256
SIZES = {  # layers, width, heads
    "25M": (8, 512, 8), "4.9M": (6, 256, 4), "0.9M": (4, 128, 4), "tiny": (2, 32, 2),
}  # fmt: skip


@dataclass(frozen=True)
class GPT:
    """The shape of a network.

    Attributes:
        layers: The number of blocks.
        width: Of the residual stream.
        heads: Of the attention.
        context: The number of bytes that a network sees.
    """

    layers: int
    width: int
    heads: int
    context: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter of one run, by name."""
        w = self.width
        block = {
            "attention_norm": (w,), "attention_in": (w, 3 * w), "attention_out": (w, w),
            "mlp_norm": (w,), "mlp_in": (w, 4 * w), "mlp_out": (4 * w, w),
        }  # fmt: skip
        blocks = {f"{i}.{name}": shape for i in range(self.layers) for name, shape in block.items()}
        ends = {"norm": (w,), "head": (w, BYTES)}
        return {"embedding": (BYTES, w), **blocks, **ends}

    def init(self, seed: int) -> list[Tensor]:
        """Return the initial parameters of one run."""
        generator = torch.Generator().manual_seed(seed)
        params = []
        for name, shape in self.shapes().items():
            if "norm" in name:
                params.append(torch.ones(shape))
                continue
            # What a matrix adds to the stream is small at the start, the smaller the more layers there are.
            scale = 1 / math.sqrt(2 * self.layers) if name.endswith("_out") else 1.0
            fan_in = self.width if name == "embedding" else shape[0]
            params.append(torch.randn(shape, generator=generator) * scale / math.sqrt(fan_in))
        return params

    def losses(self, params: Sequence[Tensor], x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mean cross-entropy of each run, [runs].

        Args:
            params: Stacked parameters, in the order of `shapes`.
            x: Bytes, [runs, batch, context].
            y: The bytes that follow them.
            dtype: In which the blocks compute. The loss is in float32.
        """
        runs, batch, context = x.shape
        by_name = dict(zip(self.shapes(), (p.to(dtype) for p in params), strict=True))
        offsets = torch.arange(runs, device=x.device)[:, None, None] * BYTES
        h = functional.embedding(x + offsets, by_name["embedding"].flatten(0, 1))
        h = h.view(runs, batch * context, self.width)
        turn = self._angles(context, x.device, dtype)
        for i in range(self.layers):
            own = {name.partition(".")[2]: p for name, p in by_name.items() if name.startswith(f"{i}.")}
            z = torch.bmm(_norm(h, own["attention_norm"]), own["attention_in"])
            z = z.view(runs * batch, context, 3, self.heads, -1)
            (q, k), v = _rotate(z[:, :, :2], turn).unbind(2), z[:, :, 2]
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            a = a.transpose(1, 2).reshape(runs, batch * context, self.width)
            h = torch.baddbmm(h, a, own["attention_out"])
            z = functional.gelu(torch.bmm(_norm(h, own["mlp_norm"]), own["mlp_in"]), approximate="tanh")
            h = torch.baddbmm(h, z, own["mlp_out"])
        logits = torch.bmm(_norm(h, by_name["norm"]), by_name["head"])
        each = functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none")
        return each.view(runs, -1).mean(1)

    def _angles(self, context: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine that rotate each position of a head, [context, 1, 1, head / 2]."""
        half = self.width // self.heads // 2
        speeds = 10000.0 ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(context, device=device)[:, None, None, None] * speeds
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys with their positions (rotary embedding, Su et al. 2021)."""
    (a, b), (cos, sin) = x.chunk(2, -1), turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _norm(h: Tensor, weight: Tensor) -> Tensor:
    """Return the layer norm of the stream, with one weight per run."""
    return functional.layer_norm(h, h.shape[-1:]) * weight[:, None]


def layer_type(name: str) -> str:
    """Return what a parameter belongs to: embedding, attention, mlp, norm or head."""
    if "norm" in name:
        return "norm"
    return name.partition(".")[2].partition("_")[0] or name
