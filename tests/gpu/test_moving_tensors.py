"""Tensors that move, or change their layout, between two steps: on a GPU, which reuses addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tam
from tests import moving_tensors
from tests.helpers import ALL, PAIRS, TORQUE, WAYS, options_for

IDS = [f"{cls.__name__}-{way}" for cls, way in PAIRS]
CASES = pytest.mark.parametrize("cls, way", [(cls, WAYS[way]) for cls, way in PAIRS], ids=IDS)


@CASES
@pytest.mark.parametrize("kind", moving_tensors.GRADIENTS)
def test_gradients_of_other_layouts_at_one_address(cls: type, way: dict[str, Any], kind: str) -> None:
    moving_tensors.gradients_at_one_address(cls, way, "cuda", kind)


@CASES
def test_conjugated_gradients(cls: type, way: dict[str, Any]) -> None:
    moving_tensors.conjugated_gradients(cls, way, "cuda")


@CASES
@pytest.mark.parametrize("kind", moving_tensors.CHANGES)
def test_changes_between_steps(cls: type, way: dict[str, Any], kind: str) -> None:
    moving_tensors.change_between_steps(cls, way, "cuda", kind)


@CASES
def test_another_dtype(cls: type, way: dict[str, Any]) -> None:
    moving_tensors.another_dtype(cls, way, "cuda")


@CASES
def test_a_note_before_the_first_step(cls: type, way: dict[str, Any]) -> None:
    moving_tensors.a_note_before_the_first_step(cls, way, "cuda")


@pytest.mark.parametrize("cls", ALL)
def test_a_graph_whose_backward_transposes_the_gradient(cls: type) -> None:
    # Nobody sets addresses here: the allocator gives out the one that was freed before.
    torch.manual_seed(0)
    target = torch.randn(256, 256, device="cuda")
    w = torch.nn.Parameter(torch.randn(256, 256, device="cuda"))
    q = torch.nn.Parameter(w.detach().clone())
    plain = options_for(cls, foreach=False, fused=False)
    for p, optimizer in ((w, cls([w], lr=1e-2)), (q, cls([q], lr=1e-2, **plain))):
        for step in range(8):
            optimizer.zero_grad()
            loss = ((p.t() if step % 2 else p) * target).sum()
            (p.grad,) = torch.autograd.grad(loss, p)
            optimizer.step()
    torch.testing.assert_close(w, q)


@pytest.mark.parametrize("recorded", [torch.optim.SGD, tam.TAM])
def test_a_recorder_sees_a_gradient_of_another_layout(recorded: type) -> None:
    """|g| and s of a transposed gradient at the address of a plain one: from float64 sums of it."""
    p = torch.nn.Parameter(moving_tensors.square(torch.float32, "cuda", 1))
    optimizer = recorded([p], lr=1e-3, momentum=0.9)
    buffer = torch.empty_like(p)
    with tam.Recorder(optimizer, quantities=["grad_norm"]) as recorder:
        expected = []
        for step in range(6):
            buffer.copy_(moving_tensors.square(torch.float32, "cuda", 100 + step))
            p.grad = buffer.t() if step % 2 else buffer
            p.grad = p.grad[:1].expand_as(p) if step == 4 else p.grad
            expected.append(float(p.grad.double().norm()))
            optimizer.step()
    found = [float(row["grad_norm"]) for row in recorder.rows()]
    assert found == pytest.approx(expected, rel=1e-5)


@CASES
@pytest.mark.parametrize("device, default", [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_the_default_device_does_not_matter(
    cls: type, way: dict[str, Any], device: str, default: str
) -> None:
    optimizers = []
    for chosen in (device, default):
        p = torch.nn.Parameter(torch.ones(8, device=device))
        optimizer = cls([p], lr=0.01, **way)
        for step in range(3):
            p.grad = torch.full((8,), 1.0 + step, device=device)
            with torch.device(chosen):
                optimizer.step()
        optimizers.append(optimizer)
    torch.testing.assert_close(*(optimizer.param_groups[0]["params"][0] for optimizer in optimizers))


@pytest.mark.parametrize("cls", TORQUE)
def test_a_frozen_part_can_be_moved_to_the_cpu(cls: type) -> None:
    optimizers = []
    for moves in (False, True):
        encoder, head = (torch.nn.Parameter(torch.ones(4, device="cuda")) for _ in range(2))
        optimizer = cls([encoder, head], lr=0.01)
        encoder.grad, head.grad = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
        optimizer.step()
        encoder.requires_grad_(False).grad = None
        if moves:
            encoder.data = encoder.data.cpu()
        for step in range(3):
            head.grad = torch.full((4,), 1.0 + step, device="cuda")
            optimizer.step()
        assert optimizer.backend == "triton" and optimizer.alignment.is_cuda
        optimizers.append(optimizer)
    torch.testing.assert_close(*(optimizer.param_groups[0]["params"][1] for optimizer in optimizers))
