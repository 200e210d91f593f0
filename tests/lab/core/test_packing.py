"""Packed results: the same records as the run folder, and nothing else from a file somebody made."""

from __future__ import annotations

import base64
import json
import lzma
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tam.lab.core import results
from tam.lab.core.alignment import from_differences, round_alignment, to_differences
from tam.lab.core.config import trial_key
from tam.lab.core.errors import LabError
from tam.lab.core.results import (
    PACKED_FILE,
    TrialRecord,
    load_existing_results,
    load_results,
    pack,
    pack_metrics,
    unpack,
)
from tam.lab.core.runner import run
from tam.lab.core.selection import Selection, remember_selection, selections_of
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder
from tam.lab.engines.events import RunLocation

CPU = torch.device("cpu")
SELECTION = Selection("images", "smoke", variants=("TAM, d shuffled",))
THIRD = float(torch.tensor(1 / 3))  # exact in float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with three trials: an ordinary one, a diverged one, and a warm-up."""
    root = tmp_path / "run"
    remember_selection(SELECTION, root)
    for config, rows, result in TRIALS:
        trial = TrialFolder(root, config)
        with trial.at_work():
            for row in rows:
                trial.log(row)
            if config["optimizer"] == "tam":
                trial.write(ALIGNMENT_FILE, torch.linspace(-0.5, 1.0, 20))
            trial.finish(result, 1.5, CPU)
    scores = root / "trials" / trial_key(TRIALS[0][0]) / "mteb"
    scores.mkdir()
    (scores / "SciFact.json").write_text(json.dumps({"task": "SciFact", "score": 21.5}))
    return root


