"""Which features a tf.train.Example has, without a schema: enough of its wire format to tell names, kinds and counts.

    Example.features 0x0a; Features.feature 0x0a; key 0x0a, value 0x12; bytes_list 0x0a, float_list 0x12, int64_list 0x1a

Reading with a schema is `TFRecordDataset`'s work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_KINDS = {1: "bytes", 2: "float32", 3: "int64"}


def features_of(record: bytes) -> dict[str, Any] | None:
    """Values by name: a list of bytes, float32 or int64 numbers; None if the record is no Example."""
    try:
        found: dict[str, Any] = {}
        for number, features in _fields(record):
            if number != 1 or not isinstance(features, bytes):
                return None
            for _, entry in _fields(features):
                parts = dict(_fields(entry))
                kinds = [(kind, body) for kind, body in _fields(parts.get(2, b"")) if kind in _KINDS]
                name = parts.get(1, b"").decode()
                found[name] = _values(*kinds[-1]) if kinds else []
        return found or None
    except (ValueError, IndexError, TypeError, AttributeError):  # whatever a message is not made of
        return None


def _values(kind: int, body: bytes) -> Any:
    if kind == 1:
        return [value for _, value in _fields(body)]
    if kind == 2:
        packed = b"".join(value for _, value in _fields(body))
        return np.frombuffer(packed, "<f4")
    numbers: list[int] = []
    for _, value in _fields(body):
        at = 0
        if isinstance(value, int):
            numbers.append(value)
            continue
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return np.array(numbers, np.uint64).view(np.int64)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, contents) of a message's fields."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            nbytes, at = _varint(message, at)
        elif wire in (1, 5):
            nbytes = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + nbytes > len(message) or tag >> 3 == 0:
            raise ValueError("a field goes beyond its message")
        yield tag >> 3, message[at : at + nbytes]
        at += nbytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value & ((1 << 64) - 1), at
    raise ValueError("a number of more than ten bytes")
