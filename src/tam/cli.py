"""The command line, `tam`. `tam --help` and `tam --version` work without any extra."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tam._extras import install_command
from tam._version import __version__
from tam.lab.core.errors import LabError, explain_missing

if TYPE_CHECKING:
    import typer

LAB = "Run the paper's experiments and report them next to its figures."
USAGE = f"""Usage: tam [--version] [--help] COMMAND ...

Torque-aware momentum: optimizers for PyTorch.

Commands:
  demo  Compare the paper's six optimizers on a small task.
  lab   {LAB}
"""
INCOMPLETE = f"""
The commands need packages that are not installed. In a checkout, run one of:
  {install_command("demo")}
  {install_command("lab")}    # demo and lab
"""


def build() -> "typer.Typer":
    """Return the program with all its commands."""
    import typer

    from tam.lab.commands.app import make_app

    app = make_app({"lab": (LAB, _load_lab)}, name="tam", add_completion=True)

    def show_version(wanted: bool) -> None:
        if wanted:
            print(__version__)
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """Torque-aware momentum: optimizers for PyTorch."""

    @app.command()
    def demo(
        seeds: Annotated[int, typer.Option(min=1, help="Runs of each optimizer, one per seed.")] = 5,
        epochs: Annotated[int, typer.Option(min=1, help="Epochs of each run.")] = 30,
        out: Annotated[
            Path, typer.Option(metavar="FILE.html", help="The page to write. An existing one is replaced.")
        ] = Path("tam-demo.html"),
    ) -> None:
        """Compare the paper's six optimizers on a small task. This takes 20 to 90 seconds on a CPU.

        Trains a multilayer perceptron on scikit-learn's digits (no download) with SGD, SGDM, TAM, Adam,
        AngularGrad and AdaTAM, each at the paper's learning rate. For one seed all six share the
        split, the initial weights and the batches.

        Prints a table, and writes one HTML page with the curves of training loss, test accuracy,
        alignment s and gradient norm. Progress goes to stderr. The last line on stdout is the path of
        the page.

        Example: tam demo --seeds 3 --epochs 10 --out /tmp/demo.html
        """
        from tam.lab import demo as lab
        from tam.lab.commands.options import check_writable

        check_writable(out)
        lab.run(seeds, epochs, out)
        print(out)

    return app


def _load_lab() -> object:
    from tam.lab.commands import app

    return app.load(LAB)


def main() -> None:
    """Run the program. This is its entry point."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(__version__)
        return
    try:
        build()()
    except LabError as error:
        print(f"tam: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except ModuleNotFoundError as error:
        is_demo = arguments[:1] == ["demo"]
        explanation = explain_missing(
            "the demo" if is_demo else "the lab", error, "demo" if is_demo else None
        )
        if explanation is None:
            raise
        if arguments in ([], ["--help"]):
            print(USAGE + INCOMPLETE, end="")
        elif arguments[0] not in ("demo", "lab", "--install-completion", "--show-completion"):
            print(f"tam: no such command: {arguments[0]}\n{USAGE}{INCOMPLETE}", end="", file=sys.stderr)
            sys.exit(2)
        else:
            sys.exit(f"tam: {explanation}")


if __name__ == "__main__":
    main()
