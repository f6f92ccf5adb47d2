"""Decompress gzip and zlib streams in memory, up to a limit."""

from __future__ import annotations

import zlib
from typing import Any

_STEP = 1 << 20  # bytes inflated per step


def inflated(data: Any, kind: str, limit: int, remedy: str = "") -> bytes:
    """Decompress a whole "gzip" or "zlib" stream. A gzip stream may have several members, followed by zeros.

    Args:
        data: the compressed bytes.
        kind: "gzip" or "zlib".
        limit: greatest number of decompressed bytes.
        remedy: advice at the end of the error if there are more.
    Raises:
        ValueError: the stream is truncated, damaged, or expands to more than `limit` bytes.
    """
    parts: list[bytes] = []
    total = at = 0
    while at < len(data) or not parts:
        stream = zlib.decompressobj(31 if kind == "gzip" else 15)
        pending: Any = b""
        while not stream.eof:
            if not len(pending):
                pending = data[at : at + _STEP]
                at += len(pending)
            is_over = not len(pending)
            try:
                parts.append(stream.decompress(pending, _STEP))
            except zlib.error as error:
                raise ValueError(f"the {kind} stream is corrupted after {total} inflated bytes: {error}") from error
            pending = stream.unconsumed_tail
            if is_over and not parts[-1] and not stream.eof:
                raise ValueError(f"the {kind} stream is truncated: it does not end with its {len(data)} bytes")
            total += len(parts[-1])
            if total > limit:
                raise ValueError(f"the {kind} stream inflates to more than {limit} bytes{remedy}")
        at -= len(stream.unused_data)
        while kind == "gzip" and at < len(data):  # zeros may follow a member, as gzip(1) allows
            piece = bytes(data[at : at + _STEP])
            at += len(piece) - len(rest := piece.lstrip(b"\0"))
            if rest:
                break
    return b"".join(parts)
