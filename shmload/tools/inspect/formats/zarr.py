"""Zarr folders."""

from __future__ import annotations

from shmload.formats.readers.zarr import ZarrDataset
from shmload.tools.inspect.formats.columns import described_columns
from shmload.tools.inspect.summary import Head, Summary

NAME = "Zarr"
_METADATA = ("zarr.json", ".zarray", ".zgroup")


def matches(head: Head) -> bool:
    return head.is_folder and any((head.path / name).is_file() for name in _METADATA)


def describe(head: Head, num_samples: int) -> Summary:
    return described_columns(NAME, head, ZarrDataset(head.path), num_samples)
