"""The results of runs, read once: from a run folder, a packed file, or a folder that holds a packed file.

A packed file has one line of JSON per trial: key, config, result, metrics by column, scores, and s of every
step as integers. The first line has the schema, what was run, and the hardware. What is not finite is `null`.

Floats among the metrics have six significant digits; the figures of the result are exact. Older files have
the metrics in full, and those that were measured in float32 in columns named after it; and s in 16 bits.
"""

from __future__ import annotations

import base64
import json
import lzma
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tam.lab.core import store
from tam.lab.core.alignment import from_differences, read_alignment, round_alignment, to_differences
from tam.lab.core.config import CANONICAL_DEFAULTS, trial_key
from tam.lab.core.errors import LabError

RUNS_FILE = "runs.json"  # what was run in a folder
PACKED_FILE = "trials.jsonl.xz"
TRIAL_NAME = "[0-9a-f]" * 12
RUN_AGAIN = "Remove it and start the runs again. Finished trials are reused"
SCHEMA, OLDER_SCHEMA = "tam-lab-results/2", "tam-lab-results/1"
MAX_BYTES = 64 << 20  # of a packed file, expanded: it may come from somebody else
MAX_MEMORY = 128 << 20  # of the decompressor


@dataclass
class TrialRecord:
    """A finished trial. A record from a run folder reads each of its files when it is first needed."""

    key: str
    stored_result: dict[str, Any]  # as it was written
    folder: Path | None = None  # None: everything else was given when the record was made

    @cached_property
    def unreliable(self) -> tuple[str, ...]:
        """The fields of the stored result that are wrong.

        Warm-ups once recorded the options of their second optimizer under the name of the first one.
        """
        settings = self.stored_result.get("settings", {})
        options = settings.get("options", {})
        if "maximize" not in options:
            return ()  # only the options that were given; warm-ups recorded all of them
        expected = CANONICAL_DEFAULTS.get(settings.get("optimizer", ""), {})
        is_wrong = any((name in options) != (name in expected) for name in ("betas", "smoothing"))
        return ("settings.options",) if is_wrong else ()

    @cached_property
    def result(self) -> dict[str, Any]:
        """The result without its unreliable fields."""
        result = dict(self.stored_result)
        if self.unreliable:
            result["settings"] = {k: v for k, v in result["settings"].items() if k != "options"}
        return result

    @property
    def diverged(self) -> bool:
        return bool(self.stored_result["diverged"])

    @cached_property
    def config(self) -> dict[str, Any]:
        """The canonical configuration."""
        return _read_file(self._path("config.json"))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per epoch."""
        return store.read_metrics(self._path("metrics.jsonl"), self.stored_result.get("epochs"))

    @cached_property
    def alignment(self) -> Tensor | None:
        """s of every step, if it was recorded: the mean over the segments, rounded as in a packed file."""
        path = self._path(store.ALIGNMENT_FILE)
        if not path.exists():
            return None
        s = read_alignment(path, self.stored_result)
        return round_alignment(s if s.dim() == 1 else s.float().mean(1))

    @cached_property
    def scores(self) -> dict[str, dict[str, Any]]:
        """What was measured of the trained network afterwards, by task."""
        paths = sorted(self._path(store.SCORES_FOLDER).glob("*.json"))
        return {path.stem: _read_file(path) for path in paths}

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / name


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return store.read_json(path, dict)
    except FileNotFoundError as error:
        raise LabError(f"{path} is missing: remove the trial's folder, and it is run again") from error


@dataclass
class Results:
    """Finished trials by key. A damaged one raises an error when it is asked for, and not before."""

    root: Path | None = None  # the run folder; None: packed
    records: dict[str, TrialRecord] = field(default_factory=dict)
    stored_selections: list[dict[str, Any]] = field(default_factory=list)  # what was asked for
    damaged: dict[str, LabError] = field(default_factory=dict)

    def get(self, key: str) -> TrialRecord | None:
        """Return the record of a trial, or None if it is not finished."""
        if key in self.damaged:
            raise self.damaged[key]
        return self.records.get(key)

    def __iter__(self) -> Iterator[TrialRecord]:
        return iter(self.records.values())

    def refresh(self) -> Results:
        """Read the results that have appeared in the run folder since the last time."""
        for path in [] if self.root is None else sorted((self.root / "trials").glob(TRIAL_NAME)):
            if path.name in self.records:
                continue
            self.damaged.pop(path.name, None)
            try:
                result = store.read_result(path)
                if result is not None:
                    self.records[path.name] = TrialRecord(path.name, result, path)
            except LabError as error:
                self.damaged[path.name] = error
        return self


def load_results(path: Path) -> Results:
    """Return the results at a path. A folder that does not exist yet has none."""
    runs, packed = path / RUNS_FILE, path / PACKED_FILE
    try:
        if path.is_file():
            return _read_packed(path)
        if packed.is_file() and not runs.exists():
            return _read_packed(packed)
        selections = store.read_json(runs, list, RUN_AGAIN) if runs.exists() else []
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from error
    return Results(path, stored_selections=selections).refresh()


def load_existing_results(path: Path) -> Results:
    """Return the results of what was run in a folder or packed. Raise an error if nothing was."""
    results = load_results(path)
    if not path.exists():
        raise LabError(f"No such folder: {path}")
    if not results.stored_selections:
        raise LabError(f"{path} holds no results: it has no {RUNS_FILE} or {PACKED_FILE}")
    return results


def _read_packed(path: Path) -> Results:
    """Read a packed file. One that is damaged, too large or of another schema is refused."""
    try:
        header, *trials = map(json.loads, _expand(path).splitlines())
        if not isinstance(header, dict) or header.get("schema") not in (SCHEMA, OLDER_SCHEMA):
            raise ValueError(f"its schema is neither {SCHEMA} nor {OLDER_SCHEMA}")
        records = {trial["key"]: _packed_record(trial) for trial in trials}
        if len(records) < len(trials):
            raise ValueError("it has a trial twice")
        return Results(records=records, stored_selections=list(header["selections"]))
    except lzma.LZMAError as error:
        raise LabError(f"{path} cannot be read as packed results: it is damaged or no .xz file") from error
    except Exception as error:  # a file from somebody else can raise anything
        raise LabError(f"{path} cannot be read as packed results: {error}") from error


def _expand(path: Path) -> str:
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_MEMORY)
    with path.open("rb") as file:
        text = decompressor.decompress(file.read(MAX_BYTES), max_length=MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"it expands to more than {MAX_BYTES >> 20} MiB")
        if not decompressor.eof and file.read(1):
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
        if not decompressor.eof:
            raise EOFError("it was cut, or is no file of `tam lab pack`")
        if decompressor.unused_data or file.read(1):
            raise ValueError("something follows its end")
    return text.decode()


def _packed_record(line: Mapping[str, Any]) -> TrialRecord:
    if line["key"] != trial_key(line["config"]):
        raise ValueError(f"the key {line['key']!r} is not that of its config")
    result: dict[str, Any] = {k: math.nan if v is None else v for k, v in line["result"].items()}
    store.check_result(result)
    record = TrialRecord(line["key"], result)
    record.config, record.scores = dict(line["config"]), dict(line.get("scores", {}))
    record.alignment = None
    if "alignment" in line:
        content = bytearray(base64.b64decode(line["alignment"], validate=True))
        record.alignment = torch.frombuffer(content, dtype=torch.float16).float() + 0.0
    elif "alignment_differences" in line:
        record.alignment = from_differences(line["alignment_differences"])
    if record.alignment is not None and not bool((record.alignment.abs() <= 1).all()):
        raise ValueError(f"the alignment of {line['key']} lies outside of [-1, 1]")
    record.metrics = []
    columns = line["metrics"].items()  # `pack_metrics` says how they are written; older files have "float32"
    for name, column in sorted(columns, key=lambda item: "rows" in item[1]):  # whole columns first
        values = column["values"] if "values" in column else torch.tensor(column["float32"]).tolist()
        record.metrics = record.metrics or [{} for _ in values]
        numbers = column.get("rows", range(len(record.metrics)))
        if not all(0 <= number < len(record.metrics) for number in numbers):
            raise ValueError(f"{line['key']} has no row for a value of {name!r}")
        for number, value in zip(numbers, values, strict=True):
            record.metrics[number][name] = math.nan if value is None else value
    store.check_rows(record.metrics, result.get("epochs"))
    return record


def add_record(results: Results, origins: dict[str, Path], record: TrialRecord, source: Path) -> None:
    """Add a trial. Copies must have the same figures. What the first one lacks is taken from the other.

    Raises:
        LabError: If another source, noted in `origins`, has the trial with other figures.
    """
    known = results.records.get(record.key)
    if known is None:
        results.records[record.key], origins[record.key] = record, source
        return
    before, after = _figures(known), _figures(record)
    if any(before[name] != after[name] for name in before.keys() & after.keys()):
        raise LabError(
            f"{origins[record.key]} and {source} have different results of the same trial, {record.key}: "
            "leave one of them out"
        )
    known.metrics = known.metrics or record.metrics
    known.scores = {**record.scores, **known.scores}
    known.alignment = record.alignment if known.alignment is None else known.alignment


def _figures(record: TrialRecord) -> dict[str, str]:
    """Return what two copies of a trial share, if both have it: not time, machine, files and settings.

    A packed copy has the metrics rounded, so they are compared as they would be packed.
    """
    left_out = ("timing", "machine", "files", "settings")
    result = {key: value for key, value in record.stored_result.items() if key not in left_out}
    s = None if record.alignment is None else record.alignment.tolist()
    metrics = pack_metrics(record.metrics)
    contents = {"result": result, "metrics": metrics, "alignment": s}
    contents |= {f"score {task}": score for task, score in record.scores.items()}
    return {k: json.dumps(without_nan(v), sort_keys=True) for k, v in contents.items() if v}


def pack(sources: Sequence[Path], target: Path) -> int:
    """Write the finished trials of run folders and packed files to one file. Return their number."""
    merged, origins = Results(), dict[str, Path]()
    selections: list[dict[str, Any]] = []
    for source in sources:
        results = load_existing_results(source)
        if results.damaged:
            raise LabError("\n".join(map(str, results.damaged.values())))
        if not results.records:
            raise LabError(f"{source} holds no finished trial")
        selections += [one for one in results.stored_selections if one not in selections]
        for record in results:
            add_record(merged, origins, record, source)
    records = [merged.records[key] for key in sorted(merged.records)]
    machines = {json.dumps(record.stored_result["machine"], sort_keys=True) for record in records}
    hardware = [json.loads(machine) for machine in sorted(machines)]
    header = {"schema": SCHEMA, "selections": selections, "hardware": hardware}
    content = "".join([_json_line(header), *(_json_line(_packed_trial(one)) for one in records)]).encode()
    if len(content) > MAX_BYTES:
        raise LabError(
            f"{target} would expand to more than {MAX_BYTES >> 20} MiB, which is refused when it is read: "
            "pack fewer folders into one file"
        )
    store.write_whole(target, lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    return len(records)


def _json_line(content: Mapping[str, Any]) -> str:
    return json.dumps(without_nan(content), allow_nan=False, separators=(",", ":")) + "\n"


def unpack(source: Path, folder: Path) -> int:
    """Write a packed file as a run folder that runs can continue. Return the number of trials."""
    results = load_existing_results(source)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        if folder.exists():
            folder.rmdir()  # it must be empty
        _write_folder(results, part)
        part.rename(folder)
    except (OSError, ValueError) as error:
        shutil.rmtree(part, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise LabError(f"{folder} cannot be written: {reason}. Unpack into a new folder") from error
    return len(results.records)


def _write_folder(results: Results, folder: Path) -> None:
    for record in results:
        trial = store.TrialFolder(folder, record.config)
        trial.path.mkdir(parents=True)
        store.write_json(trial.path / "config.json", record.config)
        trial.begin_with(record.metrics)
        for task, score in record.scores.items():
            (trial.path / store.SCORES_FOLDER).mkdir(exist_ok=True)
            store.write_json(trial.path / store.SCORES_FOLDER / f"{Path(task).name}.json", score)
        if record.alignment is not None:
            trial.write(store.ALIGNMENT_FILE, record.alignment)
        store.write_json(trial.path / "result.json", record.stored_result)
    store.write_json(folder / RUNS_FILE, results.stored_selections)


def _packed_trial(record: TrialRecord) -> dict[str, Any]:
    if record.key != trial_key(record.config):
        raise LabError(f"{record.folder}/config.json is damaged: it is not that of the trial {record.key}")
    # The digests are of files whose content is stored in another form here.
    result = {name: value for name, value in record.stored_result.items() if name != "files"}
    line: dict[str, Any] = {
        "key": record.key, "config": record.config, "result": result,
        "metrics": pack_metrics(record.metrics), "unreliable": record.unreliable,
        "scores": record.scores,
    }  # fmt: skip
    if record.alignment is not None:
        line["alignment_differences"] = to_differences(record.alignment)
    return {name: content for name, content in line.items() if content or name == "metrics"}


def pack_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metrics by name, floats with six significant digits.

    "rows" are the numbers of the rows that have the metric, if not all do. Such columns come last, as they
    do when they are read again.
    """
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        numbers = [i for i, row in enumerate(rows) if name in row]
        columns[name] = {"values": [_round_floats(rows[i][name]) for i in numbers]}
        if len(numbers) < len(rows):
            columns[name]["rows"] = numbers
    return dict(sorted(columns.items(), key=lambda item: "rows" in item[1]))


def _round_floats(value: Any) -> Any:
    """Return the value with every float in it rounded to six significant digits."""
    if isinstance(value, (list, tuple)):
        return [_round_floats(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def without_nan(value: Any) -> Any:
    """Return the value with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
