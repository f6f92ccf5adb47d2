"""`shmload pack`: write a dataset as tar shards into a store, for RemoteDataset and webdataset.

Exit code 0: success; 1: the store failed, or a different packing was begun there; 2: bad usage, or a dataset that cannot be
packed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from shmload.cli.size import parse_size
from shmload.cli.terminal import Bar, progress_bar, refuse
from shmload.tools.byte_size import size_text
from shmload.tools.counted import counted

if TYPE_CHECKING:
    from shmload.formats.encryption import SampleCipher
    from shmload.remote.packing.shard_packing import PackProgress


SOURCE = (
    "A folder of images, whose keys are then numbers and not names; TFRecord, Parquet, JSON lines, .npy or tar files (with * and "
    "braces); anything RemoteDataset reads; or package.module:name of a dataset or of a function that yields samples."
)
KEY = "32 bytes, or 64 hexadecimal digits."
FUNCTION = "package.module:name of a function that yields samples for each sample of SOURCE."

PART = "Pack one of COUNT parts, such as 1/4 to 4/4 on four machines."

IN_ORDER = "Pack each object below SOURCE as one sample, in the order of the listing."


def pack(
    source: Annotated[str, Argument(metavar="SOURCE", help=SOURCE)],
    dest: Annotated[str, Argument(metavar="DEST", help="Destination folder, or s3://bucket/folder.")],
    maxsize: Annotated[str, Option(metavar="SIZE", help="Largest size of a shard, in bytes or a unit, such as 64MiB.")] = "100MB",
    maxcount: Annotated[int, Option(help="Most samples in a shard.")] = 100_000,
    workers: Annotated[int, Option(help="Largest number of processes that encode.")] = 30,
    seed: Annotated[int, Option(help="Seed of the random order.")] = 0,
    quality: Annotated[
        int | None, Option(metavar="1..100", help="Store decoded images as JPEG of this quality instead of PNG.")
    ] = None,
    restart_markers: Annotated[bool, Option("--restart-markers", help="Re-encode JPEG with restart markers, for crops.")] = False,
    compress: Annotated[
        str | None, Option(metavar="HOW", help="Compress with zstd: samples (each member separately) or shards.")
    ] = None,
    compression_level: Annotated[int, Option(metavar="1..22", help="Level of zstd.")] = 3,
    key_file: Annotated[Path | None, Option(help="Encrypt each sample with the key in a file: " + KEY)] = None,
    key_variable: Annotated[
        str | None, Option(metavar="NAME", help="Encrypt each sample with the key in an environment variable.")
    ] = None,
    append: Annotated[bool, Option("--append", help="Keep the samples of DEST and append these.")] = False,
    replace: Annotated[bool, Option("--replace", help="Remove another dataset that is in DEST.")] = False,
    part: Annotated[str, Option(metavar="N/COUNT", help=PART)] = "1/1",
    function: Annotated[str | None, Option(metavar="NAME", help=FUNCTION)] = None,
    layout: Annotated[str | None, Option(help="Format of SOURCE, if names do not show it.")] = None,
    in_order: Annotated[bool, Option("--in-order", help=IN_ORDER)] = False,
    endpoint: Annotated[str | None, Option(metavar="URL", help="URL of the S3-compatible store of DEST.")] = None,
) -> None:
    """Pack a dataset into shards. To continue an interrupted pack, run the same command again."""
    from shmload.errors import StoreError
    from shmload.formats import ImageFolder
    from shmload.remote import ObjectStream
    from shmload.remote.packing.pack_options import PackOptions
    from shmload.remote.packing.upload import packing_of
    from shmload.storage.client import make_client
    from shmload.storage.open_store import open_store
    from shmload.tools.object_reference import resolve
    from shmload.tools.pack_source import FlatSamples, dataset_of

    begin = perf_counter()
    try:
        options = PackOptions(
            parse_size(maxsize, "--maxsize"),
            maxcount,
            workers,
            seed,
            quality,
            restart_markers,
            compress=compress,  # type: ignore[arg-type]  # which it checks
            compression_level=compression_level,
            cipher=cipher_of(key_file, key_variable),
            append=append,
            part=part_of(part),
        )
        if in_order and layout is not None:
            raise ValueError("--in-order packs objects of any format, so --layout has no effect with it: leave out one of the two")
        dataset = ObjectStream(source) if in_order else dataset_of(source, layout)
        if function is not None:
            dataset = FlatSamples(dataset, resolve(function, what="--function"))
        if not dest:
            raise ValueError("DEST is empty: give a folder or s3://bucket/folder")
        store = open_store(dest, make_client(endpoint) if endpoint else None)
        with progress_bar(sys.stderr.isatty()) as bar:
            packing = packing_of(dataset, store, options, progress_on(bar))
            if not replace and (other := packing.other_dataset()) is not None:
                raise ValueError(
                    f"{dest} contains another dataset, of {counted(other.num_samples, 'sample')} (generation {other.generation}), "
                    "or this one packed with other options. Give another DEST; or --append, which keeps it; or --replace, which "
                    "removes it"
                )
            manifest = packing.run()
    except StoreError as error:
        refuse("pack", str(error), 1)
    except Exception as error:  # a dataset may raise anything
        refuse("pack", _in_a_line(error))
    except KeyboardInterrupt:
        refuse("pack", "interrupted; run the same command again to continue", 130)
    found = f" ({packing.num_found:,} already there)" if packing.num_found else ""
    typer.echo(
        f"{counted(manifest.num_samples, 'sample')} in {counted(len(manifest.shards), 'shard')}{found}, "
        f"{size_text(manifest.nbytes)}, {perf_counter() - begin:.1f} s: {', '.join(manifest.extensions)}"
    )
    if packing.missing:
        missing = ", ".join(map(str, packing.missing))
        typer.echo(f"part {part} is complete; missing: {missing}. The part that ends last completes the dataset")
        return
    if packing.replaced is not None:
        typer.echo(
            f"replaced the dataset of {packing.replaced.num_samples:,} samples that was in {dest}, and removed its shards "
            f"(generation {packing.replaced.generation})"
        )
    if isinstance(dataset, ImageFolder):
        typer.echo(
            "keys are the numbers of the images in the order of their names, from 00000000 on; names are not kept: --in-order "
            "keeps them, and docs/packing.md shows how to add names and labels as fields"
        )
    where = f", with AWS_ENDPOINT_URL={endpoint} in the environment" if endpoint else ""
    typer.echo(f"read it by shmload.remote.RemoteDataset.from_urls({dest!r}){where}")


def cipher_of(key_file: Path | None, key_variable: str | None) -> "SampleCipher | None":
    """Return the cipher with the key that the options name, or None without a key.

    Raises:
        OSError, ValueError: the key does not exist, or both options are given.
    """
    from shmload.formats.encryption import SampleCipher, key_in_file, key_in_variable

    if key_file is not None and key_variable is not None:
        raise ValueError("--key-file and --key-variable cannot be combined: give one of them")
    if key_file is not None:
        return SampleCipher(key_in_file(key_file))
    return None if key_variable is None else SampleCipher(key_in_variable(key_variable))


def part_of(text: str) -> tuple[int, int]:
    """Return the number of a part and the number of parts.

    Raises:
        ValueError: the text is not of the form N/COUNT.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise ValueError(f"--part is N/COUNT, such as 1/4 to 4/4; got {text!r}")
    return int(number), int(count)


def _in_a_line(error: BaseException) -> object:
    """Return an error as one line. An error of a worker contains its traceback; its type, message and sample are kept."""
    lines = str(error).splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith(("Traceback", "Original Traceback"))]
    if not (begins and lines[0].startswith("Caught ")):
        notes = getattr(error, "__notes__", [])
        is_clear = lines and isinstance(error, OSError | ValueError | TypeError | RuntimeError)
        text = error if is_clear else ": ".join(filter(None, (type(error).__name__, str(error))))
        return f"{text} ({'; '.join(notes)})" if notes else text
    return "; ".join(line for line in lines[begins[-1] + 1 :] if line and not line.startswith((" ", "shmload: ")))


def progress_on(bar: Bar) -> "Callable[[PackProgress], None]":
    """Return a callback that reports progress: samples on the bar, bytes and shards in the store beside it."""

    def report(progress: "PackProgress") -> None:
        stored = f"{counted(progress.num_shards, 'shard')}, {size_text(progress.nbytes)} in the store"
        bar.progress.update(bar.task, total=progress.total, completed=progress.num_samples, description=stored)

    return report
