"""Lightning trains with the optimizers, resumes them to the bit and logs their readings."""

from __future__ import annotations

import csv
import doctest
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import tam
from tests.helpers import assert_same

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from lightning import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.datasets import load_digits

from tam.integrations import readings
from tam.integrations.lightning import TorqueCallback

NAMES = {"tam/alignment", "tam/damping", "tam/grad_norm"}
SPREAD = {"tam/alignment_min", "tam/alignment_max"}
BATCH, BATCHES = 32, 6
SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
    "log_every_n_steps": 2,
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


def data() -> list[tuple[Tensor, Tensor]]:
    x, y = load_digits(return_X_y=True)
    n = BATCH * BATCHES
    return list(zip(torch.tensor(x[:n] / 16, dtype=torch.float32), torch.tensor(y[:n]), strict=True))


def loader() -> DataLoader[Any]:
    x, y = zip(*data(), strict=True)
    return DataLoader(TensorDataset(torch.stack(x), torch.stack(y)), batch_size=BATCH)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Digits(LightningModule):
    def __init__(self, cls: type[torch.optim.Optimizer] = tam.TAM, **options: Any) -> None:
        super().__init__()
        self.network = network()
        self.cls, self.options = cls, {"lr": 0.1, **options}
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.network(x).float(), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.cls(self.parameters(), **self.options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Pair(LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self, first: type[torch.optim.Optimizer], second: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.network = network()
        self.classes = (first, second)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(cross_entropy(self.network(x), y))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.network[0], self.network[2])
        return [cls(part.parameters(), lr=0.01) for cls, part in zip(self.classes, parts, strict=True)]


def fit(module: LightningModule, ckpt_path: str | None = None, **settings: Any) -> Trainer:
    trainer = Trainer(**{**SETTINGS, **settings})
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return trainer


def optimizer_of(trainer: Trainer) -> Any:
    (optimizer,) = trainer.optimizers
    return optimizer


def by_hand(cls: type[torch.optim.Optimizer], epochs: int = 1, clip: float = 0.0, **options: Any) -> Any:
    """The same training without Lightning."""
    net = network()
    optimizer = cls(net.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * BATCHES)
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            scheduler.step()
    return optimizer


@pytest.mark.parametrize("cls", [tam.TAM, tam.AdaTAM, tam.AdaTAMW, tam.AngularGrad])
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_equals_the_loop_by_hand(tmp_path: Path, cls: type[torch.optim.Optimizer], clip: float) -> None:
    module = Digits(cls)
    trainer = fit(module, default_root_dir=tmp_path, gradient_clip_val=clip or None, max_epochs=2)
    assert_same(optimizer_of(trainer), by_hand(cls, epochs=2, clip=clip))
    if cls is not tam.AngularGrad:
        assert abs(float(optimizer_of(trainer).alignment)) > 0.01
    if cls is tam.TAM:
        assert module.losses[-1] < module.losses[0]


def test_clipping_within_the_step(tmp_path: Path) -> None:
    trainer = fit(Digits(max_grad_norm=0.3), default_root_dir=tmp_path)
    assert_same(optimizer_of(trainer), by_hand(tam.TAM, max_grad_norm=0.3))
    assert float(optimizer_of(trainer).grad_norm) > 0.3


def test_mixed_precision(tmp_path: Path) -> None:
    module = Digits(max_grad_norm=0.3)
    trainer = fit(module, default_root_dir=tmp_path, precision="bf16-mixed", max_epochs=3)
    assert module.losses[-1] < module.losses[0]
    assert abs(float(optimizer_of(trainer).alignment)) > 0.01


def test_clipping_by_lightning_in_mixed_precision(tmp_path: Path) -> None:
    """Lightning refuses it where a step was asked for that unscales gradients itself, as with torch's own."""
    given: dict[str, Any] = {
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.3,
        "default_root_dir": tmp_path,
    }
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Digits(fused=True), **given)
    trainer = fit(Digits(), **given)
    assert float(optimizer_of(trainer).grad_norm) <= 0.3 * (1 + 1e-5)


@pytest.mark.parametrize("cls", [tam.TAM, tam.AdaTAMW])
def test_resume_is_exact(tmp_path: Path, cls: type[torch.optim.Optimizer]) -> None:
    whole = fit(Digits(cls), default_root_dir=tmp_path, max_epochs=4)
    half = fit(Digits(cls), default_root_dir=tmp_path, max_epochs=2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = Digits(cls)
    nn.init.zeros_(rest.network[0].weight)  # all must come from the checkpoint
    resumed = fit(rest, str(tmp_path / "half.ckpt"), default_root_dir=tmp_path, max_epochs=4)
    assert resumed.global_step == whole.global_step == 4 * BATCHES
    assert_same(optimizer_of(resumed), optimizer_of(whole))
    assert float(optimizer_of(resumed).alignment) == float(optimizer_of(whole).alignment) != 0


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_readings_are_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=None, version="run")
    trainer = fit(Digits(), default_root_dir=tmp_path, logger=logger, callbacks=[TorqueCallback()])
    found = rows(tmp_path / "run")
    assert [int(row["step"]) for row in found] == [1, 3, 5]
    assert found[0].keys() == NAMES | {"step", "epoch"}
    for row in found:
        assert float(row["tam/damping"]) == pytest.approx((1 + float(row["tam/alignment"])) / 2)
    for name, value in readings(optimizer_of(trainer)).items():
        assert trainer.logged_metrics[name] == value
        assert float(found[-1][name]) == pytest.approx(value.item())
    assert len({row["tam/alignment"] for row in found}) == 3


