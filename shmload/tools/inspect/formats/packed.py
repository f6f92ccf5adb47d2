"""What `shmload inspect` says of a packed dataset: its manifest, or the folder that it lies in."""

from __future__ import annotations

from pathlib import Path

from shmload.remote.shards import FORMAT, MANIFEST_NAME, Manifest
from shmload.tools.inspect.describe import describe as describe_file
from shmload.tools.inspect.summary import Summary

NAME = "packed shards"


def manifest_at(path: Path) -> Path | None:
    """The manifest that a path is, or has in it."""
    if path.is_dir():
        path = path / MANIFEST_NAME
    if path.name != MANIFEST_NAME or not path.is_file():
        return None
    with open(path, "rb") as file:
        return path if FORMAT.encode() in file.read(64) else None


def describe(path: Path, num_samples: int) -> Summary:
    """All that its manifest says, and the first samples of its first shard.

    Raises:
        ShardCorrupt: the manifest is damaged, or the first shard.
        OSError: the first shard cannot be read.
    """
    manifest = Manifest.parse(path.read_bytes(), name=str(path))
    notes = [f"generation {manifest.generation}, packed in the order of seed {manifest.seed}"]
    found = Summary(str(path), NAME, manifest.nbytes, manifest.num_samples, notes=notes)
    if manifest.shards:
        largest = max(shard.nbytes for shard in manifest.shards)
        notes.insert(0, f"{len(manifest.shards):,} shards of at most {largest:,} bytes, each with its index beside it")
        first = describe_file(path.parent / manifest.shards[0].name, num_samples=num_samples)
        found.fields, found.sizes, found.samples = first.fields, first.sizes, first.samples
    for name in manifest.extensions:
        found.fields.setdefault(name, "in other shards")
    return found
