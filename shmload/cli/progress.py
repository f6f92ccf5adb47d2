"""Progress on stderr: one bar for the whole run and what is being done now; nothing where nobody looks."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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


@contextmanager
def shown(visible: bool) -> Iterator[Bar]:
    """A progress bar that is drawn only if `visible`, and gone at the end."""
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not visible) as progress:
        yield Bar(progress)
