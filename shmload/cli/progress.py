"""Progress on stderr: one bar for the whole run and what is being done now; nothing where nobody looks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


class Bar:
    """A rich progress bar with the verbs long work uses."""

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
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not visible) as progress:
        yield Bar(progress)
