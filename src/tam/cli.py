"""The command line, `tam`. It needs the extra "demo" or "lab"; this module itself can be imported without."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tam._version import __version__

if TYPE_CHECKING:
    import typer

_EXTRA = {
    "PIL": "lab",
    "numpy": "demo",
    "ray": "ray",
    "rich": "demo",
    "scipy": "lab",
    "sklearn": "demo",
    "typer": "demo",
}


def build() -> "typer.Typer":
    """Return the program with all its commands."""
    import typer

    from tam.lab import commands

    app = typer.Typer(name="tam", no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")

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
        seeds: Annotated[int, typer.Option(min=1, help="Runs of each optimizer, one for each seed.")] = 5,
        epochs: Annotated[int, typer.Option(min=1, help="Epochs of each run.")] = 30,
        out: Annotated[
            Path, typer.Option(metavar="FILE.html", help="The page to write; an existing one is replaced.")
        ] = Path("tam-demo.html"),
    ) -> None:
        """Compare the paper's six optimizers on a small task, in under a minute on a CPU.

        Trains a multilayer perceptron on scikit-learn's digits (no download) with SGD, SGDM, TAM, Adam,
        AngularGrad and AdaTAM, each at the paper's learning rate. For one seed all six share the
        split, the initial weights and the batches.

        Prints a table, and writes one HTML page with the curves of training loss, test accuracy,
        alignment s and gradient norm. Progress goes to stderr; the last line on stdout is the path of
        the page.

        Example: tam demo --seeds 3 --epochs 10 --out /tmp/demo.html
        """
        commands.check_writable(out)
        from tam.lab import demo as lab

        lab.run(seeds, epochs, out)
        print(out)

    app.add_typer(commands.app, name="lab")
    return app


def main() -> None:
    """Run the program; this is its entry point."""
    try:
        build()()
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if name not in _EXTRA:
            raise
        extra = _EXTRA[name]
        hint = f"it comes with the extra [{extra}]: pip install '.[{extra}]' in a checkout"
        sys.exit(f"tam: no module {missing.name}; {hint}")


if __name__ == "__main__":
    main()
