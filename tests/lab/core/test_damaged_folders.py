"""A damaged or hostile results folder: a message names the file, and nothing else is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.core.alignment import (
    keep_levels,
    levels_of,
    pack_levels,
    read_alignment,
    round_alignment,
    unpack_levels,
)
from tam.lab.core.errors import LabError
from tam.lab.core.results import load_existing_results, load_results
from tam.lab.core.selection import Selection, remember_selection, selections_of
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder, check_rows, digest_of, read_json, read_result
from tests.lab.core.helpers import CPU, save_checkpoints

NESTED = {depth: "[" * depth + "]" * depth for depth in (200, 100_000)}


def finished_trial(root: Path, s: torch.Tensor | None = None) -> TrialFolder:
    folder = TrialFolder(root, {"a": 1})
    with folder.at_work():
        folder.begin_with([])
        for epoch in (1, 2):
            folder.log({"epoch": epoch, "loss": 1.0})
        if s is not None:
            folder.write(ALIGNMENT_FILE, s)
        folder.finish({"validation": 93.6, "diverged": False, "epochs": 2}, 1.0, CPU)
    return folder


def set_result(folder: TrialFolder, **values: Any) -> None:
    path = folder.path / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# ---------------------------------------------------------------------- alignment


def test_a_flipped_bit_in_an_alignment_is_noticed(tmp_path: Path) -> None:
    s = torch.linspace(-0.9, 0.9, 100)
    folder = finished_trial(tmp_path, s)
    path = folder.path / ALIGNMENT_FILE
    record = load_results(tmp_path).get(folder.key)
    assert record is not None and torch.equal(read_alignment(path), s)
    assert record.alignment is not None and torch.equal(record.alignment, round_alignment(s))
    content = path.read_bytes()
    position = content.index(s.numpy().tobytes()) + 3  # the exponent of a value
    path.write_bytes(content[:position] + bytes([content[position] ^ 0x40]) + content[position + 1 :])
    fresh = load_results(tmp_path).get(folder.key)
    assert fresh is not None
    for read in (lambda: read_alignment(path), lambda: fresh.alignment):
        with pytest.raises(LabError, match=rf"{path} is damaged: its digest"):
            read()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([0.5, 1e36]), torch.tensor([0.5, float("nan")]), torch.tensor([float("inf")]),
        torch.tensor([[0.5]]), torch.zeros(2, 2, 2), {"s": 1}, torch.tensor([1, 2, 3], dtype=torch.uint8),
    ],
)  # fmt: skip
def test_an_alignment_without_a_digest_must_be_in_range(value: Any, tmp_path: Path) -> None:
    """As older results have none; one that is in range stays readable."""
    folder = finished_trial(tmp_path, torch.tensor([0.5, -1.0]))
    result = json.loads((folder.path / "result.json").read_text())
    del result["files"]
    (folder.path / "result.json").write_text(json.dumps(result))
    path = folder.path / ALIGNMENT_FILE
    assert read_alignment(path).tolist() == [0.5, -1.0]
    torch.save(value, path)
    with pytest.raises(LabError, match=rf"{path} is damaged"):
        read_alignment(path)


def test_packed_alignments_have_a_digest_too(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    levels = levels_of(torch.linspace(-1, 0.99, 1000))
    with folder.at_work():
        keep_levels(folder, levels)
        folder.finish({"diverged": False}, 1.0, CPU)
    assert torch.equal(read_alignment(folder.path / ALIGNMENT_FILE) * 128, levels.float())
    with pytest.raises(ValueError, match="is cut"):
        unpack_levels(pack_levels(levels)[:-8])


# ---------------------------------------------------------------------- checkpoints


def test_a_stray_checkpoint_is_left_alone(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    names = ("checkpoint-best.pt", "checkpoint-000009.pt", "checkpoint-x-0123456789abcdef.pt", "checkpoint-")
    with folder.at_work():
        for name in names:
            (folder.path / name).write_text("somebody's")
        save_checkpoints(folder, 1, 2, 3)
        checkpoint = folder.load(CPU)
        assert checkpoint is not None and checkpoint[0] == 3
        folder.finish({"diverged": False}, 1.0, CPU)
    assert all((folder.path / name).read_text() == "somebody's" for name in names)
    assert len(list(folder.path.glob("checkpoint-*"))) == len(names)


def test_the_epoch_of_a_checkpoint_is_not_of_its_name_alone(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        newest = save_checkpoints(folder, 1, 2)
        newest.rename(newest.with_name(newest.name.replace("000002", "000009")))
        with pytest.warns(UserWarning, match="000009.* is damaged"):
            checkpoint = folder.load(CPU)
        assert checkpoint is not None and checkpoint[0] == 1 and int(checkpoint[1]["x"]) == 1


def test_checkpoints_that_cannot_be_used_are_passed_over(tmp_path: Path) -> None:
    """A folder of that name, and content of another kind with the right digest."""
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        folder.log({"epoch": 1})
        folder.save(1, {"x": torch.tensor(1)})
        (folder.path / "checkpoint-000008-0123456789abcdef.pt").mkdir()
        (folder.path / f"checkpoint-000007-{digest_of(b'[1]')}.pt").write_bytes(b"[1]")
        with pytest.warns(UserWarning, match="is damaged"):
            checkpoint = folder.load(CPU)
        assert checkpoint is not None and checkpoint[0] == 1


def test_a_checkpoint_of_an_older_version_is_resumed(tmp_path: Path) -> None:
    """It has no epoch inside."""
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        folder.write("old.pt", {"state": {"x": torch.tensor(4)}, "rows": '[{"epoch": 4}]'})
        path = folder.path / "old.pt"
        path.rename(folder.path / f"checkpoint-000004-{digest_of(path.read_bytes())}.pt")
        checkpoint = folder.load(CPU)
        assert checkpoint is not None and checkpoint[0] == 4 and folder.metrics() == [{"epoch": 4}]


def test_folders_and_links_named_like_checkpoints_are_left_alone(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        folder.save(9, {"x": torch.tensor(9)})
        (newest,) = folder.path.glob("checkpoint-*")
        newest.rename(tmp_path / "elsewhere.pt")
        newest.symlink_to(tmp_path / "elsewhere.pt")
        (folder.path / "checkpoint-000008-0123456789abcdef.pt").mkdir()
        for epoch in (1, 2, 3):
            folder.save(epoch, {"x": torch.tensor(epoch)})
        checkpoint = folder.load(CPU)
        assert checkpoint is not None and checkpoint[0] == 3
        folder.finish({"diverged": False}, 1.0, CPU)
    assert len(list(folder.path.glob("checkpoint-*"))) == 2 and (tmp_path / "elsewhere.pt").is_file()


def test_a_checkpoint_with_another_digest_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    with folder.at_work():
        (folder.path / "checkpoint-000001-0123456789abcdef.pt").write_bytes(b"somebody's")
        opened: list[Any] = []
        monkeypatch.setattr(torch, "load", lambda *args, **options: opened.append(args))
        with pytest.warns(UserWarning, match="is damaged"):
            assert folder.load(CPU) is None
    assert not opened


# ---------------------------------------------------------------------- results and metrics


@pytest.mark.parametrize(
    "values",
    [
        {"diverged": "no"}, {"diverged": None}, {"timing": []}, {"timing": {}}, {"timing": {"seconds": "1"}},
        {"timing": {"seconds": 1.0, "together": "2"}}, {"timing": {"seconds": 1.0, "date": 5}},
        {"machine": 3}, {"epochs": "2"}, {"epochs": [2]}, {"settings": []}, {"files": ["x"]},
        {"timing": {}, "seconds": 1.0}, {"timing": {"seconds": float("nan")}}, {"timing": {"seconds": 1e12}},
        {"settings": {"options": [1]}}, {"settings": {"optimizer": 3}}, {"machine": {"hardware": "\ud800"}},
    ],
)  # fmt: skip
def test_results_with_values_of_a_wrong_type_are_named(values: dict[str, Any], tmp_path: Path) -> None:
    folder = finished_trial(tmp_path)
    good = TrialFolder(tmp_path, {"b": 2})
    with good.at_work():
        good.finish({"diverged": False}, 1.0, CPU)
    set_result(folder, **values)
    results = load_results(tmp_path)
    for read in (folder.read_result, lambda: results.get(folder.key)):
        with pytest.raises(LabError, match=rf"{folder.path}/result.json is damaged"):
            read()
    assert results.get(good.key) is not None


@pytest.mark.parametrize(
    "content", [b"[]", b"5", b'"x"', b"{", b"\xff\xfe", b"null", *map(str.encode, NESTED.values())]
)
def test_files_that_are_no_json_are_named(content: bytes, tmp_path: Path) -> None:
    folder = finished_trial(tmp_path)
    record = load_results(tmp_path).get(folder.key)
    assert record is not None
    for name in ("result.json", "config.json"):
        (folder.path / name).write_bytes(content)
    (folder.path / "mteb").mkdir()
    (folder.path / "mteb" / "STS12.json").write_bytes(content)
    with pytest.raises(LabError, match=r"result.json is damaged: .*Remove it, and the trial is run again"):
        read_result(folder.path)
    with pytest.raises(LabError, match=r"config.json is damaged"):
        _ = record.config
    with pytest.raises(LabError, match=r"STS12.json is damaged"):
        _ = record.scores


@pytest.mark.parametrize(
    "content",
    [
        b"[]\n", b"5\n", b"{\n", b"\xff\n", f"{NESTED[100_000]}\n".encode(), b"{}\n", b'{"epoch": 1.0}\n',
        b'{"epoch": true}\n', b'{"epoch": 1, "loss": "<b>"}\n', b'{"epoch": 1, "loss": null}\n',
        b'{"epoch": 1, "loss": {}}\n', b'{"epoch": 1, "loss": [1, "x"]}\n',
        b'{"epoch": 1, "loss": 1%s}\n' % (400 * b"0"),
    ],
)  # fmt: skip
def test_damaged_metrics_are_named(content: bytes, tmp_path: Path) -> None:
    folder = finished_trial(tmp_path)
    (folder.path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(LabError, match=r"metrics.jsonl is damaged"):
        folder.metrics()


def test_rows_hold_numbers_and_lists_of_numbers() -> None:
    check_rows([{"epoch": 1, "loss": float("nan"), "best": True, "accuracies": [1, 0.5], "none": []}], 1)


@pytest.mark.parametrize("lines", [0, 1, 3])
def test_metrics_of_a_finished_trial_that_were_cut_are_noticed(lines: int, tmp_path: Path) -> None:
    folder = finished_trial(tmp_path)
    path = folder.path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n' * lines)
    record = load_results(tmp_path).get(folder.key)
    assert record is not None
    with pytest.raises(LabError, match=rf"{path} is damaged: it has {lines} lines, .* 2 epochs"):
        _ = record.metrics
    path.unlink()
    with pytest.raises(LabError, match=rf"{path} is damaged"):
        _ = record.metrics


def test_a_file_where_a_folder_is_expected(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, {"a": 1})
    (tmp_path / "trials").mkdir()
    folder.path.write_text("a file")
    results = load_results(tmp_path)
    with pytest.raises(LabError, match=str(folder.path)):
        results.get(folder.key)
    with (
        pytest.raises(LabError, match=rf"{folder.path} cannot be written: a file is in its place"),
        folder.at_work(),
    ):
        pass
    assert not folder.busy()
    folder.path.unlink()
    (tmp_path / "trials").rmdir()
    (tmp_path / "trials").write_text("a file")
    assert len(load_results(tmp_path).records) == 0
    with (
        pytest.raises(LabError, match=rf"{folder.path} cannot be written: a file is in its place"),
        folder.at_work(),
    ):
        pass
    assert (tmp_path / "trials").read_text() == "a file"


@pytest.mark.parametrize("name", ["trials", f"trials/{TrialFolder(Path(), {'a': 1}).key}"])
def test_nothing_is_written_through_a_linked_folder(name: str, tmp_path: Path) -> None:
    finished_trial(tmp_path / "theirs")
    link = tmp_path / "ours" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "theirs" / name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    folder = TrialFolder(tmp_path / "ours", {"a": 1})
    with pytest.raises(LabError, match=rf"{link} is a link"), folder.at_work():
        pass
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_folders_where_files_are_expected(tmp_path: Path) -> None:
    folder = finished_trial(tmp_path)
    for name in ("result.json", "metrics.jsonl"):
        (folder.path / name).unlink()
        (folder.path / name).mkdir()
    with pytest.raises(LabError, match=r"result.json cannot be read"):
        folder.read_result()
    with pytest.raises(LabError, match=r"metrics.jsonl cannot be read"):
        folder.metrics()


def test_names_that_are_too_long_are_reported(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 300)
    folder = TrialFolder(root, {"a": 1})
    for read in (
        lambda: read_json(root / "runs.json", list),
        lambda: selections_of(load_existing_results(root)),
        folder.read_result,
        folder.at_work().__enter__,
        lambda: remember_selection(Selection("images", "smoke"), root),
    ):
        with pytest.raises(LabError, match="File name too long"):
            read()
    assert not folder.busy()


# ---------------------------------------------------------------------- runs.json


@pytest.mark.parametrize(
    "content",
    [
        b"{}", b"3", b"[3]", b"[[]]", b"[", b"\xff", NESTED[100_000].encode(),
        b'[{"experiment": "images"}]', b'[{"experiment": 1, "preset": "smoke"}]',
        b'[{"experiment": "images", "preset": "smoke", "seeds": "2"}]',
        b'[{"experiment": "images", "preset": "smoke", "arms": "TAM"}]',
        b'[{"experiment": "images", "preset": "smoke", "given": [1]}]',
        b'[{"experiment": "images", "preset": "smoke", "controls": "yes"}]',
        f'[{{"experiment": "images", "preset": "smoke", "given": {{"x": {NESTED[200]}}}}}]'.encode(),
    ],
)  # fmt: skip
def test_a_damaged_list_of_runs_is_named_and_kept(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_bytes(content)
    for use in (
        lambda: selections_of(load_existing_results(tmp_path)),
        lambda: remember_selection(Selection("toy", "smoke"), tmp_path),
    ):
        with pytest.raises(LabError, match=rf"{path} is damaged: .*Remove it and start the runs again"):
            use()
    assert path.read_bytes() == content
