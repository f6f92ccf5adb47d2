"""`shmload inspect`: show the contents of files of samples.

Exit code 0: success; 1: --check has found damage; 2: bad usage, or a path is missing, has an unknown format, or is empty or damaged
(the others are shown nevertheless).
"""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shmload.cli.terminal import Bar, complain, console, progress_bar, refusing
from shmload.tools.byte_size import size_text
from shmload.tools.counted import counted

if TYPE_CHECKING:
    from shmload.formats.summary import Summary
    from shmload.tools.check import Checked

CHECK = "Read all samples of shards instead, compare their checksums and decode their images. Exit code 1: some are damaged."
ENDPOINT = "URL of an S3-compatible store, for s3:// paths."


def inspect(
    places: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Files, folders of images or shards, Zarr arrays, growing caches; URLs of shards."),
    ],
    samples: Annotated[int, typer.Option(min=0, help="Number of samples to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON instead of text.")] = False,
    is_check: Annotated[bool, typer.Option("--check", help=CHECK)] = False,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help=ENDPOINT)] = None,
) -> None:
    """Show the contents of files: format, fields, counts, sizes, the first samples. Formats are recognized by their bytes."""
    from shmload.tools.inspect import describe

    found, errors = list["Summary | Checked"](), list[Exception]()
    with refusing("inspect", ValueError), progress_bar(sys.stderr.isatty()) as progress:
        client = _client(endpoint) if endpoint else None
        for place in places if is_check else progress.over(places, str):
            try:
                if not place:
                    raise ValueError("a PATH is empty: give a file, a folder or a URL; `.` is the current folder")
                if is_check:
                    found.append(_checked(place, client, progress))
                else:
                    found.append(describe(place, num_samples=samples, client=client))
            except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
                errors.append(error)
    if as_json and (found or not errors):
        typer.echo(json.dumps([one.as_dict() for one in found], indent=1))
    elif found:
        output = console()
        for line in (line for one in found for line in _lines(one)):
            output.print(line, highlight=False, soft_wrap=True)
    for bad in errors:
        complain("inspect", bad)
    if errors:
        raise typer.Exit(2)
    if any(getattr(one, "damaged", ()) for one in found):
        raise typer.Exit(1)


def _client(endpoint: str) -> Any:
    """Return a client of the store at a URL."""
    from shmload.storage.client import make_client

    return make_client(endpoint)


def _checked(place: str, client: Any, progress: Bar) -> "Checked":
    """Read all samples of shards."""
    from shmload.tools.check import check  # which imports torch

    return check(place, client=client, over=lambda shards: progress.over(shards, lambda shard: shard.url))


def _lines(found: "Summary | Checked") -> list[str]:
    """Return a line for the path, one for each field, and one for each of the first samples; or one for each damaged place."""
    from rich.markup import escape

    from shmload.formats.summary import Summary, shortened

    if not isinstance(found, Summary):
        return [f"[bold red]DAMAGED[/] {escape(line)}" for line in found.damaged] + [f"[bold]{escape(str(found))}[/]"]
    summary = found
    head = f"{summary.format}, {counted(summary.num_samples, 'sample')}, {size_text(summary.nbytes)}"
    lines = [f"[bold]{escape(summary.path)}[/]: {head}"]
    width = max(map(len, summary.fields), default=0)
    lines += [f"  {escape(name.ljust(width))}  {escape(held)}" for name, held in summary.fields.items()]
    if (sizes := summary.sizes) is not None:
        part = "" if sizes.num_samples == summary.num_samples else f" (of the first {sizes.num_samples:,})"
        three = f"{size_text(sizes.min)} / {size_text(sizes.median)} / {size_text(sizes.max)}"
        lines.append(f"  a sample, min / median / max: {three}{part}")
    lines += [f"  {escape(note)}" for note in summary.notes]
    for number, sample in enumerate(summary.samples):
        values = ", ".join(f"{name}: {shortened(value)}" for name, value in sample.items())
        lines.append(f"  [dim]{number}[/] {escape(values)}")
    return lines
