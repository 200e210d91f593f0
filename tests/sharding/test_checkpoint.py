"""torch.distributed.checkpoint: saved on some ranks, loaded on others, the run goes on."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tam
from tests.sharding.harness import FSDP_ON_CPU, NEEDS_FSDP, on_ranks
from tests.sharding.test_dtensor import groups, net, tensor_parallel, train, whole


def warmup(params: Any, lr: float) -> tam.Warmup:
    return tam.Warmup(tam.TAM(params, lr=lr), torch.optim.SGD, 3)


CASES: list[Any] = [
    (tam.TAM, {"lr": 0.05}),
    (tam.AdaTAMW, {"lr": 0.002, "scope": "tensor", "bias_correction": True}),
    (warmup, {"lr": 0.05}),
]
FOLDER = "TAM_TEST_FOLDER"


def make(i: int) -> tuple[Any, Any]:
    model = net()
    ranks = torch.distributed.get_world_size()
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        fully_shard(model, mesh=mesh) if FSDP_ON_CPU else tensor_parallel(model, mesh)
    cls, options = CASES[i]
    return model, cls(groups(model), **options)


def everything(model: Any, optimizer: Any) -> list[Tensor]:
    params = list(model.parameters())
    states = [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p])]
    return [whole(x).detach().clone() for x in (*params, *states)]


def save() -> Any:
    """5 steps, a checkpoint in two forms, and 4 steps more."""
    found = []
    for i in range(len(CASES)):
        model, optimizer = make(i)
        train(model, optimizer, 5)
        folder = Path(os.environ[FOLDER]) / str(i)
        state = get_optimizer_state_dict(model, optimizer)
        kinds = {
            (key, isinstance(x, DTensor)) for entry in state["state"].values() for key, x in entry.items()
        }
        dcp.save({"model": get_model_state_dict(model), "optimizer": state}, checkpoint_id=folder)
        whole_state = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if torch.distributed.get_rank() == 0:  # the others get none of an offloaded full state dict
            torch.save(whole_state, folder.with_suffix(".pt"))
        train(model, optimizer, 4)
        found.append((everything(model, optimizer), kinds))
    return found


def remake(i: int) -> tuple[Any, Any]:
    model, optimizer = make(i)
    if isinstance(optimizer, tam.Warmup):
        optimizer.switch()  # the checkpoint is from after it
    return model, optimizer


def load() -> Any:
    """Loads the checkpoint and goes on; then the same from the full state dict."""
    found = []
    for i in range(len(CASES)):
        model, optimizer = remake(i)
        folder = Path(os.environ[FOLDER]) / str(i)
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        full = copy.deepcopy(full)  # on one rank these are the optimizer's own tensors
        offloaded = torch.load(folder.with_suffix(".pt"), weights_only=False)
        again = []
        for state in (full, offloaded):
            other, another = remake(i)
            set_model_state_dict(other, get_model_state_dict(model))
            set_optimizer_state_dict(other, another, state, options=StateDictOptions(full_state_dict=True))
            again.append((other, another))
        train(model, optimizer, 4)
        for other, another in again:
            train(other, another, 4)
        s = getattr(optimizer, "alignment", torch.zeros(()))  # the Warmup is at work with SGD: it has none
        found.append(([everything(*pair) for pair in ((model, optimizer), *again)], s))
    return found


@pytest.mark.parametrize(
    "first, second", [(2, 1), (1, 2), *(pytest.param(*ranks, marks=NEEDS_FSDP) for ranks in ((2, 4), (4, 2)))]
)
def test_saved_here_and_loaded_there(
    first: int, second: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("checkpoint", "save", "load"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "checkpoint"))
    saved = on_ranks(save, first, tmp_path / "save")
    loaded = on_ranks(load, second, tmp_path / "load")
    for i in range(len(CASES)):
        expected, kinds = saved[0][i]
        sharded = first > 1
        for key in ("exp_avg", "exp_avg_sq") if i == 1 else ("momentum_buffer",):
            assert (key, sharded) in kinds
        assert (("alignment", False) in kinds) == (i < 2) and ("alignment", True) not in kinds
        for found in loaded:
            for form in found[i][0]:
                for x, y in zip(form, expected, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
            assert torch.equal(found[i][1], loaded[0][i][1])
