"""Show a changing line of text on the terminal while something is pending."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stderr_status_line() -> Iterator[Callable[[str | None], None]]:
    """Yield a function that shows one changing line of text on a terminal; the line is removed after the block.

    The function takes the new text, or None to hide the line. Without a terminal on stderr, it shows nothing.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text or "", visible=bool(text))
