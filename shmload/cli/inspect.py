"""`shmload inspect`: what is in files of samples.

Exit code 0: fine; 2: a path is missing, of no known format, empty or damaged, or bad usage.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from shmload.tools.inspect.summary import Summary

WIDE = 128  # columns where nobody looks


def inspect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, folders of images or Zarr, growing caches.")
    ],
    samples: Annotated[int, typer.Option(min=0, help="How many of the first samples to show.")] = 3,
    dtype: Annotated[str | None, typer.Option(help="Of raw tokens in a .bin file: uint16, say.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw the first pictures as a grid.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of text.")] = False,
) -> None:
    """Say what is in files: format, fields, counts, sizes, the first samples. Formats are known by their bytes."""
    from shmload.cli.progress import shown
    from shmload.tools.inspect import pictures

    if plot_file is not None:
        if absent := pictures.missing():
            refuse("inspect", absent)
        if not plot_file.absolute().parent.is_dir():
            refuse("inspect", f"{plot_file}: needs an existing folder to write to")
    try:
        wanted = max(samples, pictures.GRID) if plot_file is not None else samples
        with shown(sys.stderr.isatty()) as progress:
            each = progress.over(paths, lambda path: path.name)
            found = [_described(path, wanted, dtype) for path in each]
        if plot_file is not None and not pictures.save_grid(found, plot_file):
            raise ValueError(f"--plot: the first samples of {', '.join(map(str, paths))} hold no pictures")
    except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        refuse("inspect", error)
    if as_json:
        typer.echo(json.dumps([summary.as_dict(samples) for summary in found], indent=1))
        return
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    for summary in found:
        show(summary, samples, console)


def refuse(command: str, error: object) -> NoReturn:
    """Says in one line why nothing was done, and ends."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    typer.echo(f"shmload {command}: {' '.join(text.split())}", err=True)
    raise typer.Exit(2)


def show(summary: "Summary", num_samples: int, console: "Console") -> None:
    """A line for the path, one for each field, and its first samples."""
    from rich.markup import escape

    from shmload.tools.inspect.summary import shortened

    console.print(
        f"[bold]{escape(summary.path)}[/]: {summary.format}, {summary.num_samples:,} samples, {readable(summary.nbytes)}",
        highlight=False,
        soft_wrap=True,
    )
    width = max(map(len, summary.fields), default=0)
    for name, held in summary.fields.items():
        console.print(f"  {escape(name.ljust(width))}  {escape(held)}", highlight=False, soft_wrap=True)
    if summary.sizes is not None:
        sizes = summary.sizes
        part = "" if sizes.num_samples == summary.num_samples else f" (of the first {sizes.num_samples:,})"
        told = f"{readable(sizes.min)} / {readable(sizes.median)} / {readable(sizes.max)}"
        console.print(f"  a sample, min / median / max: {told}{part}", highlight=False)
    for note in summary.notes:
        console.print(f"  {escape(note)}", highlight=False, soft_wrap=True)
    for number, sample in enumerate(summary.samples[:num_samples]):
        shown = ", ".join(f"{name}: {shortened(value)}" for name, value in sample.items())
        console.print(f"  [dim]{number}[/] {escape(shown)}", highlight=False, soft_wrap=True)


def readable(nbytes: int) -> str:
    """Bytes in the unit that suits."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def _described(path: Path, num_samples: int, dtype: str | None) -> "Summary":
    """Of a file, or of a folder that is a packed dataset's or a growing cache's."""
    from shmload.tools.inspect.describe import describe
    from shmload.tools.inspect.formats import growing_cache, packed

    if (manifest := packed.manifest_at(path)) is not None:
        return packed.describe(manifest, num_samples)
    if growing_cache.is_cache(path):
        return growing_cache.inspected(path)
    return describe(path, num_samples=num_samples, dtype=dtype)
