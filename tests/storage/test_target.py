"""Bytes of objects into files: exactly those, with their checksum, through every fault; a full disk is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fault_proxy import FaultProxy, Reset, Status, Truncate
from hypothesis import given
from hypothesis import strategies as st
from store_kit import Server

from shmload._core.crc32c import crc32c
from shmload.errors import StoreError
from shmload.storage.cache import Cache, FileFetch
from shmload.storage.target import FilePart, joined_crc32c

DATA = bytes(range(251)) * 3000  # 753,000 bytes


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_the_checksum_of_parts_is_that_of_the_whole(parts: list[bytes]) -> None:
    assert crc32c(b"".join(parts)) == joined_crc32c([(crc32c(part), len(part)) for part in parts])


def test_an_object_comes_into_a_file_with_its_checksum_through_faults(
    server: Server, proxy: FaultProxy, pauses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmload.storage.web._PART_NBYTES", 200_000)  # three ranges
    store = server.client(proxy.url).store("tests", "target")
    etag = store.put("object", DATA).etag
    proxy.script(Reset(after=100_000), Truncate(after=70_001), Status(503), None, Reset(after=1000))
    fd = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    try:
        assert crc32c(DATA) == store.read_to_file("object", fd, len(DATA), etag=etag)
    finally:
        os.close(fd)
    assert (tmp_path / "copy").read_bytes() == DATA
    assert proxy.num_requests >= 7
    assert len(pauses) >= 4


def test_a_full_disk_is_an_error_that_says_so() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        part = FilePart(fd, 0, 10)
        with pytest.raises(
            StoreError, match=r"a copy of 10 bytes cannot be written: No space left on device\. Give the"
        ):
            part._write(memoryview(b"0123456789"))
    finally:
        os.close(fd)


def test_a_fetch_into_a_file_is_checked_and_leaves_nothing_when_it_is_damaged(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000)

    def write(fd: int) -> None:
        os.pwrite(fd, b"payload", 0)

    with pytest.raises(StoreError, match="the bytes of key have the crc32c"):
        cache.open("key", 7, FileFetch(write), etag="1", checksum="crc32c:00000000")
    assert cache.statistics().folder.nbytes == 0
    with cache.open("key", 7, FileFetch(write), etag="1", checksum=f"crc32c:{crc32c(b'payload'):08x}") as lease:
        assert os.pread(lease.fd, 100, 0) == b"payload"
    cache.close()
