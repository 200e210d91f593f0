"""Tensors that move, or change their layout, between two steps: on the CPU."""

from __future__ import annotations

import copy
import sys
from types import FrameType
from typing import Any

import pytest
import torch

import tam
from tam.step.fused import support
from tests import moving_tensors
from tests.helpers import ALL, TORQUE, assert_same, gradients, parameters, train

CLASSES = ALL


@pytest.mark.parametrize("kind", moving_tensors.GRADIENTS)
def test_gradients_of_other_layouts_at_one_address(cls: type, way: dict[str, Any], kind: str) -> None:
    moving_tensors.gradients_at_one_address(cls, way, "cpu", kind)


def test_conjugated_gradients(cls: type, way: dict[str, Any]) -> None:
    moving_tensors.conjugated_gradients(cls, way, "cpu")


@pytest.mark.parametrize("kind", moving_tensors.CHANGES)
def test_changes_between_steps(cls: type, way: dict[str, Any], kind: str) -> None:
    moving_tensors.change_between_steps(cls, way, "cpu", kind)


def test_another_dtype(cls: type, way: dict[str, Any]) -> None:
    moving_tensors.another_dtype(cls, way, "cpu")


def test_a_note_before_the_first_step(cls: type, way: dict[str, Any]) -> None:
    moving_tensors.a_note_before_the_first_step(cls, way, "cpu")


@pytest.mark.parametrize("torque", TORQUE)
def test_a_frozen_parameter_on_another_device_is_left_alone(
    torque: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of a device must never see the address of another one."""
    # A second device with a kernel; its tensors have no addresses at all.
    missing_kernel = support.missing_kernel
    monkeypatch.setattr(
        support, "missing_kernel", lambda device: None if device.type == "meta" else missing_kernel(device)
    )
    optimizers = []
    for fused in (None, False):
        trained, frozen = parameters([(5,)])[0], torch.nn.Parameter(torch.ones(4, device="meta"))
        optimizer = torque([trained, frozen], scope="tensor", fused=fused)
        frozen.grad, trained.grad = torch.ones(4, device="meta"), torch.ones(5)
        optimizer.step()  # in torch operations: the parameters are on several devices
        frozen.requires_grad_(False).grad = None
        for step in range(2):
            trained.grad = gradients([trained], step)[0]
            optimizer.step()
        optimizers.append(optimizer)
    assert [optimizer.backend for optimizer in optimizers] == ["c", "loop"]
    torch.testing.assert_close(*(optimizer.param_groups[0]["params"][0] for optimizer in optimizers))


def test_a_graph_whose_backward_transposes_the_gradient() -> None:
    # Nobody sets addresses here: the allocator gives out the one that was freed before.
    torch.manual_seed(0)
    target = torch.randn(256, 256)
    w = torch.nn.Parameter(torch.randn(256, 256))
    q = torch.nn.Parameter(w.detach().clone())
    pairs = [(w, tam.TAM([w], lr=0.1)), (q, tam.TAM([q], lr=0.1, fused=False))]
    for step in range(8):
        for p, optimizer in pairs:
            optimizer.zero_grad()
            loss = ((p.t() if step % 2 else p) * target).sum()
            (p.grad,) = torch.autograd.grad(loss, p)
            optimizer.step()
    torch.testing.assert_close(w, q)


@pytest.mark.parametrize("torque", TORQUE)
@pytest.mark.parametrize(
    "what, size", [(what, size) for what in ("parameter", "momentum", "gradient") for size in (0, 8)]
)
def test_a_resized_storage_is_refused(torque: type, what: str, size: int) -> None:
    (p,) = params = parameters([(6, 7)])
    optimizer = train(torque(params), 3)
    key = "momentum_buffer" if torque is tam.TAM else "exp_avg"
    held = {"parameter": p.data, "momentum": optimizer.state[p][key], "gradient": p.grad.data}[what]
    held.untyped_storage().resize_(size)
    with pytest.raises(RuntimeError, match="storage"):
        optimizer.step()


@pytest.mark.parametrize("torque", TORQUE)
def test_tensors_that_are_not_aligned(torque: type) -> None:
    def unaligned(seed: int) -> torch.Tensor:
        memory = bytearray(4 * 40 + 1)
        x = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=40)
        return x.copy_(parameters([(40,)], seed=seed)[0].detach())

    params = [torch.nn.Parameter(unaligned(0)), torch.nn.Parameter(unaligned(0).clone())]
    optimizers = [torque([params[0]]), torque([params[1]], fused=False)]
    aligned = torque([torch.nn.Parameter(params[1].detach().clone())], fused=True)
    for step in range(6):
        for p in (*params, *aligned.param_groups[0]["params"]):
            p.grad = unaligned(10 + step) if step % 3 else unaligned(10 + step).clone()
        for optimizer in (*optimizers, aligned):
            optimizer.step()
    torch.testing.assert_close(params[0], params[1])
    torch.testing.assert_close(aligned.param_groups[0]["params"][0], params[1])


@pytest.mark.parametrize("torque", TORQUE)
def test_a_parameter_that_shrinks_is_refused(torque: type) -> None:
    (p,) = params = parameters([(8, 8)])
    optimizer = train(torque(params), 3)
    p.grad = None
    p.data = p.data[:4]
    p.grad = torch.ones(4, 8)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="shape"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("torque", TORQUE)
def test_a_step_that_is_interrupted_anywhere(torque: type) -> None:
    """After Ctrl-C at any line of the fused step, the next step is right, whatever was done of the first."""
    for stop_at in range(1, 600):
        params = parameters([(5, 4), (7,)])
        optimizer = train(torque(params, fused=True), 2)
        optimizer.param_groups[0]["lr"] *= 2
        for p, g in zip(params, gradients(params, 10), strict=True):
            p.grad = g
        if not _interrupted(optimizer, stop_at):
            assert stop_at > 30  # every line was met
            return
        for p, g in zip(params, gradients(params, 11), strict=True):
            p.grad = g.clone()
        twin = copy.deepcopy(optimizer)
        for p, q in zip(params, twin.param_groups[0]["params"], strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        twin.step()
        assert_same(optimizer, twin)
    pytest.fail("the step has too many lines")


def _interrupted(optimizer: Any, stop_at: int) -> bool:
    """Steps until so many lines of the library have run. Returns whether it came to that."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if "/tam/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == stop_at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        optimizer.step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_emptied_groups_do_nothing(cls: type, way: dict[str, Any]) -> None:
    params = parameters([(3,), (4,)])
    optimizer = train(cls(params, **way), 2)
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["params"].clear()
    optimizer.step()
    optimizer.param_groups.clear()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    if cls in TORQUE:
        assert float(optimizer.alignment) == 0 and float(optimizer.damping) == 0.5


def test_without_gradients_nothing_happens(cls: type, way: dict[str, Any]) -> None:
    params = parameters([(3,), (4,)])
    optimizer = cls(params, **way)
    optimizer.step()
    assert not any(optimizer.state.values())
    # What the kernel could not take does no harm while it has no gradient.
    other = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)[::2])
    optimizer.add_param_group({"params": [other]})
    optimizer.step()
    train_first = [p.detach().clone() for p in params]
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(params[0], train_first[0]) and torch.equal(params[1], train_first[1])


