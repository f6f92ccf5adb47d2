"""safetensors files."""

from __future__ import annotations

from shmload.formats.readers.safetensors import SafetensorsDataset
from shmload.tools.inspect.formats.columns import described_columns
from shmload.tools.inspect.summary import Head, Summary

NAME = "safetensors"
_HEADER_MAX = 100_000_000  # bytes, by the format's own rule


def matches(head: Head) -> bool:
    nbytes = int.from_bytes(head.begin[:8], "little")
    return not head.compression and head.begin[8:9] == b"{" and 2 <= nbytes <= _HEADER_MAX


def describe(head: Head, num_samples: int) -> Summary:
    return described_columns(NAME, head, SafetensorsDataset(head.path), num_samples)
