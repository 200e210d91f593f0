"""Masked-LM fine-tuning: kills and damaged checkpoints, several ranks, and the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tam
from tam.lab.core.results import load_results
from tam.lab.core.runner import run
from tam.lab.core.selection import Selection, select_plans
from tam.lab.core.store import TrialFolder
from tam.lab.experiments.llm import checkpoints
from tam.lab.experiments.llm import trial as llm
from tests.lab.commands.helpers import tam_lab
from tests.lab.engines.test_engines import PATHS, RunLocation
from tests.lab.experiments.test_llm import config, result_of, train

pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.mark.parametrize("steps", [10, 30, 40])
def test_a_killed_trial_ends_with_the_same_bits(steps: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", config(epochs=3))
    train(tmp_path / "parts", config(epochs=3), steps, save_every=0.0)
    again = train(tmp_path / "parts", config(epochs=3), save_every=0.0)
    assert_same_end(again, whole)


def assert_same_end(ours: TrialFolder, theirs: TrialFolder) -> None:
    """The same metrics, result, network and files."""
    assert ours.metrics() == theirs.metrics()
    for key in ("perplexity", "test", "at", "epochs"):
        assert result_of(ours)[key] == result_of(theirs)[key]
    files = ["alignment.pt", "config.json", "lock", "metrics.jsonl", "model", "result.json"]
    for folder in (ours, theirs):
        assert sorted(path.name for path in folder.path.iterdir() if path.name != "mteb") == files
    for name in ("model/model.safetensors", "alignment.pt"):
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial of two epochs that was killed, with checkpoints after 20 and 23 of 46 steps."""
    root = tmp_path_factory.mktemp("stopped")
    folder = train(root, config(), 30, save_every=0.0)
    assert [checkpoints.step_of(path) for path in checkpoints.list_checkpoints(folder.path)] == [23, 20]
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrialFolder:
    return train(tmp_path_factory.mktemp("whole"), config())


def first_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, TrialFolder]:
    """Continue a trial to its end. Return the step it continued at."""
    steps: list[int] = []
    counted = llm.StepRecorder.continue_at
    monkeypatch.setattr(
        llm.StepRecorder, "continue_at", lambda self, step: (steps.append(step), counted(self, step))[1]
    )
    folder = train(root, config())
    return (steps or [0])[0], folder


