"""Downloads data sets: with progress, with size limits, and without leaving anything half-written."""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import wrap_file

from tam.lab.core.errors import DataError
from tam.lab.data.files import Download, File, Layout, check, md5_of

MAX_FILE = 2**28  # bytes of one file whose size is not known
MAX_TOTAL = 2**30  # bytes of one archive, and of all that is unpacked from it


def get(name: str, layout: Layout, folder: Path) -> None:
    """Download, check and unpack a data set. An archive that is in the folder is used as it is."""
    if not layout.downloads:
        raise DataError(f"{name}: {layout.how_to_get}")
    folder.mkdir(parents=True, exist_ok=True)
    for download in layout.downloads:
        target = folder / download.url.rsplit("/", 1)[-1]
        is_new = not target.is_file() or (download.md5 is not None and md5_of(target) != download.md5)
        if is_new:
            _fetch(name, download, target)
        if target.name.endswith((".tar.gz", ".zip")):
            try:
                _unpack(target, layout.files, folder)
            except Exception as error:  # tarfile and zipfile raise many kinds
                if is_new:
                    target.unlink()
                hint = "" if is_new else " Remove it and run the command again"
                raise DataError(f"{name}: {target} cannot be unpacked: {error}.{hint}") from error
    check(name, layout, folder)


def _fetch(name: str, download: Download, target: Path) -> None:
    """Download a file and show the progress."""
    try:
        with urllib.request.urlopen(download.url, timeout=60) as response:
            size = int(response.headers.get("Content-Length") or 0)
            total = size or int(download.megabytes * 1e6)
            console = Console(stderr=True)
            with wrap_file(response, total, description=target.name, console=console) as source:
                _save(target, source, MAX_TOTAL, download.md5, size)
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(
            f"{name}: {download.url} cannot be downloaded: {error or type(error).__name__}. If you get it by "
            f"other means, put it at {shlex.quote(str(target))}"
        ) from error


def _unpack(archive: Path, files: Iterable[File], folder: Path) -> None:
    """Unpack these files of an archive, and no other member of it."""
    missing, total = {file.path: file for file in files}, 0
    with archive.open("rb") as content:
        for path, member in _regular_members(content, archive.name):
            if path in missing:
                file = missing.pop(path)
                limit = min(MAX_FILE if file.size is None else file.size, MAX_TOTAL - total)
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                total += _save(folder / path, member, limit, file.md5)
            if not missing:
                return
    raise DataError(f"it has no file {next(iter(missing))}")


def _regular_members(content: IO[bytes], name: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the path and the content of every member that is a regular file, not a link or a device."""
    if name.endswith(".zip"):
        with zipfile.ZipFile(content) as bundle:
            for info in bundle.infolist():
                if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16):
                    yield info.filename, bundle.open(info)
    else:
        with tarfile.open(fileobj=content) as archive:
            for entry in archive:
                member = archive.extractfile(entry) if entry.isreg() else None
                if member is not None:
                    yield entry.name, member


def _save(target: Path, source: IO[bytes], limit: int, md5: str | None, size: int = 0) -> int:
    """Write a file of at most `limit` bytes, or nothing. `size` is what it should have. Return its size."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    digest, received = hashlib.md5(usedforsecurity=False), 0
    try:
        with part.open("xb") as file:  # O_CREAT | O_EXCL: a link that appears meanwhile is not followed
            while block := source.read(2**20):
                received += len(block)
                if received > limit:
                    raise DataError(f"{target.name} is larger than {limit:,} bytes")
                digest.update(block)
                file.write(block)
        if received < size:
            raise ConnectionError(f"the connection ended after {received} of {size} bytes")
        if md5 is not None and digest.hexdigest() != md5:
            raise DataError(f"{target.name} is damaged or not the official file: its md5 is not {md5}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return received
