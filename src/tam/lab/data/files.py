"""Files of data sets: where they lie, whether they are whole, and how to get them."""

from __future__ import annotations

import hashlib
import os
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class DataError(RuntimeError):
    """Data that is missing, damaged or not what it should be; the message says which file and what to do."""


@dataclass(frozen=True)
class File:
    """A file of an official layout."""

    path: str  # below the data folder
    md5: str | None = None  # the official one
    size: int | None = None


@dataclass(frozen=True)
class Download:
    """What its authors offer: an archive that is unpacked, or a file."""

    url: str
    md5: str | None = None  # of an archive without one its files are checked

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Layout:
    """One of the forms in which a data set is published."""

    title: str
    files: tuple[File, ...]
    downloads: tuple[Download, ...] = ()

    def is_in(self, folder: Path) -> bool:
        """Whether all of its files are there."""
        return all((folder / file.path).is_file() for file in self.files)


def default_folder() -> Path:
    """Where data lies unless said otherwise."""
    return Path(os.environ.get("TAM_DATA", Path.home() / ".cache" / "torque-aware-momentum"))


def find(name: str, layouts: tuple[Layout, ...], folder: Path) -> Layout:
    """The first of the layouts that is there."""
    for layout in layouts:
        if layout.is_in(folder):
            return layout
    partial = [
        (layout, file) for layout in layouts for file in layout.files if (folder / file.path).is_file()
    ]
    layout = partial[0][0] if partial else layouts[0]
    missing = [file.path for file in layout.files if not (folder / file.path).is_file()]
    raise DataError(
        f"{name}: {missing[0]} is missing{_more(missing)}; looked in {folder.resolve()} for "
        f"{' or '.join(x.title for x in layouts)}. {how_to_get(name, layout)}"
    )


def is_whole(layouts: tuple[Layout, ...], folder: Path) -> bool:
    """Whether one of them is there, every file as its authors published it."""
    there = [layout for layout in layouts if layout.is_in(folder)]
    return any(all(problem_of(file, folder) is None for file in layout.files) for layout in there)


def _more(missing: list[str]) -> str:
    return f" ({len(missing)} files are)" if len(missing) > 1 else ""


def how_to_get(name: str, layout: Layout) -> str:
    """What to do about missing data."""
    if not layout.downloads:
        return "It cannot be downloaded without an agreement with its owners: put it there yourself."
    urls = ", ".join(download.url for download in layout.downloads)
    return f"`tam lab data get {name} --data FOLDER` downloads it ({urls}); --data says where it lies."


def check(name: str, layout: Layout, folder: Path) -> None:
    """Raises where a file is not the official one."""
    for file in layout.files:
        problem = problem_of(file, folder)
        if problem:
            raise DataError(f"{name}: {folder.resolve() / file.path} {problem}. {how_to_get(name, layout)}")


def problem_of(file: File, folder: Path) -> str | None:
    """What is wrong with a file; None where nothing is known to be."""
    path = folder / file.path
    try:
        size = path.stat().st_size
        if file.size is not None and size != file.size:
            return f"has {size} bytes instead of {file.size}"
        if file.md5 is not None and md5_of(path) != file.md5:
            return f"is damaged or not the official file: its md5 is not {file.md5}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def md5_of(path: Path) -> str:
    """As its authors publish it; no protection against anyone's intent."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def get(name: str, layout: Layout, folder: Path, tell: Callable[[str], None]) -> None:
    """Downloads, checks and unpacks; what is there and whole is not fetched again."""
    if not layout.downloads:
        raise DataError(f"{name}: {how_to_get(name, layout)}")
    folder.mkdir(parents=True, exist_ok=True)
    for download in layout.downloads:
        target = folder / download.name
        if not (target.is_file() and download.md5 is not None and md5_of(target) == download.md5):
            tell(f"{download.url} -> {target}")
            _fetch(name, download, target)
        if target.name.endswith(".tar.gz"):
            with tarfile.open(target) as archive:
                archive.extractall(folder, filter="data")
        elif target.suffix == ".zip":
            with zipfile.ZipFile(target) as bundle:
                bundle.extractall(folder)
    check(name, layout, folder)


def _fetch(name: str, download: Download, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    try:
        with urllib.request.urlopen(download.url, timeout=60) as source, part.open("wb") as file:
            while block := source.read(2**20):
                file.write(block)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise DataError(
            f"{name}: {download.url} cannot be downloaded: {error}. Fetched by other means it belongs at "
            f"{target}"
        ) from error
    if download.md5 is not None and md5_of(part) != download.md5:
        part.unlink()
        raise DataError(
            f"{name}: {download.url} is damaged or not the official file: its md5 is not {download.md5}"
        )
    part.replace(target)
