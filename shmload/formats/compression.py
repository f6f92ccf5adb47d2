"""Files and objects that are compressed as a whole, expanded as they are read, by their endings. What is written is zstd."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from shmload.errors import ShmloadError
from shmload.formats.columns import library

__all__ = ["expanded_pieces", "packing_of", "zstd_file", "zstd_pieces"]

_STEP = 1 << 20  # bytes that are given at a time
_INPUT = 16 << 10  # bytes of zstd taken at a time: they may expand to 30,000 times as many
_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}
_ENDINGS = {".gz": "gz", ".tgz": "gz", ".bz2": "bz2", ".xz": "xz", ".zst": "zst", ".zstd": "zst"}
_ENDINGS |= {".br": "br", ".snappy": "snappy"}


def packing_of(key: str) -> tuple[str, str]:
    """What a name says of compression: the name without its ending, and "gz", "bz2", "xz", "zst", "br", "snappy" or nothing."""
    for ending, kind in _ENDINGS.items():
        if key.lower().endswith(ending):
            return key[: -len(ending)] + (".tar" if ending == ".tgz" else ""), kind
    return key, ""


def expanded_pieces(kind: str, file: Any) -> Iterator[bytes]:
    """What a compressed file expands to, a piece at a time. Streams may follow each other.

    Args:
        kind: as of `packing_of`.
        file: gives its bytes by `read(n)`.
    Raises:
        ValueError: it is damaged or cut.
        ModuleNotFoundError: there is nothing that reads it (extras `zstd`, `brotli`, `snappy`).
    """
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    total = 0
    try:
        for piece in _PIECES[kind](file) if kind in _PIECES else _opened(kind, file):
            total += len(piece)
            yield piece
    except ShmloadError:  # the file's own, as of a store
        raise
    except errors as error:
        raise ValueError(f"the {kind} stream is damaged or cut after {total} expanded bytes: {error}") from error


def _opened(kind: str, file: Any) -> Iterator[bytes]:
    with _OPENERS[kind](file) as source:
        while piece := source.read(_STEP):
            yield piece


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


def _zstd(file: Any) -> Iterator[bytes]:
    """Frame by frame: what ends within one is an error, which a reader of streams would not tell."""
    if sys.version_info >= (3, 14):
        from compression import zstd

        begin, error = zstd.ZstdDecompressor, zstd.ZstdError
    else:
        module = library("zstandard", "zstd")
        begin, error = module.ZstdDecompressor().decompressobj, module.ZstdError
    frame: Any = None
    data = b""
    while data or (data := bytes(file.read(_INPUT))):
        frame = frame or begin()
        try:
            piece = frame.decompress(data)
        except error as cause:
            raise EOFError(str(cause)) from cause
        data = b""
        if frame.eof:
            frame, data = None, frame.unused_data
        if piece:
            yield piece
    if frame is not None:
        raise EOFError("its last frame does not end")


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


def zstd_file(file: Any) -> io.BufferedReader:
    """What a file that zstd has compressed expands to, as a file. A read raises ValueError where it is damaged or cut.

    Raises:
        ModuleNotFoundError: there is nothing that reads zstd (extra `zstd`); of a read.
    """
    return io.BufferedReader(_Pieces(expanded_pieces("zst", file)))


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


_PIECES: dict[str, Callable[[Any], Iterator[bytes]]] = {"zst": _zstd, "br": _brotli, "snappy": _snappy}
