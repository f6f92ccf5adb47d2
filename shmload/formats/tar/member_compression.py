"""Compress and decompress single members. The decompressed size is limited."""

from __future__ import annotations

import io
from collections.abc import Callable

from shmload.formats.compression import expanded_pieces, zstd_pieces
from shmload.formats.inflate import inflated

EXPANDED_LIMIT = 1 << 31  # greatest number of bytes that one member may expand to


def gunzip(data: bytes) -> bytes:
    """Decompress a gzip file.

    Raises:
        ValueError: it is truncated, damaged, or expands to more than 2 GiB.
    """
    return inflated(data, "gzip", EXPANDED_LIMIT) if data else b""


def unzstd(data: bytes) -> bytes:
    """Decompress a member that was compressed with zstd.

    Raises:
        ValueError: it is truncated, damaged, or expands to more than 2 GiB.
        ModuleNotFoundError: no zstd library is installed (extra `zstd`).
    """
    pieces, total = [], 0
    for piece in expanded_pieces("zst", io.BytesIO(data)):
        total += len(piece)
        if total > EXPANDED_LIMIT:
            raise ValueError(f"zstd: expands to more than {EXPANDED_LIMIT} bytes")
        pieces.append(piece)
    return b"".join(pieces)


# functions that decompress a member, by the last part of its name
EXPANDERS: dict[str, Callable[[bytes], bytes]] = {"gz": gunzip, "zst": unzstd}
ZSTD_LEVEL = 3  # zstd's default


def zstd(data: bytes, level: int = ZSTD_LEVEL) -> bytes:
    """Compress a member with zstd."""
    return b"".join(zstd_pieces(memoryview(data), level))
