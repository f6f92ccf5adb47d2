"""`shmload index`: builds the indexes beside files, so that the first start of a training need not.

Exit code 0: fine; 1: an index could not be kept; 2: a path is missing, of no known format, empty or damaged, or bad usage.
"""

import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from shmload.cli.terminal import readable, refusing, shown


def index(paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="TFRecord files and tar shards.")]) -> None:
    """Build the index beside each file, and say what was written, how large it is and how long it took."""
    from shmload.tools.inspect.formats import index as build

    lines, num_refused = [], 0
    with refusing("index", OSError, ValueError, RuntimeError, ModuleNotFoundError), shown(sys.stderr.isatty()) as progress:
        for path in progress.over(paths, lambda path: path.name):
            begin = perf_counter()
            made = build(path)
            num_refused += made.is_refused
            if made.path is None:
                lines.append(f"{made.source}: no index was written: {made.why}")
                continue
            size = f"{made.num_samples:,} samples, {readable(made.nbytes)}, {perf_counter() - begin:.2f} s"
            lines.append(f"{made.path}: {size}" + (f" ({made.why})" if made.why else ""))
    for line in lines:
        typer.echo(line)
    if num_refused:
        raise typer.Exit(1)
