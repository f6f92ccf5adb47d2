"""What the commands share: errors in one line, sizes in words, a console, and a progress bar on stderr.

Nothing is drawn where nobody looks, and rich is imported only by what draws.
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
WIDE = 128  # columns where nobody looks


def complain(command: str, error: object) -> None:
    """Says in one line what went wrong."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    with suppress(OSError):  # of a stderr that takes nothing
        typer.echo(f"shmload {command}: {' '.join(text.split())}", err=True)


def refuse(command: str, error: object, status: int = 2) -> NoReturn:
    """Says in one line why nothing was done, and ends."""
    complain(command, error)
    raise typer.Exit(status)


class Unwritable(OSError):
    """Stdout takes nothing more, as on a full disk."""


@contextmanager
def refusing(command: str, *errors: type[Exception]) -> Iterator[None]:
    """Errors of a kind end the command with status 2, ^C with 130; each with one line."""
    try:
        yield
    except errors as error:
        refuse(command, error)
    except KeyboardInterrupt:
        refuse(command, "interrupted", 130)


def check_folder(command: str, *paths: Path | None) -> None:
    """Ends the command if a file that is to be written has no folder, or is one."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            refuse(command, f"{path}: needs an existing folder to write to")
        if path is not None and path.is_dir():
            refuse(command, f"{path}: is a folder; name a file in it")


def console() -> Console:
    """Stdout, as wide as the terminal, or WIDE columns where it is none."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDE)


class Bar:
    """A rich progress bar with the verbs long work uses: one bar for the whole run, and what is being done now."""

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
        """The items, one after the other, each by its name as what is being done."""
        self.start(len(items))
        for item in items:
            self.doing(named(item))
            yield item
            self.advance()


@contextmanager
def shown(visible: bool) -> Iterator[Bar]:
    """A progress bar that is drawn only if `visible`, and gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    text = TextColumn("{task.description}", markup=False)
    with Progress(*columns, text, console=Console(stderr=True), transient=True, disable=not visible) as progress:
        yield Bar(progress)
