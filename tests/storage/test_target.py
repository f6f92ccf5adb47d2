"""Objects are received into files: the exact bytes with their checksum, through every fault; a full disk is an error."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._core.crc32c import crc32c
from shmload._core.receive import receive
from shmload.errors import StoreError
from shmload.storage.joined_crc32c import joined_crc32c
from tests.storage.fault_proxy import FaultProxy, Reset, Status, Truncate
from tests.storage.store_kit import Server

DATA = bytes(range(251)) * 3000  # 753,000 bytes


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_combined_checksum_of_parts_equals_that_of_the_whole(parts: list[bytes]) -> None:
    assert crc32c(b"".join(parts)) == joined_crc32c([(crc32c(part), len(part)) for part in parts])


def test_object_is_received_into_a_file_with_its_checksum_despite_faults(
    server: Server, proxy: FaultProxy, pauses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmload.storage.web_reader._PART_NBYTES", 200_000)  # three ranges
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


@pytest.mark.parametrize("nbytes", [1, 2, 100, 8191, 8192, 8193, 70_000])
def test_object_of_any_length_is_received_completely(server: Server, tmp_path: Path, nbytes: int) -> None:
    store = server.client().store("tests", "lengths")
    store.put(f"object{nbytes}", DATA[:nbytes])
    with open(tmp_path / "copy", "wb") as file:
        assert store.read_to_file(f"object{nbytes}", file.fileno(), nbytes) == crc32c(DATA[:nbytes])
    assert (tmp_path / "copy").read_bytes() == DATA[:nbytes]


@pytest.mark.parametrize("data", [b"0123456789", DATA], ids=["short", "long"])
def test_full_disk_is_an_error_that_says_so(server: Server, data: bytes) -> None:
    store = server.client().store("tests", f"full{len(data)}")
    store.put("object", data)
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(StoreError, match=r"cannot write a copy of [\d,]+ bytes: No space left on device\. Give the"):
            store.read_to_file("object", fd, len(data))
    finally:
        os.close(fd)


def body_of(data: bytes) -> socket.socket:
    """Returns the receiving end of a connection on which `data` has arrived and which was closed."""
    here, there = socket.socketpair()
    there.sendall(data)
    there.close()
    return here


@given(st.binary(max_size=300), st.integers(0, 200_000), st.integers(0, 400))
def test_received_bytes_are_in_the_file_with_their_checksum(data: bytes, offset: int, wanted: int) -> None:
    with tempfile.TemporaryFile() as file, body_of(data) as here:
        got, crc, is_over, *errors = receive(here.fileno(), file.fileno(), offset, wanted, crc32c(b"before"), 1000)
        assert data[:wanted] == os.pread(file.fileno(), 1000, offset)
        assert (min(len(data), wanted), crc32c(b"before" + data[:wanted])) == (got, crc)
        assert (len(data) < wanted, [0, 0]) == (is_over, errors)
        assert data[wanted:] == here.recv(1000)


def test_receive_returns_in_time_with_the_bytes_so_far() -> None:
    here, there = socket.socketpair()
    with tempfile.TemporaryFile() as file, here, there:
        there.sendall(b"some")
        assert (4, crc32c(b"some"), False, 0, 0) == receive(here.fileno(), file.fileno(), 0, 5, 0, 20)
        assert receive(here.fileno(), file.fileno(), 4, 5, 7, 0) == (0, 7, False, 0, 0)


def test_socket_and_file_errors_are_distinguished(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with open(path, "rb") as only_read, body_of(b"some") as here:
        assert receive(here.fileno(), only_read.fileno(), 0, 4, 0, 1000) == (0, 0, False, 0, errno.EBADF)
    with tempfile.TemporaryFile() as file:
        assert receive(file.fileno(), file.fileno(), 0, 4, 0, 1000) == (0, 0, False, errno.ENOTSOCK, 0)
