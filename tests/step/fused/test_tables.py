"""What makes the tables of the fused step new; on the CPU, where every machine has it."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

import tam
from tam.step.fused.tables import Fingerprint, GradientTable
from tests.helpers import TORQUE, assert_close, gradients, parameters, params_of, train

SHAPES = [(3, 5), (7,), (2, 2)]


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_whatever_changes_between_steps_is_noticed(cls: type, scope: str) -> None:
    a = cls(parameters(SHAPES), scope=scope, fused=True)
    b = cls(parameters(SHAPES), scope=scope, foreach=False)
    key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
    for step in range(14):
        for optimizer in (a, b):
            params = params_of(optimizer)
            if step == 2:  # a state tensor is replaced
                optimizer.state[params[1]][key] = optimizer.state[params[1]][key] * 0.5
            if step == 3:  # the parameters move
                for p in params:
                    p.data = p.data.clone()
            if step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if step == 5:
                optimizer.add_param_group({"params": parameters([(9,)]), "lr": 0.3})
                params = params_of(optimizer)
            if step == 6:
                optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
            if step == 7:
                optimizer.param_groups[0]["lr"].fill_(0.03)  # in place
            if step == 8:
                for group in optimizer.param_groups:
                    group["smoothing"] = 0.5
            if step == 9:
                optimizer.param_groups[0]["maximize"] = True
            if step == 10:  # all of a parameter's state
                optimizer.state[params[0]] = {k: v.clone() for k, v in optimizer.state[params[0]].items()}
                s = optimizer.state[params[1]]["alignment"]
                optimizer.state[params[0]]["alignment"] = s if scope != "tensor" else s.clone()
            if step == 11:  # the parameters become float64
                for p in params:
                    p.data = p.data.double()
            for j, (p, g) in enumerate(zip(params, gradients(params, step), strict=True)):
                p.grad = None if (j + step) % 4 == 0 else g
            optimizer.step()
        assert_close(a.alignment, b.alignment, 1e-5, scale=1.0)
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert p.dtype == q.dtype == torch.float64
        assert_close(p, q, 2e-5)


@pytest.mark.parametrize("cls", TORQUE)
def test_gradients_of_other_strides_and_dtypes(cls: type) -> None:
    a = cls(parameters([(6, 4)]), fused=True)
    b = cls(parameters([(6, 4)]), foreach=False)
    for step in range(4):
        g = gradients(params_of(b), step)[0]
        params_of(a)[0].grad = g.t().contiguous().t()  # the same gradient, laid out otherwise
        params_of(b)[0].grad = g
        a.step()
        b.step()
    assert_close(params_of(a)[0], params_of(b)[0], 2e-5)


@pytest.mark.parametrize("cls", TORQUE)
def test_gradients_and_replaced_state_are_not_kept_alive(cls: type) -> None:
    optimizer = train(cls(parameters(SHAPES)), 2)
    gradient = weakref.ref(params_of(optimizer)[0].grad)
    optimizer.zero_grad()
    assert gradient() is None
    key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
    replaced = weakref.ref(optimizer.state[params_of(optimizer)[0]][key])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert replaced() is None


def swap_half(p: torch.nn.Parameter) -> None:
    p.data = p.data.half()


def swap_strided(p: torch.nn.Parameter) -> None:
    big = torch.zeros(2 * p.numel())
    big[::2] = p.data.flatten()
    p.data = big[::2].view(p.shape) if p.dim() == 1 else p.data.clone()


def swap_layout(p: torch.nn.Parameter) -> None:
    p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data.clone()


@pytest.mark.parametrize("swap", [swap_half, swap_strided, swap_layout])
@pytest.mark.parametrize("cls", TORQUE)
def test_parameters_swapped_for_what_the_kernel_cannot_take(cls: type, swap: Any) -> None:
    if swap is swap_half and cls is not tam.TAM:
        optimizer = train(cls(parameters(SHAPES)), 2)
        for p in params_of(optimizer):
            swap(p)
        with pytest.raises(ValueError, match="does not support float16"):
            train(optimizer, 1, start=2)
        return
    a = train(cls(parameters(SHAPES), lr=0.01), 2)
    b = train(cls(parameters(SHAPES), lr=0.01, foreach=False), 2)
    for optimizer in (a, b):
        for p in params_of(optimizer):
            swap(p)
        train(optimizer, 2, start=2)
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert_close(p.float(), q.float(), 2e-3 if swap is swap_half else 2e-5)


def test_a_swap_does_not_write_beside_the_parameter() -> None:
    p = torch.nn.Parameter(torch.ones(6))
    optimizer = train(tam.TAM([p]), 2)
    big = torch.ones(12)
    p.data = big[::2]
    train(optimizer, 1, start=2)
    assert big[1::2].tolist() == [1.0] * 6
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(RuntimeError, match="has gaps in memory"):
        optimizer.step()


def moved_state(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for x in state.values():
            x.data = x.data.clone()


def cleared_state(optimizer: Any) -> None:
    optimizer.state[params_of(optimizer)[-1]].clear()


def moved_group(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].insert(0, p)


def looked_at_state(optimizer: Any) -> None:
    late = parameters([(4,)])[0]
    optimizer.param_groups[1]["params"].append(late)
    assert optimizer.state[late] == {}  # a look makes an entry


def foreign_state(optimizer: Any) -> None:
    optimizer.state[params_of(optimizer)[0]]["mine"] = 3


def betas_in_place(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = [0.5, 0.5]


@pytest.mark.parametrize(
    "change", [moved_state, cleared_state, moved_group, looked_at_state, foreign_state, betas_in_place]
)
@pytest.mark.parametrize("cls", TORQUE)
def test_changes_of_structure_are_noticed(cls: type, change: Any) -> None:
    optimizers = []
    for way in ({"fused": True}, {"foreach": False}):
        params = parameters(SHAPES)
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.3}]
        optimizer = train(cls(groups, **way), 2)
        change(optimizer)
        train(optimizer, 1, start=2)
        if change is betas_in_place:
            for group in optimizer.param_groups:
                if "betas" in group:
                    group["betas"][0] = 0.1
        optimizers.append(train(optimizer, 2, start=3))
    for p, q in zip(params_of(optimizers[0]), params_of(optimizers[1]), strict=True):
        assert_close(p, q, 2e-5)


@pytest.mark.parametrize("cls", TORQUE)
def test_a_parameter_that_is_not_finite_is_not_multiplied_by_a_decay_of_zero(cls: type) -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, -torch.inf, 2.0]))
    optimizer = cls([p], fused=True)
    p.grad = torch.tensor([1.0, 0.0, 1.0])
    optimizer.step()
    key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
    assert p[1] == -torch.inf and optimizer.state[p][key][1] == 0


def test_autograd_notices_that_a_parameter_has_moved() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    tam.TAM([p], fused=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_without_any_gradient_is_no_step() -> None:
    optimizer = train(tam.TAM(parameters(SHAPES)), 2)
    s = float(optimizer.alignment)
    optimizer.zero_grad()
    optimizer.step()
    assert float(optimizer.grad_norm) == 0 and float(optimizer.alignment) == s


def test_strides_of_dimensions_of_one_do_not_matter() -> None:
    p = torch.nn.Parameter(torch.randn(8, 1, 1, 1))
    optimizer = tam.TAM([p])
    p.grad = torch.randn(8, 1, 1, 1).as_strided((8, 1, 1, 1), (1, 1, 8, 8))
    optimizer.step()
    # The kernel reads the gradient itself, not a copy.
    assert int(optimizer.tables.backend.gradients[0]) == p.grad.data_ptr()


def test_a_later_sparse_gradient_is_refused_by_name() -> None:
    p = torch.nn.Parameter(torch.randn(4, 2))
    optimizer = train(tam.TAM([("table", p)]), 2)
    p.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"'table'.*sparse"):
        optimizer.step()


def test_many_tensors_make_their_tables_in_reasonable_time() -> None:
    optimizer = train(tam.TAM([{"params": [p]} for p in parameters([(1,)] * 3000)]), 1)
    assert len(optimizer.tables.params) == 3000  # quadratic work would take minutes


def test_a_forked_child_can_step() -> None:
    code = (
        "import os, sys, torch, tam\n"
        "p = torch.nn.Parameter(torch.zeros(300000)); o = tam.TAM([p])\n"
        "torch.set_num_threads(2)\n"
        "p.grad = torch.ones(300000); o.step()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    o.step(); os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "7"


def test_shared_options_that_come_to_differ_are_refused() -> None:
    groups = [{"params": parameters(SHAPES)}, {"params": parameters([(4,)])}]
    optimizer = train(tam.TAM(groups), 2)
    optimizer.param_groups[1]["smoothing"] = 0.5
    with pytest.raises(ValueError, match="smoothing must be the same"):
        train(optimizer, 1)


def test_eager_and_compiled_steps_may_alternate() -> None:
    torch._dynamo.reset()
    a, b = tam.TAM(parameters(SHAPES), lr=0.01), tam.TAM(parameters(SHAPES), lr=0.01)
    compiled = torch.compile(b.step, backend="aot_eager")
    for step in range(4):
        for optimizer in (a, b):
            for p, g in zip(params_of(optimizer), gradients(params_of(a), step), strict=True):
                p.grad = g.clone()
        a.step()
        compiled() if step % 2 else b.step()
    for p, q in zip(params_of(a), params_of(b), strict=True):
        assert_close(p, q, 2e-5)


@pytest.mark.parametrize("cls", TORQUE)
def test_copies_have_tables_of_their_own(cls: type) -> None:
    optimizer = train(cls(parameters(SHAPES)), 2)
    twin = copy.deepcopy(optimizer)
    before = [p.detach().clone() for p in params_of(twin)]
    train(optimizer, 2, start=2)
    assert all(torch.equal(p, q) for p, q in zip(params_of(twin), before, strict=True))
    train(twin, 2, start=2)
    assert all(torch.equal(p, q) for p, q in zip(params_of(twin), params_of(optimizer), strict=True))


@pytest.mark.parametrize("cls", TORQUE)
def test_large_gradients_agree_with_torchs_operations(cls: type) -> None:
    """Up to 1e17, as numerics.md says; beyond that a float32 sum may overflow here first."""
    found = []
    for way in ({"fused": True}, {"fused": False, "foreach": False}):
        (p,) = params = parameters([(40_000,)])
        optimizer = cls(params, lr=1e-20, floor=0.0, **way)
        for step in range(4):
            p.grad = gradients(params, step)[0].clamp(-1, 1) * 1e16  # m grows to about 1e17
            optimizer.step()
        found.append(optimizer.alignment)
    assert float(found[1]) != 0 and abs(float(found[0] - found[1])) < 1e-6


# ---------------------------------------------------------------------- the parts of the tables


def test_a_fingerprint_knows_addresses_and_layouts() -> None:
    buffer = torch.randn(4, 4)
    others = [torch.randn(3), torch.randn(())]
    fingerprint = Fingerprint([buffer, *others])
    assert fingerprint.matches([buffer, *others])
    assert fingerprint.matches([buffer.view(4, 4), *others])  # the same memory
    elsewhere = [buffer.clone(), *others]
    assert not fingerprint.matches(elsewhere) and fingerprint.has_layouts_of(elsewhere)
    for changed in (buffer.t(), buffer[:2], torch._neg_view(buffer), buffer.view(torch.int32)):
        assert changed.data_ptr() == buffer.data_ptr()
        assert not fingerprint.matches([changed, *others])
        assert not fingerprint.has_layouts_of([changed, *others])
    assert not fingerprint.has_layouts_of([buffer, others[0]])


def test_a_fingerprint_ignores_what_no_kernel_reads() -> None:
    p = torch.randn(4)
    fingerprint = Fingerprint([p])
    p.requires_grad_()
    assert fingerprint.matches([p])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert fingerprint.matches([p])


def test_one_tensor_may_be_listed_twice() -> None:
    x = torch.randn(4)
    fingerprint = Fingerprint([x, x])
    assert fingerprint.matches([x, x]) and not fingerprint.matches([x, x.clone()])


class Gradients:
    """A table of the gradients of two parameters, and what was written to it."""

    def __init__(self) -> None:
        self.params = [torch.zeros(4, 4), torch.zeros(3)]
        self.uploads: list[list[int]] = []
        self.table = GradientTable(self.params)

    def update(self, grads: list[torch.Tensor | None], copies: list[torch.Tensor] | None) -> bool:
        addresses = [-1 if g is None else g.data_ptr() for g in grads]
        return self.table.update(
            grads, [g for g in grads if g is not None], addresses, copies, self.uploads.append
        )


def test_addresses_are_written_when_they_change() -> None:
    gradients = Gradients()
    first = [torch.randn(4, 4), torch.randn(3)]
    second = [first[0], torch.randn(3)]
    for grads in (first, first, second, second, first):
        assert gradients.update(grads, [])
    assert gradients.uploads == [[g.data_ptr() for g in grads] for grads in (first, second, first)]


def test_a_gradient_that_is_absent_has_address_0() -> None:
    gradients = Gradients()
    x, y = torch.randn(4, 4), torch.randn(3)
    for grads in ([x, y], [None, y], [None, y], [x, None]):
        assert gradients.update(grads, [])
    assert gradients.uploads == [[x.data_ptr(), y.data_ptr()], [0, y.data_ptr()], [x.data_ptr(), 0]]


def test_a_gradient_of_another_layout_is_copied_at_each_step_or_refused() -> None:
    gradients = Gradients()
    x, y = torch.randn(4, 4), torch.randn(3)
    for grads in ([x.t(), y], [x.t(), y], [x, y.to(torch.float64)]):
        copies: list[torch.Tensor] = []
        assert not gradients.update(grads, None)
        before = len(gradients.uploads)
        assert gradients.update(grads, copies) and len(gradients.uploads) == before + 1
        (copied,) = copies
        which = 0 if grads[1] is y else 1
        assert (
            torch.equal(copied, grads[which].float()) and copied.stride() == gradients.params[which].stride()
        )
        assert gradients.uploads[-1][which] == copied.data_ptr()
    assert gradients.update([x, y], None)
    assert gradients.uploads[-1] == [x.data_ptr(), y.data_ptr()]


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"shape \(3,\).*gradient of shape \(2,\)"):
        Gradients().update([torch.randn(4, 4), torch.randn(2)], [])
