"""Helpers of the commands: errors in one line, a console, and a progress bar on stderr.

Nothing is drawn unless it is visible, and rich is imported only by what draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")
WIDE = 128  # columns if stdout is not a terminal: those of the widest table (tools/bench/report_table.py)


def complain(command: str, error: object) -> None:
    """Report in one line what went wrong."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    with suppress(OSError):  # stderr may be closed or full
        typer.echo(f"shmload {command}: {' '.join(text.split())}", err=True)


def refuse(command: str, error: object, status: int = 2) -> NoReturn:
    """Report in one line why nothing was done, and exit."""
    complain(command, error)
    raise typer.Exit(status)


class Unwritable(OSError):
    """Stdout cannot be written to, for example because the disk is full."""


@contextmanager
def refusing(command: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of these types into exit status 2, and ^C into 130, each with a one-line message."""
    try:
        yield
    except errors as error:
        refuse(command, error)
    except KeyboardInterrupt:
        refuse(command, "interrupted", 130)


def check_folder(command: str, *paths: Path | None) -> None:
    """Exit if a file to be written has no folder, or is a folder."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            refuse(command, f"{path}: needs an existing folder to write to")
        if path is not None and path.is_dir():
            refuse(command, f"{path}: is a folder; name a file in it")


def console() -> Console:
    """Return a console on stdout, as wide as the terminal; WIDE columns if stdout is not a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDE)


class Bar:
    """A rich progress bar for a whole run, with a text that says what is being done."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("starting", total=None)

    def start(self, num_jobs: int) -> None:
        self.progress.update(self.task, total=num_jobs)

    def doing(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def advance(self) -> None:
        self.progress.advance(self.task)

    def over(self, items: Sequence[T], named: Callable[[T], str]) -> Iterator[T]:
        """Yield the items, showing the name of each while it is processed."""
        self.start(len(items))
        for item in items:
            self.doing(named(item))
            yield item
            self.advance()


@contextmanager
def progress_bar(visible: bool) -> Iterator[Bar]:
    """Yield a progress bar that is drawn only if `visible`, and removed at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    text = TextColumn("{task.description}", markup=False)
    with Progress(*columns, text, console=Console(stderr=True), transient=True, disable=not visible) as progress:
        yield Bar(progress)
