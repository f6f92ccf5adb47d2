"""`RecordIndex`: the positions of a shard's blocks, and their packed form, which is kept between runs.

A *block* is the part that is read and decoded at once. That is one sample, except for a row group of Parquet, which contains many.
The index of a shard is made once and kept next to the copies of the shards. If the format has headers or a footer, only those are
read for it. Nothing in a shard or an index is used before it has been checked.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from shmload._core.crc32c import crc32c
from shmload.formats.compression import split_compression

SCALARS = [f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64) if (kind, bits) != ("float", 8)]
Bounds = NDArray[np.int64]
Read = Callable[[int, int], Buffer]  # (offset, nbytes) -> the bytes there
PIECE = 4 << 20  # bytes per request while a shard is read without large gaps
_MAGIC = b"SHMLOAD BLOCK INDEX 1\n"
_PEEK = 64 << 10  # bytes per request after a gap of at least PIECE, because most of the bytes that follow are skipped too


@dataclass(frozen=True)
class RecordIndex:
    """The positions of the consecutive blocks of a shard.

    Attributes:
        path: the shard's URL.
        bounds: offset of each block in bytes, and the end of the last one; shape `(blocks + 1,)`.
        firsts: number of the first sample of each block, and the number of samples, shape `(blocks + 1,)`; None if each block is
            one sample.
        extra: bytes that the format needs to decode a block, such as the shard's header or footer.
    """

    path: str
    bounds: Bounds
    firsts: Bounds | None = None
    extra: bytes = b""

    @property
    def num_samples(self) -> int:
        return len(self.bounds) - 1 if self.firsts is None else int(self.firsts[-1])

    def key(self, sample: int) -> str:
        """Return a key for a sample without a name: the name of its shard, and its number."""
        return f"{_stem(self.path)}-{sample}"

    def block(self, sample: int) -> tuple[int, int]:
        """Return the block of a sample, and its row within the block."""
        if self.firsts is None:
            return sample, 0
        block = bisect_right(self.firsts, sample) - 1
        return block, sample - int(self.firsts[block])

    def span(self, block: int) -> tuple[int, int]:
        """Return the (offset, nbytes) of a block."""
        begin = int(self.bounds[block])
        return begin, int(self.bounds[block + 1]) - begin

    def pack(self, layout: str, nbytes: int) -> bytes:
        """Return the index as bytes to be saved. If all blocks have one length, their offsets are not stored.

        Args:
            layout: the format's `index_name`.
            nbytes: size of the shard.
        """
        steps = np.diff(self.bounds)
        is_even = len(steps) > 1 and bool(np.all(steps == steps[0]))
        arrays = [] if is_even else [self.bounds]
        body = b"".join(a.astype("<i8").tobytes() for a in (*arrays, *(() if self.firsts is None else (self.firsts,)))) + self.extra
        head = {
            "layout": layout,
            "nbytes": nbytes,
            "blocks": len(steps),
            "even": [int(self.bounds[0]), int(steps[0])] if is_even else None,
            "grouped": self.firsts is not None,
        }
        return _MAGIC + json.dumps({**head, "crc32c": _checksum(head, body)}).encode() + b"\n" + body

    @classmethod
    def unpack(cls, path: str, packed: Any, layout: str, nbytes: int) -> RecordIndex | None:
        """Return the index in a result of `pack` for the same `layout` and `nbytes`; None if it is damaged or for others."""
        text = bytes(packed)
        head_text, _, body = text.removeprefix(_MAGIC).partition(b"\n")
        try:
            head = json.loads(head_text)
            num_blocks, even, is_grouped = head["blocks"], head["even"], head["grouped"]
            said = (head["layout"], head["nbytes"], head.pop("crc32c"))
            if not text.startswith(_MAGIC) or said != (layout, nbytes, _checksum(head, body)) or not 0 <= num_blocks <= nbytes:
                return None
            at = 0
            if even is None:
                bounds = np.frombuffer(body, "<i8", num_blocks + 1)
                at = bounds.nbytes
            else:
                bounds = even[0] + even[1] * np.arange(num_blocks + 1, dtype=np.int64)
            firsts = np.frombuffer(body, "<i8", num_blocks + 1, at) if is_grouped else None
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return None
        found = cls(path, bounds, firsts, body[at + (0 if firsts is None else firsts.nbytes) :])
        return found if found.is_sound(nbytes) else None

    def is_sound(self, nbytes: int) -> bool:
        """Return whether all blocks are inside a shard of `nbytes` bytes, in order."""
        bounds, firsts = self.bounds, self.firsts
        inside = bounds[0] >= 0 and bounds[-1] <= nbytes and bool(np.all(bounds[1:] >= bounds[:-1]))
        return inside and (firsts is None or (firsts[0] == 0 and bool(np.all(firsts[1:] >= firsts[:-1]))))


def _checksum(head: dict[str, Any], body: bytes) -> int:
    """Return the checksum of body and head. The head is included because it has the positions of blocks of equal length."""
    return crc32c(json.dumps(head).encode() + body)


@lru_cache(maxsize=256)
def _stem(url: str) -> str:
    name = split_compression(url.rsplit("/", 1)[-1])[0]
    return name.rpartition(".")[0] or name


class Pieces:
    """A shard that is read from its beginning, a piece at a time. Bytes that are skipped are not read."""

    def __init__(self, nbytes: int, read: Read) -> None:
        self._nbytes, self._read = nbytes, read
        self._begin, self._data = 0, memoryview(b"")

    def __call__(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes of the shard from `offset`, a view; fewer at its end."""
        at, end = offset - self._begin, min(offset + size, self._nbytes)
        if at < 0 or end > self._begin + len(self._data):
            is_near = offset - (self._begin + len(self._data)) < PIECE
            end = min(max(end, offset + (PIECE if is_near else _PEEK)), self._nbytes)
            self._begin, at = offset, 0
            self._data = memoryview(self._read(offset, end - offset)).cast("B")
        return self._data[at : at + size]
