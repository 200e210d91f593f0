"""accelerate needs nothing of ours: its loop with the optimizers is the loop by hand, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import tam
from tests.helpers import TORQUE, assert_same

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from sklearn.datasets import load_digits

from tam.integrations import readings

BATCH, BATCHES = 32, 8


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate has one state for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loader() -> DataLoader[Any]:
    x, y = load_digits(return_X_y=True)
    n = BATCH * BATCHES
    return DataLoader(
        TensorDataset(torch.tensor(x[:n] / 16, dtype=torch.float32), torch.tensor(y[:n])), batch_size=BATCH
    )


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Job:
    """A model, its optimizer and scheduler in the hands of an Accelerator."""

    def __init__(self, cls: Any = tam.TAM, folder: Path | None = None, **given: Any) -> None:
        net = network()
        optimizer = cls(net.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        self.accelerator = Accelerator(cpu=True, project_dir=folder, **given)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            net, optimizer, loader(), scheduler
        )

    def epoch(self, clip: float = 0.0) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(cross_entropy(self.model(x), y))
                if clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


def by_hand(cls: Any, epochs: int, accumulate: int = 1, clip: float = 0.0, autocast: bool = False) -> Any:
    net = network()
    optimizer = cls(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

    def logits(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out: Tensor = net(x)
        return out.float()

    for _ in range(epochs):
        for i, (x, y) in enumerate(loader()):
            (cross_entropy(logits(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_equals_the_loop_by_hand(cls: Any, precision: str, accumulate: int) -> None:
    job = Job(cls, mixed_precision=precision, gradient_accumulation_steps=accumulate)
    for _ in range(2):
        job.epoch()
    assert isinstance(job.optimizer, AcceleratedOptimizer)
    optimizer = job.optimizer.optimizer
    assert type(optimizer) is cls
    assert_same(optimizer, by_hand(cls, 2, accumulate, autocast=precision == "bf16"))
    assert abs(float(optimizer.alignment)) > 0.01
    assert readings(job.optimizer)["tam/grad_norm"] == optimizer.grad_norm > 0


def test_autocast_was_in_use() -> None:
    """Else the comparison above would compare nothing."""
    plain, rounded = by_hand(tam.TAM, 1), by_hand(tam.TAM, 1, autocast=True)
    assert plain.grad_norm != rounded.grad_norm


def test_clipping() -> None:
    job = Job()
    job.epoch(clip=0.1)
    assert_same(job.optimizer.optimizer, by_hand(tam.TAM, 1, clip=0.1))
    assert float(job.optimizer.optimizer.grad_norm) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("cls", [tam.TAM, tam.AdaTAMW])
def test_a_saved_state_resumes_exactly(tmp_path: Path, cls: Any) -> None:
    options = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
    whole = Job(cls, tmp_path, **options)
    whole.epoch()
    whole.accelerator.save_state(str(tmp_path / "half"))
    whole.epoch()

    resumed = Job(cls, tmp_path, **options)
    with torch.no_grad():
        resumed.model[0].weight.zero_()  # all must come from the checkpoint
    resumed.accelerator.load_state(str(tmp_path / "half"))
    resumed.epoch()
    a, b = whole.optimizer.optimizer, resumed.optimizer.optimizer
    assert a is not b
    assert_same(a, b)
    assert float(a.alignment) == float(b.alignment) != 0


def test_an_optimizer_with_state_can_be_prepared() -> None:
    """prepare() loads the optimizer's own state back into it."""
    begun = by_hand(tam.TAM, 1)
    params = begun.param_groups[0]["params"]
    before = [p.detach().clone() for p in params]
    state = [begun.state[p]["momentum_buffer"].clone() for p in params]
    s, norm = begun.alignment, begun.grad_norm
    prepared = Accelerator(cpu=True).prepare(begun)
    assert prepared.optimizer is begun
    assert begun.alignment == s != 0 and begun.grad_norm == norm
    assert len({id(begun.state[p]["alignment"]) for p in params}) == 1
    for p, old, m in zip(params, before, state, strict=True):
        assert torch.equal(p, old) and torch.equal(begun.state[p]["momentum_buffer"], m)
