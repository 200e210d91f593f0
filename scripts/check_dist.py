"""Check what `make dist` has built: python scripts/check_dist.py SDIST WHEEL."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

BUILD_ONLY = (".c", ".h")  # sources of the kernel: in the sdist, not in a wheel
GENERATED = ("PKG-INFO", "setup.cfg")  # by setuptools, in the sdist
KERNEL = "tam/step/fused/_cpu."


def sdist_files(path: Path) -> set[str]:
    """Return the files of the sdist, without the folder that they share."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    return {name for name in names if name not in GENERATED and ".egg-info/" not in name}


def wheel_files(path: Path) -> set[str]:
    """Return the files of the wheel, without its metadata."""
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    return {name for name in names if not name.partition("/")[0].endswith(".dist-info")}


def tracked_files() -> set[str] | None:
    """Return the files that git tracks, without hidden ones. None: this is no checkout."""
    listing = subprocess.run(["git", "ls-files"], capture_output=True, text=True)
    names = listing.stdout.splitlines() if listing.returncode == 0 else []
    return {name for name in names if not name.startswith(".")} or None


def differences(what: str, files: set[str], expected: set[str]) -> list[str]:
    lacking, surplus = sorted(expected - files), sorted(files - expected)
    return [f"{what} lacks {name}" for name in lacking] + [f"{what} must not have {name}" for name in surplus]


def main() -> None:
    sdist, wheel = map(Path, sys.argv[1:])
    sources, installed = sdist_files(sdist), wheel_files(wheel)
    tracked = tracked_files()
    problems = differences("the sdist", sources, sources if tracked is None else tracked)
    package = {name.removeprefix("src/") for name in sources if name.startswith("src/tam/")}
    expected = {name for name in package if not name.endswith(BUILD_ONLY)}
    kernels = {name for name in installed if name.startswith(KERNEL)}
    problems += differences("the wheel", installed - kernels, expected)
    if bool(kernels) == wheel.name.endswith("-none-any.whl"):
        problems.append(f"the tag of {wheel.name} is wrong: it has {len(kernels)} kernels")
    for path, files in ((sdist, sources), (wheel, installed)):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {len(files)} files")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