FILES = (
    "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth",
    "training_args.bin", "config.json", "lab-*.pt",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("name", FILES)
def test_after_a_flipped_bit_a_trial_continues_from_the_checkpoint_before(
    name: str, stopped: Path, whole: TrialFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped, tmp_path / "lab")
    newest = checkpoints.list_checkpoints(tmp_path / "lab/trials" / config().key)[0]
    (path,) = newest.glob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    step, folder = first_step(tmp_path / "lab", monkeypatch)
    assert step == 20
    assert_same_end(folder, whole)


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("damage", ["cut", "missing", "added", "renamed", "best network"])
def test_other_damage_to_a_checkpoint(
    damage: str, stopped: Path, whole: TrialFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped, tmp_path / "lab")
    trial = tmp_path / "lab/trials" / config().key
    newest, expected = checkpoints.list_checkpoints(trial)[0], 20
    if damage == "cut":
        (newest / "trainer_state.json").write_text("{")
    elif damage == "missing":  # as if it had been killed before the last file
        next(newest.glob("lab-*.pt")).unlink()
    elif damage == "added":
        (newest / "more.json").write_text("{}")
    elif damage == "renamed":
        newest.rename(newest.with_name("checkpoint-40"))
    else:
        path = next(trial.glob("model-*")) / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    step, folder = first_step(tmp_path / "lab", monkeypatch)
    assert step == expected
    assert_same_end(folder, whole)


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_without_an_intact_checkpoint_a_trial_starts_again(
    stopped: Path, whole: TrialFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped, tmp_path / "lab")
    for path in checkpoints.list_checkpoints(tmp_path / "lab/trials" / config().key):
        (path / "optimizer.pt").write_bytes(b"")
    step, folder = first_step(tmp_path / "lab", monkeypatch)
    assert step == 0
    assert_same_end(folder, whole)


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("link", [False, True])
def test_files_and_links_where_folders_are_expected(
    link: bool, stopped: Path, whole: TrialFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stopped, tmp_path / "lab")
    trial, target = tmp_path / "lab/trials" / config().key, tmp_path / "theirs"
    target.mkdir()
    (target / "file").write_text("theirs")
    for name in ("model", "embeddings", "model-007", "checkpoints/checkpoint-43"):
        if link:
            (trial / name).symlink_to(target)
        else:
            (trial / name).write_text("a file")
    step, folder = first_step(tmp_path / "lab", monkeypatch)
    assert step == 23 and [path.name for path in target.iterdir()] == ["file"]
    assert_same_end(folder, whole)


KILLED = """
import os, sys, torch
from pathlib import Path
from tam.lab.experiments.llm import trial as llm
from tam.lab.experiments.llm.mteb import scoring
from tam.lab.core.store import TrialFolder
from tests.lab.experiments.test_llm import config
place, root = sys.argv[1], Path(sys.argv[2])
owner, name = {"keep": (llm.Training, "keep_model"), "save": (llm.Training, "complete_checkpoint"),
               "tidy": (llm.Training, "remove_other_models"), "score": (scoring, "score_trial")}[place]
before, calls = getattr(owner, name), []
def dies(*arguments):
    calls.append(1)
    if len(calls) == 2 or place == "score":
        if place == "keep":
            (folder.path / ".model.part").mkdir()
        os.kill(os.getpid(), 9)
    return before(*arguments)
setattr(owner, name, dies)
torch.set_num_threads(1)
one = config(epochs=3, lr=2e-4)
folder = TrialFolder(root, one)
with folder.at_work():
    list(llm.run(one, folder, root, torch.device("cpu"), 0.0))
"""


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("place", ["keep", "save", "tidy", "score"])
def test_one_that_is_killed_anywhere_ends_like_another(place: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": PATHS}
    command = [sys.executable, "-c", KILLED, place, str(tmp_path / "killed")]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=240).returncode == -9
    one = config(epochs=3, lr=2e-4)  # every epoch is better than the one before
    assert_same_end(train(tmp_path / "killed", one), train(tmp_path / "whole", one))


TORCHRUN = "torch.distributed.run --standalone --nproc-per-node 2"
ACCELERATE = (
    "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0"
)


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_on_two_ranks(launcher: str, tmp_path: Path) -> None:
    """As one process, but for the draws of dropout."""
    path = os.pathsep.join([str(Path(tam.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher.split()]
    command += ["-m", "tam", "lab", "run", "llm", "--preset", "smoke", "--study", "tiny-2", "--device", "cpu"]
    command += ["--variant", "AdaTAMW", "--seeds", "1", "--tasks", "", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = select_plans(
        Selection("llm", "smoke", ("tiny-2",), ("AdaTAMW",), 1, overrides={"tasks": []}),
        load_results(tmp_path),
    )
    (trial,) = plan.comparison_trials(plan.study.variant("AdaTAMW")) or []
    ours = TrialFolder(tmp_path, trial)
    assert result_of(ours)["ranks"] == 2
    theirs = train(tmp_path / "one", trial)
    for mine, other in zip(ours.metrics(), theirs.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=0.05)
        assert mine["perplexity"] == pytest.approx(other["perplexity"], rel=0.03)


RANKS = """
import os, sys, torch
import torch.distributed as dist
from pathlib import Path
from tam.lab.experiments.llm import trial as llm
from tam.lab.core.store import TrialFolder
from tests.lab.experiments.test_llm import Killed, config
torch.set_num_threads(1)
dist.init_process_group("gloo")
root, losses, kill_at = Path(sys.argv[1]), [], None
end_epoch, before_step = llm.Training.end_epoch, llm.Training.before_step
def noted(self, epoch):
    n = self.steps_per_epoch
    losses.append(self.recorder.values[(epoch - 1) * n : epoch * n, 0].double().mean())
    return end_epoch(self, epoch)
def counted(self, step):
    if step == kill_at:
        raise Killed
    before_step(self, step)
llm.Training.end_epoch, llm.Training.before_step = noted, counted
def train(name):
    folder = TrialFolder(root / name, config())
    folder.writes = dist.get_rank() == 0
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        list(llm.run(config(), folder, root, torch.device("cpu"), 0.0))
    except Killed:
        pass
    dist.barrier()
    return folder.metrics()
whole = train("whole")
every = [torch.empty(2, dtype=torch.float64) for _ in range(2)]
dist.all_gather(every, torch.stack(losses))
for row, both in zip(whole, torch.stack(every, 1), strict=True):
    assert both[0] != both[1] and abs(row["loss"] - float(both.mean())) < 1e-9, (row, both)
kill_at = 43
train("parts")  # it was saved after 40 steps, in the middle of the second epoch
kill_at = None
assert train("parts") == whole
print("equal", flush=True)
dist.destroy_process_group()
os._exit(0)
"""


def test_on_two_ranks_a_killed_trial_ends_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *TORCHRUN.split(), str(tmp_path / "ranks.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0 and done.stdout.count("equal") == 2, done.stdout + done.stderr


def test_smoke_fine_tunes_scores_and_compares(tmp_path: Path) -> None:
    pytest.importorskip("mteb")
    run(Selection("llm", "smoke"), RunLocation(tmp_path, tmp_path, trials_per_process=4), 2, print)
    code, output = tam_lab("report", tmp_path, "-o", tmp_path / "report.md")
    assert code == 0, output
    text = (tmp_path / "report.md").read_text()
    assert "| MTEB, main score | AdamW | AdaTAMW |" in text and "AdaTAMW minus AdamW |" in text
    assert "Does not agree" in text and "| AdaTAMW | AdamW | 2 | " in text
    records = list(load_results(tmp_path))
    assert all(record.result["timing"]["together"] == 1 for record in records)
    first, second = (tmp_path / "trials" / record.key for record in records[:2])
    stored = (first / "mteb/GeneratedSTS.json").read_bytes()
    (first / "mteb/GeneratedSTS.json").unlink()
    code, output = tam_lab("score", tmp_path, "--data", tmp_path)
    assert code == 0 and output.count("GeneratedSTS") == len(records)
    assert (first / "mteb/GeneratedSTS.json").read_bytes() == stored
    for name in ("model", "mteb"):
        shutil.rmtree(second / name)
    code, output = tam_lab("score", tmp_path, "--data", tmp_path)
    assert code == 1 and f"1 of {len(records)} networks lack some of their scores" in output
