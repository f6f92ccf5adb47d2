"""The statistics of a growing cache, for its own process and for other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Any

from shmload.growing.cache_file import CONTROL, newest_generation
from shmload.growing.cache_view import CacheView
from shmload.growing.cache_writer import WriterStatistics
from shmload.growing.process_report import reports

RATE_S = 60.0  # the time window of the rates


@dataclass(frozen=True)
class CacheStatistics:
    """The state of a growing cache at one moment.

    Attributes:
        capacity_bytes: the budget.
        nbytes: the size of all files; files being written count with their reservation.
        num_files, num_samples: number of files that an epoch could read, and of samples in them.
        num_leased: number of files that running epochs keep from being evicted.
        num_writing: number of files that are being written.
        generation: number of files that writers have published so far, and of generations that killed writers skipped.
        num_evicted: number of published files that are gone, and of skipped generations.
        bytes_per_s, samples_per_s: rates of publication in the last minute.
        bad: ignored files, and the reason for each.
        writers: the running writers.
        samplers: the supervised samplers, of any process of this machine.
    """

    capacity_bytes: int
    nbytes: int
    num_files: int
    num_samples: int
    num_leased: int
    num_writing: int
    generation: int
    num_evicted: int
    bytes_per_s: float
    samples_per_s: float
    bad: Mapping[str, str]
    writers: Sequence[WriterStatistics]
    samplers: Sequence[Mapping[str, Any]]


def statistics_of(view: CacheView) -> CacheStatistics:
    """Return the statistics of the cache now."""
    files, of_folder = view.files(), view.folder.statistics()
    control = view.path / CONTROL
    generation = newest_generation(control)
    newest = [file for file in files if file.mtime_ns > (time() - RATE_S) * 1e9]
    return CacheStatistics(
        capacity_bytes=view.folder.capacity_bytes,
        nbytes=of_folder.nbytes,
        num_files=len(files),
        num_samples=sum(file.num_records for file in files),
        num_leased=of_folder.num_leased,
        num_writing=of_folder.num_writing,
        generation=generation,
        num_evicted=generation - sum(file.generation >= 0 for file in files),
        bytes_per_s=sum(file.nbytes for file in newest) / RATE_S,
        samples_per_s=sum(file.num_records for file in newest) / RATE_S,
        bad=view.bad(),
        writers=[WriterStatistics(**one) for _, one in reports(control, "writers")],
        samplers=[{"trainer": pid, **one} for pid, all_of_it in reports(control, "samplers") for one in all_of_it],
    )
