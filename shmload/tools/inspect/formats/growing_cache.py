"""A growing cache as `shmload inspect` shows it: how full, how old, how fast, and what its writers do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shmload.growing.cache import SampleCache
from shmload.growing.files import CONTROL
from shmload.growing.library import CacheStatistics
from shmload.tools.inspect.summary import Summary


def is_cache(path: Path) -> bool:
    """Whether a folder is a growing cache's."""
    return (path / CONTROL).is_dir()


def inspected(path: Path) -> Summary:
    """What there is to say of a cache."""
    stats = SampleCache.look(path)
    return Summary(str(path), "growing cache", stats.nbytes, stats.num_samples, notes=list(lines_of(stats)))


def lines_of(stats: CacheStatistics) -> Iterator[str]:
    """One fact a line."""
    share = stats.nbytes / stats.capacity_bytes
    yield (
        f"{share:.0%} of its budget of {stats.capacity_bytes:,} bytes: {stats.num_files} files, {stats.num_writing} being written, "
        f"{stats.num_leased} read by epochs under way"
    )
    yield f"generation {stats.generation}: so many files were published, {stats.num_evicted} of them are gone"
    yield f"in the last minute {stats.bytes_per_s / 1e6:.1f} MB/s, {stats.samples_per_s:.1f} samples/s were published"
    for sampler in stats.samplers:
        error = sampler["error"].strip().splitlines()
        yield (
            f"sampler {sampler['worker_id']} of process {sampler['trainer']}: {sampler['state']}, {sampler['restarts']} restarts"
            + (f"; {error[-1]}" if error else "")
        )
    for writer in stats.writers:
        does = "waits for room" if writer.is_waiting else "writes"
        yield (
            f"process {writer.pid} ({writer.role}) {does}: {writer.num_records:,} samples in {writer.num_files} files, "
            f"{writer.waited_s:.1f} s waited"
        )
    for name, why in stats.bad.items():
        yield f"left out: {name}: {why}"
