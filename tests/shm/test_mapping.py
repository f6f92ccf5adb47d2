"""Mappings of a segment's memory."""

import os
from collections.abc import Iterator

import pytest

from shmload._core.mapping import Mapping

NBYTES = 3 << 12


@pytest.fixture
def memory_fd() -> Iterator[int]:
    fd = os.memfd_create("shmload-test")
    os.truncate(fd, NBYTES)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("keep", [True, False])
def test_diverted_mapping_changes_the_segment_no_more(memory_fd: int, keep: bool) -> None:
    mapping, other = Mapping(memory_fd, NBYTES), memoryview(Mapping(memory_fd, NBYTES))
    view, address = memoryview(mapping), mapping.address
    view[:4] = b"rows"
    mapping.divert(keep)
    assert bytes(view[:5]) == (b"rows\0" if keep else bytes(5))
    view[:] = bytes([7]) * NBYTES
    assert mapping.address == address
    assert bytes(other) == b"rows".ljust(NBYTES, b"\0")
    other[:4] = b"next"
    assert view[0] == 7
