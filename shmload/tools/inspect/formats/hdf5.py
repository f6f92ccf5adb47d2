"""HDF5 files."""

from __future__ import annotations

from shmload.formats.readers.hdf5 import HDF5Dataset
from shmload.tools.inspect.formats.columns import described_columns
from shmload.tools.inspect.summary import Head, Summary

NAME = "HDF5"
_MAGIC = b"\x89HDF\r\n\x1a\n"


def matches(head: Head) -> bool:
    if head.is_folder or head.compression:
        return False
    if head.begin.startswith(_MAGIC):
        return True
    at = 512  # behind a user block, whose size is a power of two
    with open(head.path, "rb") as file:
        while at < head.nbytes:
            file.seek(at)
            if file.read(len(_MAGIC)) == _MAGIC:
                return True
            at *= 2
    return False


def describe(head: Head, num_samples: int) -> Summary:
    return described_columns(NAME, head, HDF5Dataset(head.path), num_samples)