TRIALS: list[tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = [
    (
        {"optimizer": "tam", "lr": 0.2, "seed": 0, "epochs": 2},
        [{"epoch": 1, "loss": THIRD, "validation": 90.12345678901234}, {"epoch": 2, "loss": 0.1, "dip": 0.5}],
        {"validation": 91.0, "loss": 0.1, "diverged": False, "epochs": 2},
    ),
    (
        {"optimizer": "sgdm", "lr": 10.0, "seed": 0, "epochs": 2},
        [{"epoch": 1, "loss": math.nan, "validation": math.inf}],
        {"validation": math.nan, "loss": math.inf, "diverged": True, "epochs": 1},
    ),
    (
        {"optimizer": "tam", "lr": 0.1, "seed": 0, "epochs": 2, "switch": 1},
        [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": THIRD}],
        {"validation": 91.0, "loss": 0.1, "diverged": False, "epochs": 2,
         "settings": {"optimizer": "tam", "lr": 0.1, "options": {"betas": [0.9, 0.999], "maximize": False}}},
    ),
]  # fmt: skip


def facts(path: Path) -> dict[str, Any]:
    """Return everything a reader can ask the results in a folder or packed file for, as text."""
    records = {record.key: record for record in load_results(path)}
    for one in records.values():
        one.result.pop("files", None)  # digests of files that a packed file does not have
    return {
        key: repr((one.config, one.result, one.metrics, one.scores, one.diverged, one.alignment))
        for key, one in sorted(records.items())
    }


def test_a_packed_file_gives_what_the_folder_gives(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "results" / "trials.jsonl.xz"
    packed.parent.mkdir()
    assert pack([folder], packed) == 3
    text = lzma.decompress(packed.read_bytes()).decode()
    assert "NaN" not in text and "Infinity" not in text and len(text.splitlines()) == 4
    rounded = {repr(THIRD): "0.333333", "90.12345678901234": "90.1235", "inf": "nan"}
    expected = facts(folder)
    for exact, stored in rounded.items():
        expected = {key: value.replace(exact, stored) for key, value in expected.items()}
    assert facts(packed) == facts(packed.parent) == expected
    for path in (packed, folder):
        assert selections_of(load_existing_results(path)) == [replace(SELECTION, tuning_seeds=1)]


@given(st.lists(st.floats(-1, 1, width=32), min_size=1))
def test_s_comes_back_as_it_was_rounded(values: list[float]) -> None:
    s = round_alignment(torch.tensor(values))
    assert from_differences(to_differences(s)).tolist() == s.tolist()
    assert torch.allclose(s, torch.tensor(values), rtol=0, atol=1.5 / 4096)
    assert torch.equal(round_alignment(s), s) and not (s.signbit() & (s == 0)).any()


def test_metrics_have_six_digits() -> None:
    rows = [
        {"epoch": 1234567, "loss": 1e-9 / 3, "accuracies": [200 / 3, 50.0]},
        {"epoch": 2, "loss": math.nan},
    ]
    columns = pack_metrics(rows)
    assert columns["epoch"] == {"values": [1234567, 2]}
    assert columns["loss"]["values"][0] == 3.33333e-10 and math.isnan(columns["loss"]["values"][1])
    assert columns["accuracies"] == {"values": [[66.6667, 50.0]], "rows": [0]}


def test_older_files_are_read(folder: Path, tmp_path: Path) -> None:
    """They have s in 16 bits, and what was measured in float32 in columns of that name, with nine digits."""
    packed, older = tmp_path / "a.xz", tmp_path / "older.xz"
    pack([folder], packed)
    lines = lzma.decompress(packed.read_bytes()).decode().splitlines()
    header, *trials = map(json.loads, lines)
    for trial in trials:
        if trial.pop("alignment_differences", None):
            s = round_alignment(torch.linspace(-0.5, 1.0, 20)).half()
            trial["alignment"] = base64.b64encode(s.numpy().tobytes()).decode()
    content = [json.dumps(one) for one in ({**header, "schema": "tam-lab-results/1"}, *trials)]
    older.write_bytes(lzma.compress("\n".join(content).encode()))
    assert '"alignment"' in content[1] + content[2] and facts(older) == facts(packed)
    assert pack([older], older) == 3 and older.read_bytes() == packed.read_bytes()

    first = json.loads(lines[1])
    epochs = {"values": list(range(1, first["result"]["epochs"] + 1))}
    loss = {"float32": [float(f"{THIRD:.9g}")] * len(epochs["values"])}
    full = {"values": [90.12345678901234], "rows": [0]}
    packed.write_bytes(edited(packed, metrics={"epoch": epochs, "loss": loss, "validation": full}))
    record = load_results(packed).get(first["key"])
    assert record is not None
    assert {row["loss"] for row in record.metrics} == {THIRD}
    assert record.metrics[0]["validation"] == 90.12345678901234


def test_unpacked_results_are_a_run_folder_again(folder: Path, tmp_path: Path) -> None:
    packed, again, twice = tmp_path / "a.xz", tmp_path / "again", tmp_path / "b.xz"
    pack([folder], packed)
    assert unpack(packed, again) == 3
    assert facts(again) == facts(packed)
    pack([again], twice)
    assert twice.read_bytes() == packed.read_bytes()
    for target in (again, packed):  # a folder that is not empty, and a file
        with pytest.raises(LabError, match="Unpack into a new folder"):
            unpack(packed, target)
    assert facts(again) == facts(packed) and not list(tmp_path.glob(".*.part"))


def test_several_sources_become_one_file(folder: Path, tmp_path: Path) -> None:
    whole, first, second, merged = (
        tmp_path / f"{name}.xz" for name in ("whole", "first", "second", "merged")
    )
    pack([folder], whole)
    head, *trials = lzma.decompress(whole.read_bytes()).splitlines(keepends=True)
    first.write_bytes(lzma.compress(head + trials[0] + trials[1]))
    second.write_bytes(lzma.compress(head + trials[1] + trials[2]))
    assert pack([second, first], merged) == 3
    assert merged.read_bytes() == whole.read_bytes()
    assert pack([first, folder], first) == 3  # a source can be the target
    assert first.read_bytes() == whole.read_bytes()


def test_sources_that_disagree_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    path = next(path for path in other.glob("trials/*/result.json") if '"loss": 0.1' in path.read_text())
    path.write_text(path.read_text().replace('"loss": 0.1', '"loss": 0.2'))
    with pytest.raises(LabError, match=f"different results of the same trial, {path.parent.name}"):
        pack([folder, other], tmp_path / "a.xz")
    assert not (tmp_path / "a.xz").exists()


def test_copies_that_differ_in_time_alone_or_lack_something_become_one(folder: Path, tmp_path: Path) -> None:
    slower, packed, merged = tmp_path / "slower", tmp_path / "a.xz", tmp_path / "b.xz"
    shutil.copytree(folder, slower)
    shutil.rmtree(slower / "trials" / trial_key(TRIALS[0][0]) / "mteb")
    for path in slower.glob("trials/*/result.json"):
        path.write_text(path.read_text().replace('"seconds": 1.5', '"seconds": 1.6'))
    pack([slower], packed)
    (folder / "trials" / trial_key(TRIALS[0][0]) / ALIGNMENT_FILE).unlink()
    for sources in ([packed, folder], [folder, packed], [packed, slower, folder]):
        assert pack(sources, merged) == 3
        record = load_results(merged).get(trial_key(TRIALS[0][0]))
        assert record is not None and record.alignment is not None
        assert record.scores["SciFact"]["score"] == 21.5


def test_metrics_that_only_later_epochs_have_are_packed_the_same_twice(tmp_path: Path) -> None:
    root, first, again = tmp_path / "run", tmp_path / "a.xz", tmp_path / "b.xz"
    remember_selection(SELECTION, root)
    trial = TrialFolder(root, TRIALS[0][0])
    with trial.at_work():
        for row in ({"epoch": 1, "loss": 0.5}, {"epoch": 2, "dip": 0.5, "loss": 0.4}):
            trial.log(row)
        trial.finish(TRIALS[0][2], 1.5, CPU)
    pack([root], first)
    pack([first, root], again)
    assert again.read_bytes() == first.read_bytes()


def test_what_nothing_could_read_is_not_packed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "MAX_BYTES", 1000)
    with pytest.raises(LabError, match="pack fewer folders into one file"):
        pack([folder], tmp_path / "a.xz")
    assert not (tmp_path / "a.xz").exists()


def test_a_run_does_not_start_in_a_folder_with_packed_results(folder: Path, tmp_path: Path) -> None:
    """Its trials would be written next to a file that says otherwise."""
    (tmp_path / "published").mkdir()
    pack([folder], tmp_path / "published" / PACKED_FILE)
    location = RunLocation(tmp_path / "published", tmp_path)
    with pytest.raises(LabError, match="holds packed results"):
        run(Selection("toy", "smoke"), location, 1, lambda event: None)
    assert [path.name for path in (tmp_path / "published").iterdir()] == [PACKED_FILE]


def test_a_trial_with_another_config_is_not_packed(folder: Path, tmp_path: Path) -> None:
    path = folder / "trials" / trial_key(TRIALS[0][0]) / "config.json"
    for change in (lambda: path.write_text("{}"), path.unlink):
        change()
        with pytest.raises(LabError, match=r"config\.json"):
            pack([folder], tmp_path / "a.xz")
    assert not (tmp_path / "a.xz").exists()


def test_other_files_among_the_trials_do_not_matter(folder: Path, tmp_path: Path) -> None:
    (folder / "trials" / ".DS_Store").write_text("")
    (folder / "trials" / "notes").mkdir()
    assert pack([folder], tmp_path / "a.xz") == 3


def test_settings_of_the_wrong_optimizer_are_marked_and_not_shown(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "a.xz"
    pack([folder], packed)
    key = trial_key(TRIALS[2][0])
    for path in (folder, packed):
        record = load_results(path).get(key)
        assert record is not None and record.unreliable == ("settings.options",)
        assert record.result["settings"] == {"optimizer": "tam", "lr": 0.1}
        assert record.stored_result["settings"] == TRIALS[2][2]["settings"]  # not rewritten
    lines = [json.loads(line) for line in lzma.decompress(packed.read_bytes()).splitlines()[1:]]
    assert {line["key"] for line in lines if "unreliable" in line} == {key}


def test_settings_with_the_given_options_alone_are_reliable() -> None:
    settings = {"optimizer": "adatamw", "options": {"betas": [0.9, 0.95], "scope": "tensor"}}
    record = TrialRecord("0" * 12, {"diverged": False, "settings": settings})
    assert record.unreliable == () and record.result["settings"] == settings


def edited(packed: Path, **changes: Any) -> bytes:
    """Return a packed file whose first trial has other entries."""
    header, first, *others = lzma.decompress(packed.read_bytes()).decode().splitlines()
    trial = {**json.loads(first), **changes}
    return lzma.compress("\n".join([header, json.dumps(trial), *others, ""]).encode())


def twice(packed: Path) -> bytes:
    """Return a packed file that has its last trial twice."""
    lines = lzma.decompress(packed.read_bytes()).decode().splitlines()
    return lzma.compress("\n".join([*lines, lines[-1], ""]).encode())


def test_a_file_that_is_none_of_ours_is_refused(folder: Path, tmp_path: Path) -> None:
    packed, bad = tmp_path / "a.xz", tmp_path / "bad.xz"
    pack([folder], packed)
    content = packed.read_bytes()
    deep = b'{"schema": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged in (
        b"", b"no archive", content[:-20], bytes(flipped), lzma.compress(b""), lzma.compress(b"[]\n"),
        lzma.compress(b'{"schema": "tam-lab-results/99", "selections": []}\n'), lzma.compress(deep),
        edited(packed, key="0" * 12), edited(packed, config={"optimizer": "sgd"}), edited(packed, result=[]),
        edited(packed, result={"diverged": "no"}), edited(packed, metrics=[1]),
        edited(packed, metrics={"loss": {"values": [1.0], "rows": [0, 1]}}),
        edited(packed, alignment="AAAA//8="), edited(packed, alignment="AHwAfA=="),
        edited(packed, alignment_differences=[5000]), edited(packed, alignment_differences=[[1], [2]]),
        edited(packed, alignment_differences=[0.5]), edited(packed, alignment_differences=[]),
        edited(packed, alignment_differences=[2**80]),
        edited(packed, metrics={"loss": {"values": [1.0], "rows": [10**12]}}),
        edited(packed, metrics={"epoch": {"values": [1, 2]}, "loss": {"values": [1.0], "rows": [-1]}}),
        content + content, content + b"more", twice(packed),
    ):  # fmt: skip
        bad.write_bytes(damaged)
        with pytest.raises(LabError, match=r"bad.xz cannot be read as packed results"):
            load_results(bad)


def test_a_file_that_expands_too_far_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "a.xz"
    pack([folder], packed)
    size = len(lzma.decompress(packed.read_bytes()))
    monkeypatch.setattr(results, "MAX_BYTES", size)
    assert len(load_results(packed).records) == 3
    packed.write_bytes(lzma.compress(lzma.decompress(packed.read_bytes()) + b" " * (40 << 20)))
    with pytest.raises(LabError, match="expands to more than"):
        load_results(packed)


def test_folders_without_results_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"No such folder: .*nothing"):
        pack([tmp_path / "nothing"], tmp_path / "a.xz")
    with pytest.raises(LabError, match="holds no results"):
        pack([tmp_path], tmp_path / "a.xz")
    (folder / "trials" / trial_key(TRIALS[0][0]) / "result.json").write_text("{")
    with pytest.raises(LabError, match=r"result.json is damaged"):
        pack([folder], tmp_path / "a.xz")
    assert not (tmp_path / "a.xz").exists()
