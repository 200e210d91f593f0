"""Downloads: from a server on this machine, and from archives that are damaged or hostile."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tam.lab.core.errors import DataError
from tam.lab.data import download
from tam.lab.data.files import Download, File, Layout, md5_of


@contextmanager
def serve(content: bytes, sent: int | None = None, announced: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Serve this content. Yield the address and the paths that were asked for. `sent`: cut it there."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            if announced:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:sent])

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def make_zip(members: dict[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = ((stat.S_IFLNK if name in links else stat.S_IFREG) | 0o644) << 16
            bundle.writestr(info, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_a_download_is_checked_and_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"data")
    md5 = md5_of(tmp_path / "source")
    with serve(b"data") as (address, requests):
        layout = Layout((File("data.bin", md5),), (Download(f"{address}/data.bin", md5),))
        for _ in range(2):
            download.get("data", layout, tmp_path / "a")
        assert requests == ["/data.bin"] and (tmp_path / "a" / "data.bin").read_bytes() == b"data"
        bad = Layout(layout.files, (Download(f"{address}/data.bin", "0" * 32),))
        with pytest.raises(DataError, match="is damaged or not the official file"):
            download.get("data", bad, tmp_path / "b")
    assert files_below(tmp_path / "b") == []
    with pytest.raises(DataError, match=r"cannot be downloaded.*put it at"):
        download.get("data", layout, tmp_path / "b")  # the server is gone
    assert files_below(tmp_path / "b") == []


@pytest.mark.parametrize("announced", [True, False])
def test_a_cut_connection_gives_one_line_and_leaves_nothing(tmp_path: Path, announced: bool) -> None:
    content = make_zip({"set/a.txt": os.urandom(5000)})
    with serve(content, sent=3000, announced=announced) as (address, _):
        layout = Layout((File("set/a.txt"),), (Download(f"{address}/set.zip"),))
        with pytest.raises(DataError) as error:
            download.get("set", layout, tmp_path)
    assert "\n" not in str(error.value) and ("3000 of" in str(error.value) or not announced)
    assert files_below(tmp_path) == []


def test_only_the_files_of_the_layout_are_unpacked(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    members = {
        "../outside.txt": b"no", "/absolute.txt": b"no", "set/other.txt": b"no", "set/../../up.txt": b"no",
        "set/link.txt": b"/etc/passwd", "set/a.txt": b"yes",
    }  # fmt: skip
    with serve(make_zip(members, links=("set/link.txt",))) as (address, _):
        layout = Layout((File("set/a.txt"),), (Download(f"{address}/set.zip"),))
        download.get("set", layout, folder)
        assert files_below(tmp_path) == ["data/set.zip", "data/set/a.txt"]
        (folder / "set.zip").unlink()
        linked = Layout((File("set/link.txt"),), layout.downloads)
        with pytest.raises(DataError, match=r"it has no file set/link\.txt"):
            download.get("set", linked, folder)
    assert files_below(tmp_path) == ["data/set/a.txt"]


def test_links_in_a_tar_are_not_unpacked(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        link = tarfile.TarInfo("set/a.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        regular = tarfile.TarInfo("set/b.txt")
        regular.size = 3
        archive.addfile(regular, io.BytesIO(b"yes"))
    with serve(buffer.getvalue()) as (address, _):
        source = (Download(f"{address}/set.tar.gz"),)
        download.get("set", Layout((File("set/b.txt"),), source), tmp_path)
        assert (tmp_path / "set" / "b.txt").read_bytes() == b"yes"
        with pytest.raises(DataError, match=r"it has no file set/a\.txt"):
            download.get("set", Layout((File("set/a.txt"),), source), tmp_path)
    assert not (tmp_path / "set" / "a.txt").exists()


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, all files together, and the download itself."""
    content = make_zip({"a.txt": bytes(3000), "b.txt": bytes(3000)})
    with serve(content) as (address, _):
        source = (Download(f"{address}/set.zip"),)
        both = Layout((File("a.txt"), File("b.txt")), source)
        for name, limit, message in (
            ("MAX_FILE", 2000, r"a\.txt is larger than 2,000 bytes"),
            ("MAX_TOTAL", 5000, r"b\.txt is larger than 2,000 bytes"),
            ("MAX_TOTAL", 100, r"set\.zip is larger than 100 bytes"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(download, name, limit)
                with pytest.raises(DataError, match=message):
                    download.get("set", both, tmp_path / str(limit))
        with pytest.raises(DataError, match=r"a\.txt is larger than 10 bytes"):
            download.get("set", Layout((File("a.txt", size=10),), source), tmp_path / "known")
    assert [name for name in files_below(tmp_path) if name != "5000/a.txt"] == []


def test_a_file_that_is_not_the_official_one_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good")
    with serve(make_zip({"a.txt": b"bad"})) as (address, _):
        layout = Layout((File("a.txt", md5_of(tmp_path / "a.txt")),), (Download(f"{address}/set.zip"),))
        with pytest.raises(DataError, match=r"a\.txt is damaged or not the official file"):
            download.get("set", layout, tmp_path)
    assert files_below(tmp_path) == ["a.txt"] and (tmp_path / "a.txt").read_bytes() == b"good"


def test_an_archive_that_is_there_is_used(tmp_path: Path) -> None:
    """It may have been brought by other means."""
    layout = Layout((File("a.txt"),), (Download("http://127.0.0.1:9/set.zip"),))
    (tmp_path / "set.zip").write_bytes(make_zip({"a.txt": b"yes"}))
    download.get("set", layout, tmp_path)
    assert (tmp_path / "a.txt").read_bytes() == b"yes"
    (tmp_path / "set.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match="Remove it and run the command again"):
        download.get("set", layout, tmp_path)
    assert (tmp_path / "set.zip").exists()


def test_a_link_in_place_of_the_part_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f".a.txt.{os.getpid()}.part").symlink_to(victim)
    (tmp_path / "data" / "a.txt").symlink_to(victim)
    with serve(make_zip({"a.txt": b"yes"})) as (address, _):
        download.get("set", Layout((File("a.txt"),), (Download(f"{address}/set.zip"),)), tmp_path / "data")
    assert victim.read_bytes() == b"mine" and not (tmp_path / "data" / "a.txt").is_symlink()


def test_progress_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(bytes(3000)) as (address, _):
        layout = Layout((File("data.bin"),), (Download(f"{address}/data.bin"),))
        download.get("data", layout, tmp_path)
    assert "data.bin" in capsys.readouterr().err
