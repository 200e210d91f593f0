"""Stacked GPTs: each run computes what it computes alone, and no byte sees a later one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tam.lab.models.gpt import BYTES, GPT, SIZES, layer_type

TINY = GPT(*SIZES["tiny"], context=12)


def draw_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(BYTES, shape, generator=torch.Generator().manual_seed(seed))


def stacked(*seeds: int) -> list[Tensor]:
    return [torch.stack(each) for each in zip(*(TINY.init(seed) for seed in seeds), strict=True)]


@pytest.mark.parametrize(
    "size, expected", [("25M", 25_436_672), ("4.9M", 4_852_992), ("0.9M", 853_120), ("tiny", 41_120)]
)
def test_numbers_of_parameters(size: str, expected: int) -> None:
    layers, width, heads = SIZES[size]
    shapes = GPT(layers, width, heads, context=256).shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == expected
    assert expected == 2 * BYTES * width + layers * (12 * width**2 + 2 * width) + width


def test_layer_types() -> None:
    types = {name: layer_type(name) for name in TINY.shapes()}
    block = {
        "attention_norm": "norm", "attention_in": "attention", "attention_out": "attention",
        "mlp_norm": "norm", "mlp_in": "mlp", "mlp_out": "mlp",
    }  # fmt: skip
    expected = {f"{i}.{name}": kind for i in range(2) for name, kind in block.items()}
    assert types == {"embedding": "embedding", **expected, "norm": "norm", "head": "head"}


def losses_by_module(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of every position of one run, [batch, context], written out with complex rotations."""
    heads, (batch, context) = TINY.heads, x.shape
    width, half = TINY.width, TINY.width // heads // 2
    speeds = 10000.0 ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones(context, half), torch.arange(context)[:, None] * speeds)
    h = params["embedding"][x]

    def rotate(z: Tensor) -> Tensor:
        pairs = torch.complex(z[..., :half], z[..., half:]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    def norm(z: Tensor, weight: Tensor) -> Tensor:
        centred = z - z.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    for i in range(TINY.layers):
        own = {name: params[f"{i}.{name}"] for name in ("attention_norm", "attention_in", "attention_out")}
        parts = (norm(h, own["attention_norm"]) @ own["attention_in"]).split(width, -1)
        q, k, v = (part.view(batch, context, heads, -1).transpose(1, 2) for part in parts)
        scores = rotate(q) @ rotate(k).transpose(2, 3) / math.sqrt(width // heads)
        seen = torch.ones(context, context).tril().bool()
        a = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        h = h + a.transpose(1, 2).reshape(batch, context, width) @ own["attention_out"]
        z = norm(h, params[f"{i}.mlp_norm"]) @ params[f"{i}.mlp_in"]
        h = h + functional.gelu(z, approximate="tanh") @ params[f"{i}.mlp_out"]
    logits = norm(h, params["norm"]) @ params["head"]
    return functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")


def test_the_loss_is_that_of_the_network_written_out() -> None:
    params, (x, y) = TINY.init(3), draw_bytes(2, 4, 12)
    found = TINY.losses([p[None] for p in params], x[None], y[None], torch.float32)
    expected = losses_by_module(dict(zip(TINY.shapes(), params, strict=True)), x, y).mean()
    torch.testing.assert_close(found[0], expected)


def test_stacked_runs_are_each_run_alone() -> None:
    params, (x, y) = stacked(0, 1, 2), draw_bytes(2, 3, 4, 12)
    losses = TINY.losses([p.requires_grad_() for p in params], x, y, torch.float32)
    grads = torch.autograd.grad(losses.sum(), params)
    for run in range(3):
        own = [p[run : run + 1].detach().requires_grad_() for p in params]
        (alone,) = TINY.losses(own, x[run : run + 1], y[run : run + 1], torch.float32)
        torch.testing.assert_close(losses[run], alone)
        for whole, part in zip(grads, torch.autograd.grad(alone, own), strict=True):
            torch.testing.assert_close(whole[run : run + 1], part, atol=1e-6, rtol=1e-4)


def test_no_byte_sees_a_later_one() -> None:
    """The losses of a prefix are what they are in the whole sequence."""
    params, (x, y) = stacked(0), draw_bytes(2, 1, 1, 12)

    def total(count: int) -> float:
        return count * float(TINY.losses(params, x[..., :count], y[..., :count], torch.float32))

    expected = losses_by_module(dict(zip(TINY.shapes(), (p[0] for p in params), strict=True)), x[0], y[0])
    found = [total(1), *(total(count + 1) - total(count) for count in range(1, 12))]
    assert found == pytest.approx(expected[0].tolist(), abs=1e-4)


def test_the_embeddings_of_later_bytes_have_no_gradient() -> None:
    """With bytes that occur once, the loss of the first positions moves only the embeddings seen there."""
    params = [p.requires_grad_() for p in stacked(0)]
    x = torch.arange(12)[None, None]
    for n in (1, 5, 12):
        loss = TINY.losses(params, x[..., :n], x[..., :n] + 1, torch.float32).sum()
        (grad,) = torch.autograd.grad(loss, params[:1])
        assert grad[0].abs().sum(1).nonzero().flatten().tolist() == list(range(n))


def test_a_start_has_about_the_loss_of_chance_and_depends_on_the_seed() -> None:
    params, (x, y) = stacked(0, 0, 1), draw_bytes(2, 1, 8, 12).expand(2, 3, 8, 12)
    losses = TINY.losses(params, x, y, torch.float32)
    assert losses[0] == losses[1] != losses[2]
    assert losses.tolist() == pytest.approx([math.log(BYTES) + 0.5] * 3, abs=0.4)
    assert all((p == 1).all() for name, p in zip(TINY.shapes(), params, strict=True) if "norm" in name)
