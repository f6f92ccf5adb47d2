"""Parquet files."""

from __future__ import annotations

from shmload.formats.readers.parquet import ParquetDataset
from shmload.tools.inspect.formats.columns import described_columns
from shmload.tools.inspect.summary import Head, Summary

NAME = "Parquet"


def matches(head: Head) -> bool:
    return not head.compression and head.begin.startswith(b"PAR1")


def describe(head: Head, num_samples: int) -> Summary:
    dataset = ParquetDataset(head.path)
    found = described_columns(NAME, head, dataset, num_samples)
    found.notes.append(f"{len(dataset.block_starts) - 1} row groups of up to {dataset.block_size:,} rows")
    return found
