"""Files and objects that are compressed as a whole, expanded as they are read, by their endings. What is written is zstd."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from shmload.errors import ShmloadError
from shmload.formats.extras import library

__all__ = ["compression_of", "expanded_file", "expanded_pieces", "packing_of", "zstd_pieces"]

_STEP = 1 << 20  # bytes that are given at a time
_INPUT = 16 << 10  # compressed bytes taken at a time: zstd may expand them to 30,000 times as many
_ENDINGS = {".gz": "gz", ".tgz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst", ".zstd": "zst"}
_ENDINGS |= {".br": "br", ".snappy": "snappy"}
_MAGIC = re.compile(  # the blocks of bzip2 begin with pi; a stream without any ends with the root of pi
    rb"(?P<gz>\x1f\x8b)|(?P<bz2>BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90))|(?P<xz>\xfd7zXZ\0)"
    rb"|(?P<zst>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)",
    re.DOTALL,
)
MAGIC_NBYTES = 10

WINDOW = "SHMLOAD_ZSTD_WINDOW_LOG"
_WINDOW_LOG = 27  # zstd's own limit: 128 MiB


def window_log() -> int:
    """Return the base-2 logarithm of the largest zstd window that is read.

    Raises:
        ValueError: the environment variable is no number from 10 to 31.
    """
    text = os.environ.get(WINDOW, "").strip()
    if not text:
        return _WINDOW_LOG
    if not text.isdecimal() or not 10 <= int(text) <= 31:
        raise ValueError(f"{WINDOW} is a whole number from 10 to 31, as the one of zstd --long; got {text!r}")
    return int(text)


def compression_of(begin: bytes) -> str:
    """Return how a file is compressed as a whole by its first `MAGIC_NBYTES` bytes: "gz", "bz2", "xz", "zst" or nothing."""
    found = _MAGIC.match(begin)
    return "" if found is None else next(name for name, text in found.groupdict().items() if text is not None)


def packing_of(key: str) -> tuple[str, str]:
    """What a name says of compression: the name without its ending, and "gz", "bz2", "xz", "zst", "br", "snappy" or nothing."""
    for ending, kind in _ENDINGS.items():
        if key.lower().endswith(ending):
            return key[: -len(ending)] + (".tar" if ending == ".tgz" else ""), kind
    return key, ""


def expanded_pieces(kind: str, file: Any) -> Iterator[bytes]:
    """Yield what a compressed file expands to, a piece at a time.

    Streams may follow each other, with the padding that the format allows.

    Args:
        kind: as of `packing_of`; or "zlib".
        file: gives its bytes by `read(n)`.
    Raises:
        ValueError: it is damaged or cut, or something else follows a stream; names the stream and where it begins.
        ModuleNotFoundError: there is nothing that reads it (extras `zstd`, `brotli`, `snappy`).
    """
    total = 0
    try:
        for piece in _PIECES[kind](file) if kind in _PIECES else _streams(_FORMATS[kind](), file):
            if piece:
                total += len(piece)
                yield piece
    except ShmloadError:  # the file's own, as of a store
        raise
    except (OSError, EOFError) as error:
        raise ValueError(f"the {kind} stream is damaged or cut after {total} expanded bytes: {error}") from error


@dataclass(frozen=True)
class _Streams:
    """How a format's streams are expanded, and how they follow each other.

    Attributes:
        begin: makes what expands a stream: an object with `decompress`, `eof` and `unused_data`.
        error: what it raises.
        padding: zeros that may follow a stream come in multiples of this number; 0: there may be none.
        is_bounded: whether `decompress` takes the most bytes to give.
        begin_later: in place of `begin`, for all streams but the first.
    """

    begin: Callable[[], Any]
    error: type[Exception]
    padding: int = 0
    is_bounded: bool = False
    begin_later: Callable[[], Any] | None = None


def _streams(how: _Streams, file: Any) -> Iterator[bytes]:
    """Yield what streams expand to, one after the other.

    The readers of Python's `lzma` and `bz2` end without an error at padding between streams and at a damaged later stream.
    """
    stream: Any = None
    number = num_read = begin = num_zeros = 0  # of the stream; of bytes; where the stream begins; between streams
    while data := bytes(file.read(_INPUT)):
        num_read += len(data)
        while data:
            if stream is None:
                if number and how.padding:
                    rest = data.lstrip(b"\0")
                    num_zeros += len(data) - len(rest)
                    if not (data := rest):
                        break
                    _check_padding(num_zeros, how.padding, num_read - len(data))
                stream = how.begin_later() if number and how.begin_later else how.begin()
                number, begin, num_zeros = number + 1, num_read - len(data), 0
            try:
                yield stream.decompress(data, _STEP) if how.is_bounded else stream.decompress(data)
                while how.is_bounded and not (stream.eof or stream.needs_input):
                    yield stream.decompress(b"", _STEP)
            except how.error as error:
                garbage = ", or no stream follows the one before" if number > 1 else ""
                raise EOFError(f"stream {number}, which begins at byte {begin}: {_explained(error)}{garbage}") from error
            data = b""
            if stream.eof:
                stream, data = None, stream.unused_data
    if stream is not None or not number:
        raise EOFError(f"stream {max(number, 1)}, which begins at byte {begin}, does not end with the file's {num_read} bytes")
    _check_padding(num_zeros, how.padding or 1, num_read)


def _check_padding(num_zeros: int, multiple: int, end: int) -> None:
    if num_zeros % multiple:
        raise EOFError(f"{num_zeros} bytes of padding end at byte {end}, and the format allows multiples of {multiple}")


def _explained(error: Exception) -> str:
    if "too much memory" not in str(error):
        return str(error)
    return (
        f"it was written with a window of more than {2 ** window_log() >> 20} MiB (zstd --long): set {WINDOW}=31 in the "
        "environment to read windows of up to 2 GiB, which each process that expands holds in memory"
    )


def _zstd_streams() -> _Streams:
    """Frame by frame: a reader of streams would not tell that the last one is cut."""
    log = window_log()
    if sys.version_info >= (3, 14):
        from compression import zstd

        options = {zstd.DecompressionParameter.window_log_max: log}
        return _Streams(lambda: zstd.ZstdDecompressor(options=options), zstd.ZstdError)
    module = library("zstandard", "zstd")
    return _Streams(lambda: module.ZstdDecompressor(max_window_size=1 << log).decompressobj(), module.ZstdError)


_FORMATS: dict[str, Callable[[], _Streams]] = {
    "gz": lambda: _Streams(partial(zlib.decompressobj, 31), zlib.error, padding=1),
    "zlib": lambda: _Streams(zlib.decompressobj, zlib.error),
    "bz2": lambda: _Streams(bz2.BZ2Decompressor, OSError, padding=1, is_bounded=True),
    "xz": lambda: _Streams(  # the first may be of the older format, .lzma, which allows no other behind it
        lzma.LZMADecompressor,
        lzma.LZMAError,
        padding=4,
        is_bounded=True,
        begin_later=partial(lzma.LZMADecompressor, lzma.FORMAT_XZ),
    ),
    "zst": _zstd_streams,
}


def zstd_pieces(data: memoryview, level: int) -> Iterator[bytes]:
    """What bytes become as one frame of zstd, a piece at a time. It has a checksum, and says how many bytes it expands to.

    Args:
        level: 1 to 22; 3 is zstd's own default.
    Raises:
        ModuleNotFoundError: there is nothing that writes zstd (extra `zstd`).
    """
    if sys.version_info >= (3, 14):
        from compression import zstd

        is_set = zstd.CompressionParameter
        stream = zstd.ZstdCompressor(options={is_set.compression_level: level, is_set.checksum_flag: 1})
        stream.set_pledged_input_size(len(data))
    else:
        stream = library("zstandard", "zstd").ZstdCompressor(level=level, write_checksum=True).compressobj(size=len(data))
    for at in range(0, len(data), _STEP):
        if piece := stream.compress(data[at : at + _STEP]):
            yield piece
    yield stream.flush()


class _Pieces(io.RawIOBase):
    """Pieces, one after the other, as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        self._rest = self._rest or next(self._pieces, b"")
        count = min(len(out), len(self._rest))
        out[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def expanded_file(kind: str, file: Any) -> io.BufferedReader:
    """Return what a compressed file expands to, as a file. A read raises what `expanded_pieces` does.

    Args:
        kind: as of `expanded_pieces`.
        file: gives its bytes by `read(n)`; it is not closed.
    """
    return io.BufferedReader(_Pieces(expanded_pieces(kind, file)))


def _brotli(file: Any) -> Iterator[bytes]:
    module = library("brotli", "brotli")
    stream = module.Decompressor()
    try:
        while data := bytes(file.read(_INPUT)):
            if piece := stream.process(data):
                yield piece
    except module.error as cause:
        raise EOFError(str(cause)) from cause
    if not stream.is_finished():
        raise EOFError("its stream does not end")


def _snappy(file: Any) -> Iterator[bytes]:
    """One block, which names its length first: as MosaicML's writer makes it, without the frames of other programs."""
    module = library("snappy", "snappy")
    data = b"".join(iter(lambda: bytes(file.read(_STEP)), b""))
    try:
        yield module.uncompress(data)
    except module.UncompressError as cause:
        raise EOFError(f"no block of snappy without frames ({cause})") from cause


_PIECES: dict[str, Callable[[Any], Iterator[bytes]]] = {"br": _brotli, "snappy": _snappy}
