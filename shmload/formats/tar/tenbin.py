"""Encode and decode tenbin, webdataset's format for a list of arrays.

Each array is a header chunk and a data chunk, one after the other:

    "~TenBin~" | int64 number of bytes | the bytes, padded to 64           a chunk
    type, name (8 characters each) | int64 dimensions | int64 extents      the bytes of a header chunk
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"~TenBin~"
_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")


def decode_tenbin(data: bytes) -> list[NDArray[Any]]:
    """Decode a list of arrays.

    Raises:
        ValueError: the bytes are not valid tenbin.
    """
    chunks = list(_chunks(data))
    if len(chunks) % 2:
        raise ValueError(f"tenbin needs a header and data for each array; got {len(chunks)} chunks")
    return [_array(head, body) for head, body in zip(chunks[::2], chunks[1::2], strict=True)]


def encode_tenbin(arrays: Sequence[Any]) -> bytes:
    """Encode a list of arrays.

    Raises:
        ValueError: tenbin does not support the dtype.
    """
    found = []
    for given in arrays:
        array = np.ascontiguousarray(given).reshape(np.shape(given))
        name = array.dtype.newbyteorder("<").str[1:]
        if name not in _TYPES:
            raise ValueError(f"tenbin holds arrays of {', '.join(_TYPES)}; got {array.dtype}")
        head = struct.pack(f"<8s8sq{array.ndim}q", name.encode(), b"", array.ndim, *array.shape)
        found += [_chunk(head), _chunk(array.astype(array.dtype.newbyteorder("<")).tobytes())]
    return b"".join(found)


def _chunk(data: bytes) -> bytes:
    return _MAGIC + struct.pack("<q", len(data)) + data + bytes(-len(data) % 64)


def _chunks(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        if data[at : at + 8] != _MAGIC or len(data) - at < 16:
            raise ValueError(f"tenbin has no chunk at {at}")
        (nbytes,) = struct.unpack_from("<q", data, at + 8)
        if not 0 <= nbytes <= len(data) - at - 16:
            raise ValueError(f"tenbin's chunk at {at} says {nbytes} bytes, and {len(data) - at - 16} are left")
        yield data[at + 16 : at + 16 + nbytes]
        at += 16 + -(-nbytes // 64) * 64


def _array(head: bytes, body: bytes) -> NDArray[Any]:
    if len(head) < 24:
        raise ValueError(f"tenbin's header has at least 24 bytes; got {len(head)}")
    name = head[:8].rstrip(b"\0 ").decode("ascii", "replace")
    (ndim,) = struct.unpack_from("<q", head, 16)
    if name not in _TYPES or not 0 <= ndim <= 32 or len(head) != 24 + 8 * ndim:
        raise ValueError(f"tenbin's header is broken: type {name!r}, {ndim} dimensions, {len(head)} bytes")
    shape = struct.unpack_from(f"<{ndim}q", head, 24)
    if min(shape, default=0) < 0 or math.prod(shape) * int(name[1]) != len(body):
        raise ValueError(f"tenbin says {name} of shape {shape}, and has {len(body)} bytes")
    return np.frombuffer(body, "<" + name).reshape(shape).copy()
