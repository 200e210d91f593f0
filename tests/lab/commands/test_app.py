"""Which commands there are, what listing them imports, and what a shell completes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tam.lab.core.registry import experiment_names
from tests.lab.commands.helpers import SOURCE, run_process, tam_lab

HEAVY = ("scipy", "sklearn", "pandas", "transformers", "torch_geometric", "ray", "mteb")
LIST_IMPORTS = """import atexit
atexit.register(lambda: print("LOADED", *sys.modules, file=sys.stderr))"""


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["lab", "--help"], ["lab", "run", "--help"]])
def test_help_imports_no_experiment_and_nothing_heavy(args: list[str]) -> None:
    done = run_process(*args, before=LIST_IMPORTS)
    assert done.returncode == 0 and done.stdout
    loaded = done.stderr.partition("LOADED ")[2].split()
    assert "tam.cli" in loaded
    experiments = [name for name in loaded if name.startswith("tam.lab.experiments.") and name.count(".") > 3]
    assert experiments == [] and not {name.partition(".")[0] for name in loaded} & set(HEAVY)


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_and_version_need_no_extra(args: list[str]) -> None:
    done = run_process(
        *args, before="sys.modules |= dict.fromkeys(['typer', 'rich', 'numpy', 'scipy', 'sklearn'])"
    )
    assert done.returncode == 0, done.stderr
    commands = ["pip install '.[demo]'", "pip install '.[lab]'"]
    assert "--version" in args or all(command in done.stdout for command in commands)


@pytest.mark.parametrize(
    "module, extra, command",
    [
        ("typer", "lab", "run images --preset smoke"),
        ("filelock", "lab", "run images --preset smoke"),
        ("sklearn", "lab", "run images --preset smoke"),
        ("PIL", "lab", "run imagenet --preset smoke"),
        ("torch_geometric", "graph", "run graph --preset smoke"),
        ("accelerate", "llm", "run llm --preset smoke"),
        ("ray", "ray", "run toy --preset smoke --engine ray"),
        ("jinja2", "lab", "report empty"),
    ],
)
def test_a_missing_package_is_one_line_that_names_the_extra(
    module: str, extra: str, command: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    arguments = [word.replace("empty", str(tmp_path / "empty")) for word in command.split()]
    out = ["--out", tmp_path / "out"] if "run" in arguments else []
    done = run_process("lab", *arguments, *out, before=f"sys.modules[{module!r}] = None")
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert f"needs {module}, " in line and line.endswith(f"pip install '.[{extra}]'")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package in which an experiment, and one whole package, cannot be imported."""
    shutil.copytree(SOURCE / "tam", tmp_path / "tam", ignore=shutil.ignore_patterns("__pycache__"))
    experiments = tmp_path / "tam" / "lab" / "experiments"
    for path, content in (
        ("graph/studies.py", "import no_such_package\n"),
        ("broken/__init__.py", "raise RuntimeError('broken on purpose')\n"),
    ):
        (experiments / path).parent.mkdir(exist_ok=True)
        (experiments / path).write_text(content)
    return tmp_path


def test_an_experiment_that_cannot_be_loaded_disables_no_other(checkout: Path) -> None:
    done = run_process("lab", "list", PYTHONPATH=str(checkout))
    assert done.returncode == 0, done.stderr
    assert "graph: cannot be loaded: No module named 'no_such_package'" in done.stdout
    assert "broken: cannot be loaded: broken on purpose" in done.stdout
    assert "\nimages: Image classification" in done.stdout
    stored = json.loads(run_process("lab", "list", "--json", PYTHONPATH=str(checkout)).stdout)
    assert {entry["name"] for entry in stored if "error" in entry} == {"graph", "broken"}
    done = run_process("lab", "data", "list", PYTHONPATH=str(checkout))
    assert done.returncode == 0 and "graph cannot be loaded" in done.stderr and "warmup" in done.stdout
    done = run_process("lab", "run", "graph", "--preset", "smoke", PYTHONPATH=str(checkout))
    assert done.returncode == 1 and "Traceback" not in done.stderr and "no_such_package" in done.stderr


def test_mistakes_in_a_new_experiment_are_named(checkout: Path) -> None:
    experiments = checkout / "tam" / "lab" / "experiments"
    (experiments / "fresh").mkdir()
    shutil.copy(experiments / "toy" / "studies.py", experiments / "fresh")
    done = run_process("lab", "run", "fresh", PYTHONPATH=str(checkout))
    assert done.returncode == 1
    assert done.stderr == f"tam: {experiments / 'fresh'} has no __init__.py: add an empty one\n"
    shutil.copytree(experiments / "toy", experiments / "fresh", dirs_exist_ok=True)
    done = run_process("lab", "run", "fresh", PYTHONPATH=str(checkout))
    assert "the name of EXPERIMENT must be 'fresh', got 'toy'" in done.stderr


