"""The data sets that the lab knows: where their files are and whether they are complete."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tam.lab.core.errors import DataError
from tam.lab.core.toml import read_toml


@dataclass(frozen=True)
class File:
    """A file of an official layout."""

    path: str  # below the data folder
    md5: str | None = None  # the official one
    size: int | None = None


@dataclass(frozen=True)
class Download:
    """What the authors offer: an archive or a single file."""

    url: str
    md5: str | None = None  # without one, the files in the archive are checked
    megabytes: float = 0.0  # about


@dataclass(frozen=True)
class Layout:
    """One of the forms in which a data set is published."""

    files: tuple[File, ...]  # a file can be a folder
    downloads: tuple[Download, ...] = ()
    how_to_get: str = ""  # if there are no downloads

    def missing_files(self, folder: Path) -> list[str]:
        return [file.path for file in self.files if not (folder / file.path).exists()]


@dataclass(frozen=True)
class DataSet:
    """A data set the lab knows."""

    layouts: tuple[Layout, ...]  # in the order of preference; none if it is built in
    classes: int = 0  # of images that fit into memory, else 0
    modules: tuple[str, ...] = ()  # of extras, that read it

    def presence(self, folder: Path) -> str:
        """Return "present", "incomplete" or "missing". Contents are not checked."""
        missing = [(len(layout.missing_files(folder)), len(layout.files)) for layout in self.layouts]
        if not missing or min(missing)[0] == 0:
            return "present"
        return "incomplete" if any(count < files for count, files in missing) else "missing"

    def megabytes(self) -> float:
        """Return the size of the download, about. 0 if there is none."""
        return sum(download.megabytes for layout in self.layouts[:1] for download in layout.downloads)


def _make_layout(table: Mapping[str, Any]) -> Layout:
    """Return a layout from its table in `sets.toml`."""
    files = [File(**file) for file in table.get("files", ())] + [*map(File, table.get("folders", ()))]
    downloads = tuple(Download(**download) for download in table.get("downloads", ()))
    return Layout(tuple(files), downloads, table.get("how_to_get", ""))


SETS: Mapping[str, DataSet] = {
    name: DataSet(**{**table, "layouts": tuple(map(_make_layout, table.get("layouts", ())))})
    for name, table in read_toml(Path(__file__).with_name("sets.toml")).items()
}


def get_set(name: str) -> DataSet:
    if name not in SETS:
        raise DataError(f"no data set {name!r}; there are {', '.join(SETS)}")
    return SETS[name]


def default_folder() -> Path:
    """Return the data folder that is used if none is named."""
    return Path(os.environ.get("TAM_DATA", Path.home() / ".cache" / "torque-aware-momentum"))


def find(name: str, folder: Path) -> Layout:
    """Return the layout of a data set that is complete in the folder, the first if there are several."""
    layouts = get_set(name).layouts
    if not layouts:
        return Layout(())
    nearest = min(layouts, key=lambda layout: len(layout.missing_files(folder)) / len(layout.files))
    missing = nearest.missing_files(folder)
    if missing:
        count, names = len(nearest.files), "" if len(missing) > 3 else f" ({', '.join(missing)})"
        raise DataError(
            f"{name} is incomplete: {len(missing)} of {count} files missing in {folder.resolve()}{names}. "
            f"{how_to_get(name, nearest, folder)}"
        )
    return nearest


def how_to_get(name: str, layout: Layout, folder: Path) -> str:
    """Return what to do about missing or damaged data."""
    option = "" if folder == default_folder() else f" --data {shlex.quote(str(folder))}"
    return layout.how_to_get or f"Run: tam lab data get {name}{option}"


def check(name: str, layout: Layout, folder: Path) -> None:
    """Raise an error if a file is not the official one."""
    for file in layout.files:
        path, problem = folder.resolve() / file.path, ""
        try:
            size = path.stat().st_size
            if size == 0 and path.is_file():
                problem = "is empty"
            elif file.size is not None and size != file.size:
                problem = f"has {size} bytes instead of {file.size}"
            elif file.md5 is not None and md5_of(path) != file.md5:
                problem = f"is damaged or not the official file: its md5 is not {file.md5}"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem:
            raise DataError(f"{name}: {path} {problem}. {how_to_get(name, layout, folder)}")


def md5_of(path: Path) -> str:
    """Return the checksum that authors publish. It does not protect against an attacker."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
