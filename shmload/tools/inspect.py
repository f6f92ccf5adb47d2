"""Describe or index a path, for `shmload inspect` and `shmload index`: a file, a folder, a packed dataset or a growing cache."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from shmload.errors import ObjectMissing
from shmload.formats.format import IndexedBeside
from shmload.formats.known_formats import recognize_path
from shmload.formats.summary import Summary, fields_seen
from shmload.formats.tfrecord.tfrecord_format import TFRecords
from shmload.growing.cache_file import CONTROL
from shmload.storage.store_urls import is_url
from shmload.tools.byte_size import size_text
from shmload.tools.counted import counted

_NUM_SEEN = 10  # samples of a folder of shards whose fields are described


def describe(place: str | Path, *, num_samples: int = 3, client: Any = None) -> Summary:
    """Return the description of a file, a folder of samples, a packed dataset or a growing cache, with its first samples.

    Args:
        place: the path of the file or folder, or a URL of shards.
        num_samples: how many of the first samples to include.
        client: for the URL of a store, as for `open_store`.

    Raises:
        OSError, ValueError: it cannot be read, has an unknown format, or is damaged; the message names it.
    """
    if isinstance(place, str) and is_url(place):
        return _shards(place, num_samples, client)
    path = Path(place)
    if (manifest := _manifest_at(path)) is not None:
        return _packed(manifest, num_samples)
    if (path / CONTROL).is_dir():
        return _cache(path)
    try:
        format, head = recognize_path(path)
    except ValueError:
        if path.is_dir():
            with suppress(ObjectMissing):
                return _shards(str(path), num_samples, None)
        raise
    return format.describe(head, num_samples)


def index(path: Path) -> tuple[str, bool]:
    """Write the index beside a file, if its format keeps one.

    Args:
        path: the file.
    Returns:
        text about what was done, and whether an index that is needed could not be written.
    Raises:
        OSError, ValueError: as `describe`.
    """
    began = perf_counter()
    format, head = recognize_path(path)
    none = f"{path}: no index was written:"
    if not isinstance(format, IndexedBeside):
        return f"{none} {format.title or format.name} needs no index: its samples are found without", False
    if head.compression and isinstance(format, TFRecords):
        return f"{none} {path} is compressed: it is expanded when it is opened, and needs no index beside it", False
    beside = Path(f"{path}{format.index_suffix}")
    before = _stamp(beside)
    num_samples = format.write_index(os.path.abspath(path))
    after = _stamp(beside)
    if not after or (after == before and after[1] < path.stat().st_mtime_ns):
        return f"{none} {_refusal(path.parent)}", True
    there = " (it was already there, and fits)" if after == before else ""
    return (
        f"{beside}: {counted(num_samples, 'sample')}, {size_text(beside.stat().st_size)}, {perf_counter() - began:.2f} s{there}",
        False,
    )


def _stamp(path: Path) -> tuple[int, ...]:
    """Return values that distinguish a file from a later one at the same path; empty if there is no file."""
    if not path.exists():
        return ()
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _refusal(folder: Path) -> str:
    """Return why nothing can be written in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return f"{folder} refused the file; is the disk full?"
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror or error}"


def _manifest_at(path: Path) -> Path | None:
    """Return the path of the manifest of a packed dataset, given that path or the folder of the dataset; else None."""
    from shmload.remote.manifest import FORMAT, MANIFEST_NAME

    if path.is_dir():
        path = path / MANIFEST_NAME
    if path.name != MANIFEST_NAME or not path.is_file():
        return None
    with open(path, "rb") as file:
        return path if FORMAT.encode() in file.read(64) else None


def _packed(path: Path, num_samples: int) -> Summary:
    """Return the contents of a manifest, and the first samples of its first shard."""
    from shmload.remote.manifest import Manifest

    manifest = Manifest.parse(path.read_bytes(), name=str(path))
    notes = [f"generation {manifest.generation}, packed in the order of seed {manifest.seed}"]
    found = Summary(str(path), "packed shards", manifest.nbytes, manifest.num_samples, notes=notes)
    if manifest.shards:
        largest = max(shard.nbytes for shard in manifest.shards)
        shards = f"{counted(len(manifest.shards), 'shard')} of at most {size_text(largest)}"
        notes.insert(0, f"{shards}, each with its index beside it")
        first = describe(path.parent / manifest.shards[0].name, num_samples=num_samples)
        found.fields, found.sizes, found.samples = first.fields, first.sizes, first.samples
    for name in manifest.extensions:
        found.fields.setdefault(name, "in other shards")
    return found


def _shards(url: str, num_samples: int, client: Any) -> Summary:
    """Return a summary of the shards that a URL or the path of a folder names, as RemoteDataset reads them.

    Raises:
        ObjectMissing: no shard was found.
    """
    from shmload.remote import RemoteDataset

    dataset = RemoteDataset.from_urls(url, client)
    try:
        count, view, shards = len(dataset), dataset.indexed(), dataset._source.local.shards
        seen = [view[index] for index in range(min(count, max(num_samples, _NUM_SEEN)))]
        nbytes = [shard.stored_nbytes for shard in shards.all]
        notes = [
            f"{counted(len(shards.all), 'file')} of at most {size_text(max(nbytes))}; the fields are those of {len(seen)} samples"
        ]
        layouts = Counter(format.name for format in shards.values("format"))
        name = f"shards read by RemoteDataset ({', '.join(layouts)})"
        fields = fields_seen(seen, Counter(name for sample in seen for name in sample), len(seen))
        return Summary(url, name, sum(nbytes), count, fields, None, seen[:num_samples], notes)
    finally:
        dataset.close()


def _cache(path: Path) -> Summary:
    """Return a summary of a growing cache: its fill, age and rate, and the states of its samplers and writers, a fact per line."""
    from shmload.growing.sample_cache import SampleCache

    stats = SampleCache.look(path)
    share = stats.nbytes / stats.capacity_bytes
    notes = [
        f"{share:.0%} of its budget of {stats.capacity_bytes:,} bytes: {counted(stats.num_files, 'file')}, "
        f"{stats.num_writing} being written, {stats.num_leased} read by epochs under way",
        f"generation {stats.generation}, the number of files published; {stats.num_evicted} of them are gone",
        f"in the last minute {stats.bytes_per_s / 1e6:.1f} MB/s, {stats.samples_per_s:.1f} samples/s were published",
    ]
    for sampler in stats.samplers:
        who = f"sampler {sampler['worker_id']} of process {sampler['trainer']}"
        error = sampler["error"].strip().splitlines()
        notes.append(f"{who}: {sampler['state']}, {counted(sampler['restarts'], 'restart')}" + (f"; {error[-1]}" if error else ""))
    for writer in stats.writers:
        does = "waits for room" if writer.is_waiting else "writes"
        has = f"{counted(writer.num_records, 'sample')} in {counted(writer.num_files, 'file')}, {writer.waited_s:.1f} s waited"
        notes.append(f"process {writer.pid} ({writer.role}) {does}: {has}")
    notes += [f"left out: {name}: {why}" for name, why in stats.bad.items()]
    return Summary(str(path), "growing cache", stats.nbytes, stats.num_samples, notes=notes)
