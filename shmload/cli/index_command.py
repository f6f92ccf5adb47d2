"""`shmload index`: build the indexes next to files and objects, so that the first start of a training does not have to.

Exit code 0: success; 1: an index could not be kept; 2: bad usage, or a path is missing, has an unknown format, or is empty or
damaged (the others are indexed nevertheless).
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shmload.cli.inspect_command import ENDPOINT
from shmload.cli.terminal import complain, progress_bar, refusing


def index(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="TFRecord files, tar shards or JSON lines; folders or URLs of shards of any format."
        ),
    ],
    layout: Annotated[
        str | None, typer.Option(help="Format of the shards in folders and URLs, if their names do not show it.")
    ] = None,
    cache_folder: Annotated[
        Path | None,
        typer.Option(help="Write the indexes of folders and URLs to this RemoteDataset cache_folder, not beside the shards."),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help=ENDPOINT)] = None,
) -> None:
    """Build the index beside each file, and report what was written, its size and the time it took."""
    from shmload.formats.json_lines import is_lines
    from shmload.storage.store_urls import is_url
    from shmload.tools.inspect import index as build

    found, errors = list[tuple[str, bool]](), list[Exception]()
    with refusing("index"), progress_bar(sys.stderr.isatty()) as progress:
        for place in progress.over(places, str):
            try:  # the indexes already written for other places stay, and are reported
                if not place:
                    raise ValueError("a PATH is empty: give a file, a folder or a URL")
                is_file = not is_url(place) and Path(place).is_file()
                if is_url(place) or (Path(place).is_dir() and any(Path(place).iterdir())) or (is_file and is_lines(place)):
                    found.extend((line, False) for line in _of_shards(place, layout, cache_folder, endpoint))
                else:
                    found.append(build(Path(place)))
            except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
                errors.append(error)
    for line, _ in found:
        typer.echo(line)
    for bad in errors:
        complain("index", bad)
    if errors or any(is_refused for _, is_refused in found):
        raise typer.Exit(2 if errors else 1)


def _of_shards(place: str, layout: str | None, cache_folder: Path | None, endpoint: str | None) -> Iterator[str]:
    """Yield a line for each shard that got an index, and one for all those that are left as they are."""
    from shmload.remote.listing import shards_of_urls
    from shmload.remote.shard_indexes import NOT_NEEDED, THERE_ALREADY, indexes_beside, indexes_kept
    from shmload.storage.client import make_client
    from shmload.storage.open_store import open_store
    from shmload.tools.counted import counted

    client = make_client(endpoint) if endpoint else None
    shards = shards_of_urls(place, lambda url: open_store(url, client), layout)
    unchanged = dict.fromkeys((NOT_NEEDED, THERE_ALREADY), 0)
    for shard, what in indexes_beside(shards) if cache_folder is None else indexes_kept(shards, cache_folder):
        if what in unchanged and len(shards.all) > 1:
            unchanged[what] += 1
        else:
            yield f"{shard.url}: {what}"
    for what, count in unchanged.items():
        if count:
            yield f"{place}: {counted(count, 'shard')}, each of which {what}"
