"""One finished run for all tests of the commands."""

from pathlib import Path

import pytest

from tests.lab.commands.helpers import tam_lab


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab")
    code, output = tam_lab("run", "images", "--preset", "smoke", "--out", path, "--device", "cpu")
    assert code == 0, output
    return path
