"""How commands speak: errors on standard error, tables on standard output."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from assay.report.summary import Table

errors = Console(stderr=True)
"""What is not a result: errors, progress."""


@contextmanager
def refusing(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds are the user's to mend: their text, no traceback, exit 2."""
    try:
        yield
    except kinds as error:
        if isinstance(error, RuntimeError) and not _is_about_memory(error) and not isinstance(error, BrokenExecutor):
            raise
        errors.print(f"[bold red]assay {command}:[/] {escape(str(error))} {_advice(error)}", soft_wrap=True)
        raise typer.Exit(2) from None


def _is_about_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("out of memory", "allocate memory"))


def _advice(error: Exception) -> str:
    if isinstance(error, BrokenExecutor):
        return "A worker died, most likely for want of memory. The same command goes on; --jobs 1 needs the least."
    if _is_about_memory(error):
        return "What was measured is kept. Use a smaller shape, or fewer --jobs."
    if isinstance(error, OSError):
        return "The folder must be readable, writable and have room."
    return ""


def progress_bar() -> Progress:
    """Done of all, and the time left; on standard error, and only where a person looks at it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


def this_command() -> str:
    """As it was typed, to be typed again."""
    return shlex.join(["assay", *sys.argv[1:]])


def print_table(table: Table) -> None:
    """Settings to the left, figures to the right."""
    rich = RichTable(
        title=escape(table.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False
    )
    for i, name in enumerate(table.columns):
        rich.add_column(name, justify="left" if i < table.settings else "right", overflow="fold")
    for row in table.rows:
        rich.add_row(*map(escape, row))
    Console().print(rich)