def test_readings_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path, name=None, version="run")
    trainer = fit(Digits(), default_root_dir=tmp_path, logger=logger, callbacks=[TorqueCallback()])
    events = accumulator.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    for name, value in readings(optimizer_of(trainer)).items():
        found = events.Scalars(name)
        assert [event.step for event in found] == [1, 3, 5]
        assert found[-1].value == pytest.approx(value.item())


def test_accumulated_batches_log_the_step_they_end_in(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=None, version="run")
    trainer = fit(
        Digits(),
        default_root_dir=tmp_path,
        logger=logger,
        callbacks=[TorqueCallback()],
        accumulate_grad_batches=3,
        log_every_n_steps=1,
    )
    found = rows(tmp_path / "run")
    assert [int(row["step"]) for row in found] == [0, 1]
    assert float(found[0]["tam/alignment"]) == 0 < float(found[0]["tam/grad_norm"])
    assert float(found[1]["tam/alignment"]) == pytest.approx(float(optimizer_of(trainer).alignment)) != 0


class Counting(tam.TAM):
    reads = 0

    @property
    def grad_norm(self) -> Tensor:
        Counting.reads += 1
        return super().grad_norm


def test_nothing_is_read_on_other_steps(tmp_path: Path) -> None:
    Counting.reads = 0
    fit(Digits(Counting), default_root_dir=tmp_path, callbacks=[TorqueCallback()], log_every_n_steps=3)
    assert Counting.reads == BATCHES // 3


def test_several_segments_are_logged_with_their_spread(tmp_path: Path) -> None:
    trainer = fit(Digits(scope="tensor"), default_root_dir=tmp_path, callbacks=[TorqueCallback()])
    s = optimizer_of(trainer).alignment
    assert trainer.logged_metrics.keys() == NAMES | SPREAD
    assert trainer.logged_metrics["tam/alignment"] == pytest.approx(float(s.mean()))
    assert trainer.logged_metrics["tam/alignment_min"] == s.min() < s.max()
    assert trainer.logged_metrics["tam/alignment_max"] == s.max()


def test_several_optimizers_have_their_index(tmp_path: Path) -> None:
    trainer = fit(Pair(tam.TAM, tam.AdaTAM), default_root_dir=tmp_path, callbacks=[TorqueCallback()])
    assert trainer.logged_metrics.keys() == {f"{name}/{i}" for name in NAMES for i in range(2)}
    for i, optimizer in enumerate(trainer.optimizers):
        for name, value in readings(optimizer).items():
            assert trainer.logged_metrics[f"{name}/{i}"] == value
    assert trainer.logged_metrics["tam/alignment/0"] != trainer.logged_metrics["tam/alignment/1"]


def test_optimizers_without_alignment(tmp_path: Path) -> None:
    some = fit(Pair(torch.optim.SGD, tam.TAM), default_root_dir=tmp_path, callbacks=[TorqueCallback()])
    assert some.logged_metrics.keys() == {f"{name}/1" for name in NAMES}
    with pytest.raises(TypeError, match=r"must be a TAM, .*, got SGD, Adam$"):
        fit(Pair(torch.optim.SGD, torch.optim.Adam), default_root_dir=tmp_path, callbacks=[TorqueCallback()])


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Lightning refuses wrapped optimizers there, torch's too"
)
def test_wrapped_optimizers_are_unwrapped(tmp_path: Path) -> None:
    class Wrapped(Digits):
        def configure_optimizers(self) -> Any:
            return LightningOptimizer(self.cls(self.parameters(), **self.options))

    trainer = fit(Wrapped(), default_root_dir=tmp_path, callbacks=[TorqueCallback()])
    wrapper = optimizer_of(trainer)
    assert isinstance(wrapper, LightningOptimizer)
    assert trainer.logged_metrics["tam/alignment"] == wrapper.optimizer.alignment != 0
    assert trainer.logged_metrics["tam/grad_norm"] == wrapper.optimizer.grad_norm == wrapper.grad_norm != 0


def test_the_cli_of_the_page_takes_optimizers_by_class_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonargparse")
    page = (Path(__file__).parents[2] / "docs" / "guides" / "lightning.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n# train.py\n(.*?)```", page, re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("tam.yaml").write_text(config)
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(compile(script, "train.py", "exec"), namespace)
    options = ["--optimizer.lr=0.03", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    options += ["--trainer.enable_progress_bar=false", "--trainer.enable_checkpointing=false"]
    cli = namespace["LightningCLI"](namespace["Regression"], args=["fit", "--config=tam.yaml", *options])
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is tam.TAM and optimizer.defaults["lr"] == 0.03
    assert optimizer.param_groups[0]["max_grad_norm"] == 1.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)  # at the end of the cosine of the config
    assert cli.trainer.logged_metrics.keys() >= NAMES


def test_the_example_of_the_docstring_runs() -> None:
    results = doctest.testmod(importlib.import_module("tam.integrations.lightning"))
    assert results.attempted > 0 and results.failed == 0


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tam.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match=r"needs lightning.*'\.\[lightning\]'"):
        importlib.import_module("tam.integrations.lightning")


def test_a_wrapped_optimizer_loads_a_checkpoint() -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = tam.TAM(params)
    params[0].grad = torch.ones(3)
    optimizer.step()
    wrapper = LightningOptimizer(optimizer)
    wrapper.load_state_dict(optimizer.state_dict())
    del wrapper
    optimizer.step()
    assert float(optimizer.alignment) == pytest.approx(0.1)
