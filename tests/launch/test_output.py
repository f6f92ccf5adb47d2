"""Lines of ranks on their way out."""

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
    """A text file whose bytes are kept."""

    def __init__(self) -> None:
        self.below = io.BytesIO()
        super().__init__(self.below)

    @property
    def written(self) -> bytes:
        return self.below.getvalue()


def printed(chunks: list[bytes]) -> tuple[bytes, Pipe]:
    """What comes out of a pipe that these are written to, one by one."""
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
def test_every_line_has_the_prefix_however_it_is_cut_into_pieces(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    expected = b"".join(b"[rank 3] " + line for line in whole.splitlines(keepends=True))
    if expected and not expected.endswith((b"\n", b"\r")):
        expected += b"\n"
    assert expected == printed([chunk for chunk in chunks if chunk])[0]


def test_a_line_waits_for_its_end() -> None:
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


def test_a_line_without_end_is_cut_after_a_mebibyte() -> None:
    written, _ = printed([b"x" * 65536] * 17)
    assert written == b"[rank 3] " + b"x" * 65536 * 17 + b"\n"
    assert printed([b"x" * 65536] * 18)[0] == written + b"[rank 3] " + b"x" * 65536 + b"\n"


def test_the_last_lines_are_kept_for_an_error() -> None:
    _, pipe = printed([b"%d\n" % number for number in range(300)])
    assert list(pipe.tail) == [b"%d\n" % number for number in range(300 - TAIL, 300)]


@pytest.fixture
def pipe_to() -> Iterator[list[int]]:
    ends: list[int] = []
    yield ends
    for fd in ends:
        os.close(fd)


def test_a_stream_of_text_alone_is_written_to(pipe_to: list[int]) -> None:
    """A notebook's."""
    stream = io.StringIO()
    own, given_end = os.pipe()
    pipe_to.append(given_end)
    pipe = Pipe(own, "> ", stream)
    os.write(given_end, b"\xff is no text\n")
    pipe.pump()
    pipe.close()
    assert stream.getvalue() == "> \ufffd is no text\n"


def test_output_that_nobody_takes_any_more_is_read_on(pipe_to: list[int]) -> None:
    own, given_end = os.pipe()
    reader, writer = os.pipe()
    os.close(reader)
    pipe_to.append(given_end)
    with suppress(BrokenPipeError), open(writer, "w") as broken:  # at its end Python 3.14 tries once more
        pipe = Pipe(own, "> ", broken)
        for _ in range(10):
            os.write(given_end, b"x" * 60000 + b"\n")
            pipe.pump()
        pipe.close()
    assert len(pipe.tail) == 10


def test_a_full_disk_is_told_of_and_may_have_room_later(pipe_to: list[int]) -> None:
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
