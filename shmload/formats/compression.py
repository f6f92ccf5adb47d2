"""Files and objects that are compressed as a whole: detect the compression, decompress while reading, and compress with zstd."""

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

__all__ = ["compression_of", "expanded_file", "expanded_pieces", "split_compression", "zstd_pieces"]

_STEP = 1 << 20  # bytes per decompressed piece
_INPUT = 16 << 10  # compressed bytes per step: zstd may expand them by a factor of 30,000
_ENDINGS = {".gz": "gz", ".tgz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst", ".zstd": "zst"}
_ENDINGS |= {".br": "br", ".snappy": "snappy"}
_MAGIC = re.compile(  # the blocks of bzip2 begin with the digits of pi; a stream without blocks ends with those of its square root
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
        ValueError: the environment variable is not a number from 10 to 31.
    """
    text = os.environ.get(WINDOW, "").strip()
    if not text:
        return _WINDOW_LOG
    if not text.isdecimal() or not 10 <= int(text) <= 31:
        raise ValueError(f"{WINDOW} must be an integer from 10 to 31, as for zstd --long, got {text!r}")
    return int(text)


def compression_of(begin: bytes) -> str:
    """Return the compression of a file from its first `MAGIC_NBYTES` bytes: "gz", "bz2", "xz", "zst" or ""."""
    found = _MAGIC.match(begin)
    return "" if found is None else next(name for name, text in found.groupdict().items() if text is not None)


def split_compression(key: str) -> tuple[str, str]:
    """Return a name without the ending of its compression, and "gz", "bz2", "xz", "zst", "br", "snappy" or ""."""
    for ending, kind in _ENDINGS.items():
        if key.lower().endswith(ending):
            return key[: -len(ending)] + (".tar" if ending == ".tgz" else ""), kind
    return key, ""


def expanded_pieces(kind: str, file: Any) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, in pieces.

    Several streams may follow each other, with the padding that the format allows.

    Args:
        kind: as for `split_compression`; or "zlib".
        file: an object with `read(n)`.
    Raises:
        ValueError: the data is damaged or truncated, or something else follows a stream; names the stream and its first byte.
        ModuleNotFoundError: the library is not installed (extras `zstd`, `brotli`, `snappy`).
    """
    total = 0
    try:
        for piece in _PIECES[kind](file) if kind in _PIECES else _streams(_FORMATS[kind](), file):
            if piece:
                total += len(piece)
                yield piece
    except ShmloadError:  # an error of the file itself, such as one in a store
        raise
    except (OSError, EOFError) as error:
        raise ValueError(f"the {kind} stream is damaged or cut after {total} expanded bytes: {error}") from error


@dataclass(frozen=True)
class _Streams:
    """The way to decompress the streams of a format, and the padding that may be between them.

    Attributes:
        begin: creates the decompressor of a stream: an object with `decompress`, `eof` and `unused_data`.
        error: the exception that it raises.
        padding: zeros after a stream come in multiples of this number; 0 allows none.
        is_bounded: whether `decompress` accepts a limit for its output.
        begin_later: used instead of `begin` for all streams but the first.
    """

    begin: Callable[[], Any]
    error: type[Exception]
    padding: int = 0
    is_bounded: bool = False
    begin_later: Callable[[], Any] | None = None


def _streams(how: _Streams, file: Any) -> Iterator[bytes]:
    """Yield the decompressed bytes of consecutive streams.

    The readers of Python's `lzma` and `bz2` stop without an error at padding between streams and at a damaged later stream.
    """
    stream: Any = None
    number = num_read = begin = num_zeros = 0  # streams begun; bytes read; first byte of the stream; zeros since the last stream
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
    """Return the way to decompress zstd: frame by frame, because zstd's stream readers do not detect a truncated last frame."""
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
    "xz": lambda: _Streams(  # the first stream may have the older format .lzma, after which no other is allowed
        lzma.LZMADecompressor,
        lzma.LZMAError,
        padding=4,
        is_bounded=True,
        begin_later=partial(lzma.LZMADecompressor, lzma.FORMAT_XZ),
    ),
    "zst": _zstd_streams,
}


def zstd_pieces(data: memoryview, level: int) -> Iterator[bytes]:
    """Compress bytes to one zstd frame, and yield it in pieces. The frame contains a checksum and the uncompressed size.

    Args:
        data: the bytes.
        level: 1 to 22; zstd's default is 3.
    Raises:
        ModuleNotFoundError: no zstd library is installed (extra `zstd`).
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
    """A file that consists of consecutive pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
        count = min(len(out), len(self._rest))
        out[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def expanded_file(kind: str, file: Any) -> io.BufferedReader:
    """Return a file of the decompressed bytes. Its reads raise the errors of `expanded_pieces`.

    Args:
        kind: as for `expanded_pieces`.
        file: an object with `read(n)`; it is not closed.
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
    """Yield the contents of a raw snappy block, as MosaicML writes it. Framed snappy is not supported."""
    module = library("snappy", "snappy")
    data = b"".join(iter(lambda: bytes(file.read(_STEP)), b""))
    try:
        yield module.uncompress(data)
    except module.UncompressError as cause:
        raise EOFError(f"not a block of snappy without frames ({cause})") from cause


_PIECES: dict[str, Callable[[Any], Iterator[bytes]]] = {"br": _brotli, "snappy": _snappy}
