"""The `assay` command. Heavy imports happen inside the commands, so that `--help` is instant."""

from __future__ import annotations

from typing import Annotated

import typer

from assay._version import __version__
from assay.cli.bench import bench
from assay.cli.compact import compact
from assay.cli.info import info
from assay.cli.pair import pair
from assay.cli.reporting import report
from assay.cli.study import study
from assay.cli.sweep import sweep
from assay.cli.validate import validate
from assay.cli.watch import watch

app = typer.Typer(
    name="assay",
    help="How far a fast implementation is from the golden value, and which step causes that.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (study, sweep, pair, watch, validate, report, compact, info):
    app.command()(command)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"assay {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `assay` command."""
    app()


if __name__ == "__main__":
    main()