def test_a_package_of_an_experiment_can_have_commands(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "tam", tmp_path / "tam", ignore=shutil.ignore_patterns("__pycache__"))
    package = tmp_path / "tam" / "lab" / "experiments" / "extra"
    package.mkdir()
    (package / "__init__.py").write_text(
        'COMMANDS = {"shout": "commands:shout", "paper shout": "commands:shout"}\nEXPERIMENTS = {}\n'
    )
    (package / "commands.py").write_text(
        'print("imported")\n\n\ndef shout(word: str) -> None:\n    """Say it aloud."""\n    print(word)\n'
    )
    for args in (["lab", "--help"], ["lab", "paper", "--help"]):
        done = run_process(*args, PYTHONPATH=str(tmp_path))
        assert "Say it aloud." in done.stdout and "imported" not in done.stdout
    for args in (["lab", "shout"], ["lab", "paper", "shout"]):
        done = run_process(*args, "yes", PYTHONPATH=str(tmp_path))
        assert done.stdout.split() == ["imported", "yes"]


def complete(*words: str) -> str:
    """Return what a shell is offered after these words."""
    environment = {
        **os.environ, "PYTHONPATH": str(SOURCE), "_TAM_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["tam", *words]), "COMP_CWORD": str(len(words)),
    }  # fmt: skip
    code = "import sys; sys.argv[0] = 'tam'; from tam.cli import main; main()"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240).stdout


@pytest.mark.parametrize(
    "words, expected",
    [
        (["lab", "run", "im"], {"imagenet", "images"}),
        (["lab", "list", "gr"], {"graph"}),
        (["lab", "run", "images", "--preset", "sm"], {"smoke"}),
        (["lab", "run", "images", "--preset", "smoke", "--study", ""], {"digits-tiny"}),
        (["lab", "data", "get", "cifar"], {"cifar10", "cifar100"}),
    ],
)
def test_completion(words: list[str], expected: set[str]) -> None:
    assert set(complete(*words).split()) == expected


def test_completion_of_variants() -> None:
    offered = complete("lab", "run", "images", "--preset", "smoke", "--variant", "SGDM")
    assert offered.splitlines() == ["SGDM", "SGDM at TAM's effective lr"]


def test_list() -> None:
    code, output = tam_lab("list")
    assert code == 0 and "images: Image classification" in output and "--study" not in output
    code, output = tam_lab("list", "images")
    assert code == 0 and "--study cifar10-resnet18: " in output and "online" not in output
    code, output = tam_lab("list", "picture")
    assert code == 1 and "no experiment 'picture'; there are ablations" in output
    (images,) = json.loads(tam_lab("list", "images", "--json")[1])
    (study,) = images["presets"]["smoke"]
    assert (study["study"], study["length"], study["unit"]) == ("digits-tiny", 2, "epoch")
    assert [entry["name"] for entry in json.loads(tam_lab("list", "--json")[1])] == experiment_names()


def test_data_list(tmp_path: Path) -> None:
    lines = {line.split()[0]: line for line in tam_lab("data", "list", "--data", tmp_path)[1].splitlines()}
    assert "missing" in lines["cifar10"] and "images" in lines["cifar10"] and "170 MB" in lines["cifar10"]
    assert "present" in lines["digits"] and "graph" in lines["movielens"] and "continual" in lines["clear"]


def test_data_check_and_get(tmp_path: Path) -> None:
    code, output = tam_lab("data", "check", "digits", "--data", tmp_path)
    assert code == 0 and "complete" in output
    assert tam_lab("data", "get", "digits", "--data", tmp_path) == (0, "digits: present\n")
    code, output = tam_lab("data", "get", "imagenet", "--data", tmp_path)
    assert code == 1 and "cannot be downloaded without an agreement" in output
    for name in ("train", "valid", "test"):
        path = tmp_path / "wikitext-2" / f"wiki.{name}.tokens"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    code, output = tam_lab("data", "check", "wikitext-2", "--data", tmp_path)
    assert code == 1 and "wiki.train.tokens is empty" in output
    for path in (tmp_path / "wikitext-2").iterdir():
        path.write_text("a b c\n")
    code, output = tam_lab("data", "check", "wikitext-2", "--data", tmp_path)
    assert code == 0 and "neither size nor md5 is known for" in output
