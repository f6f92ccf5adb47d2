"""`shmload index`: builds the indexes beside files, so that the first start of a training need not.

Exit code 0: fine; 1: an index could not be kept; 2: a path is missing, of no known format, empty or damaged, or bad usage.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shmload.cli.terminal import refusing, shown


def index(paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="TFRecord files and tar shards.")]) -> None:
    """Build the index beside each file, and say what was written, how large it is and how long it took."""
    from shmload.tools.inspect import index as build

    with refusing("index", OSError, ValueError, RuntimeError, ModuleNotFoundError), shown(sys.stderr.isatty()) as progress:
        found = [build(path) for path in progress.over(paths, lambda path: path.name)]
    for line, _ in found:
        typer.echo(line)
    if any(is_refused for _, is_refused in found):
        raise typer.Exit(1)
