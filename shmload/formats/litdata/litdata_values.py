"""Decode leaves of format "json" in LitData's items: lists and dicts, as JSON text or in a compact encoding of tagged values.

A leaf whose first byte is above 0x20 is JSON. Otherwise each value begins with a tag; numbers are little-endian.

    0 JSON       u32 bytes | text                       6 records  u32 rows, u32 keys | keys | for each row and key, a record value
    1 strings    u32 count | (u32 bytes | UTF-8) each   7 string   u32 bytes | UTF-8
    2 integers   u32 count | i64 each                   8 integer  i64
    3 floats     u32 count | f64 each                   9 float    f64
    4 booleans   u32 count | u8 each                   10 boolean  u8
    5 dict       u32 count | (key | value) each        11 None

A record value has its own tags: 16 None, 17 string, 18 integer, 19 float, 20 boolean.

Source: litdata 0.2.76, litdata/streaming/serializers.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

__all__ = ["nested_value"]

_MAX_DEPTH = 200


def nested_value(data: Any) -> Any:
    """Return the value of a leaf.

    Raises:
        ValueError: the bytes are damaged.
    """
    raw = bytes(data)
    if not raw or raw[0] > 0x20:
        return json.loads(raw)
    reader = _Reader(raw)
    value = reader.value(0)
    if reader.at != len(raw):
        raise ValueError(f"a nested value ends at byte {reader.at} of {len(raw)}")
    return value


class _Reader:
    """A position in the bytes of a leaf."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self.at = raw, 0
        plain: tuple[Callable[[], Any], ...] = (lambda: None, self._text, self._integer, self._float, self._boolean)
        self._plain = {**dict(enumerate((*plain[1:], plain[0]), 7)), **dict(enumerate(plain, 16))}

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested values are deeper than {_MAX_DEPTH}")
        tag = self._taken(1)[0]
        if 7 <= tag <= 11:
            return self._plain[tag]()
        if tag > 6:
            raise ValueError(f"a nested value has the unknown tag {tag}")
        count = self._count()
        if tag == 0:
            return json.loads(self._taken(count))
        if tag == 1:
            return [self._text() for _ in range(count)]
        if tag in (2, 3):
            return list(struct.unpack(f"<{count}{'q' if tag == 2 else 'd'}", self._taken(8 * count)))
        if tag == 4:
            return list(map(bool, self._taken(count)))
        if tag == 5:
            return {self._text(): self.value(depth + 1) for _ in range(count)}
        keys = [self._text() for _ in range(self._count())]
        if not keys:
            raise ValueError("records have no keys")  # records without keys take no bytes, so a false count would exhaust memory
        return [{key: self._record_value() for key in keys} for _ in range(count)]

    def _record_value(self) -> Any:
        tag = self._taken(1)[0]
        if not 16 <= tag <= 20:
            raise ValueError(f"a record has a value of the unknown tag {tag}")
        return self._plain[tag]()

    def _taken(self, nbytes: int) -> bytes:
        begin, self.at = self.at, self.at + nbytes
        if self.at > len(self._raw):
            raise ValueError(f"a nested value goes beyond its {len(self._raw)} bytes")
        return self._raw[begin : self.at]

    def _count(self) -> int:
        return int.from_bytes(self._taken(4), "little")

    def _text(self) -> str:
        return self._taken(self._count()).decode()

    def _integer(self) -> int:
        return int.from_bytes(self._taken(8), "little", signed=True)

    def _float(self) -> float:
        return float(struct.unpack("<d", self._taken(8))[0])

    def _boolean(self) -> bool:
        return self._taken(1) != b"\0"
