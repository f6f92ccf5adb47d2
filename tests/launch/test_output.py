"""Lines of ranks, which are forwarded with a prefix."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload.launch.output import TAIL, Pipe


class Stream(io.TextIOWrapper):
    """A text file that keeps its bytes."""

    def __init__(self) -> None:
        self.below = io.BytesIO()
        super().__init__(self.below)

    @property
    def written(self) -> bytes:
        return self.below.getvalue()


def forwarded(chunks: list[bytes]) -> tuple[bytes, Pipe]:
    """Returns the output of a pipe to which the chunks are written one by one."""
    own, given_end = os.pipe()
    stream = Stream()
    pipe = Pipe(own, "[rank 3] ", stream)
    for chunk in chunks:
        os.write(given_end, chunk)
        assert pipe.pump() or not chunk
    os.close(given_end)
    pipe.pump()
    pipe.close()
    return stream.written, pipe


@given(st.lists(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\xff"])).map(b"".join)))
def test_every_line_has_the_prefix_whatever_the_chunks(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    expected = b"".join(b"[rank 3] " + line for line in whole.splitlines(keepends=True))
    if expected and not expected.endswith((b"\n", b"\r")):
        expected += b"\n"
    assert expected == forwarded([chunk for chunk in chunks if chunk])[0]


def test_line_waits_for_its_end() -> None:
    own, given_end = os.pipe()
    stream = Stream()
    pipe = Pipe(own, "> ", stream)
    for text, expected in ((b"one\ntw", b"> one\n"), (b"o\r", b"> one\n"), (b"\nthree", b"> one\n> two\r\n")):
        os.write(given_end, text)
        pipe.pump()
        assert expected == stream.written
    os.close(given_end)
    pipe.close()
    assert stream.written.endswith(b"> three\n")


def test_line_without_end_is_cut_after_a_mebibyte() -> None:
    written, _ = forwarded([b"x" * 65536] * 17)
    assert written == b"[rank 3] " + b"x" * 65536 * 17 + b"\n"
    assert forwarded([b"x" * 65536] * 18)[0] == written + b"[rank 3] " + b"x" * 65536 + b"\n"


def test_last_lines_are_kept_for_an_error() -> None:
    _, pipe = forwarded([b"%d\n" % number for number in range(300)])
    assert list(pipe.tail) == [b"%d\n" % number for number in range(300 - TAIL, 300)]


@pytest.fixture
def pipe_to() -> Iterator[list[int]]:
    ends: list[int] = []
    yield ends
    for fd in ends:
        os.close(fd)


def test_text_only_stream_is_written(pipe_to: list[int]) -> None:
    """A notebook has such a stream."""
    stream = io.StringIO()
    own, given_end = os.pipe()
    pipe_to.append(given_end)
    pipe = Pipe(own, "> ", stream)
    os.write(given_end, b"\xff is no text\n")
    pipe.pump()
    pipe.close()
    assert stream.getvalue() == "> \ufffd is no text\n"


def test_output_to_a_closed_pipe_is_still_read(pipe_to: list[int]) -> None:
    own, given_end = os.pipe()
    reader, writer = os.pipe()
    os.close(reader)
    pipe_to.append(given_end)
    with suppress(BrokenPipeError), open(writer, "w") as broken:  # at the end, Python 3.14 tries again
        pipe = Pipe(own, "> ", broken)
        for _ in range(10):
            os.write(given_end, b"x" * 60000 + b"\n")
            pipe.pump()
        pipe.close()
    assert len(pipe.tail) == 10


def test_full_disk_is_reported_and_may_have_space_later(pipe_to: list[int]) -> None:
    own, given_end = os.pipe()
    pipe_to.append(given_end)
    with open("/dev/full", "wb", buffering=0) as full:
        pipe = Pipe(own, "> ", io.TextIOWrapper(full))
        os.write(given_end, b"lost\n")
        pipe.pump()
        assert pipe.lost is not None
        assert pipe.lost.errno == errno.ENOSPC
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), full.fileno())
            os.write(given_end, b"written\n")
            pipe.pump()
            pipe.close()
            file.seek(0)
            assert file.read() == b"> written\n"