@pytest.mark.parametrize("torque", TORQUE)
@pytest.mark.parametrize("freed", ["storage", "replaced", "another dtype"])
def test_a_frozen_parameter_whose_memory_is_freed_takes_no_part(torque: type, freed: str) -> None:
    def run(**way: Any) -> torch.Tensor:
        a, b = params = parameters([(5,), (3,)])
        optimizer = train(torque(params, **way), 2)
        b.grad = None
        b.requires_grad_(False)
        if freed == "storage":
            b.data.untyped_storage().resize_(0)
        else:
            b.data = torch.empty(0) if freed == "replaced" else b.data.to(torch.int8)
        for step in range(3):
            a.grad = gradients([a], step)[0]
            optimizer.step()
        return a.detach()

    torch.testing.assert_close(run(fused=True), run(fused=False, foreach=False))


@pytest.mark.parametrize("torque", TORQUE)
def test_a_gradient_without_memory_is_left_to_torch(torque: type) -> None:
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    (p,), (q,) = parameters([(4, 4)]), parameters([(4, 4)])
    optimizers = [torque([p]), torque([q], fused=False, foreach=False)]
    for step in range(4):
        (g,) = gradients([p], step)
        for x, optimizer in zip((p, q), optimizers, strict=True):
            x.grad = g.clone() if step % 2 else two_tensor(g.clone(), g.clone())
            optimizer.step()
    torch.testing.assert_close(p.detach(), q.detach())
    optimizers[0].param_groups[0]["fused"] = True
    p.grad = two_tensor(g.clone(), g.clone())
    with pytest.raises(RuntimeError, match="memory of its own"):
        optimizers[0].step()


@pytest.mark.parametrize("torque", TORQUE)
@pytest.mark.parametrize("key", ["step", "alignment"])
def test_a_scalar_of_the_state_that_was_emptied_is_refused(torque: type, key: str) -> None:
    (p,) = params = parameters([(4,)])
    optimizer = train(torque(params, fused=True), 2)
    if key in optimizer.state[p]:
        optimizer.state[p][key].resize_(0)
        with pytest.raises(RuntimeError, match="must be one number"):
            optimizer.step()
