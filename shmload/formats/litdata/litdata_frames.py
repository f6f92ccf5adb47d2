"""Read LitData's chunks in which several items are compressed together, in frames of zstd."""

from __future__ import annotations

import io
import struct

import numpy as np

from shmload.errors import ShardCorrupt
from shmload.formats.block_cache import BlockCache
from shmload.formats.block_index import Read, RecordIndex
from shmload.formats.compression import expanded_pieces

FRAMED = b"LDFZ01\0\0"  # begins a chunk in which several items are compressed together
_FRAME = np.dtype([("first", "<u4"), ("count", "<u4"), ("at", "<u8"), ("nbytes", "<u4"), ("expanded", "<u4")])


def index_of_frames(url: str, nbytes: int, read: Read) -> RecordIndex:
    """Return the index of a chunk of frames: blocks are frames, and `extra` has the offsets of items within the expanded frames.

    Raises:
        ShardCorrupt: the tables at the beginning of the chunk are damaged.
    """
    head = bytes(memoryview(read(0, min(nbytes, 24))).cast("B"))
    if len(head) < 24:
        raise ShardCorrupt(f"{url}: at byte 8: it ends within the head of its frames")
    version, _, count, _, num_frames = struct.unpack_from("<HHIII", head, 8)
    end = 24 + 4 * (count + 1) + _FRAME.itemsize * num_frames
    if version != 1 or not num_frames or end > nbytes:
        raise ShardCorrupt(
            f"{url}: at byte 8: it says {num_frames} frames in version {version} of {count} items; only version 1 is known "
            f"here, and its tables must fit in the {nbytes} bytes"
        )
    tables = bytes(memoryview(read(24, end - 24)).cast("B"))
    offsets, frames = (
        np.frombuffer(tables, "<u4", count + 1).astype(np.int64),
        np.frombuffer(tables, _FRAME, offset=4 * (count + 1)),
    )
    bounds = np.append(frames["at"], frames["at"][-1:] + frames["nbytes"][-1:]).astype(np.int64)
    firsts = np.append(frames["first"], [count]).astype(np.int64)
    is_sound = bounds[0] >= end and bounds[-1] <= nbytes and firsts[0] == 0 and offsets[0] == 0
    is_sound &= all(np.array_equal(np.diff(a), frames[b]) for a, b in ((bounds, "nbytes"), (firsts, "count")))
    if not is_sound or np.any(np.diff(offsets) < 0) or not np.array_equal(np.diff(offsets[firsts]), frames["expanded"]):
        raise ShardCorrupt(f"{url}: at byte 24: its {num_frames} frames do not contain its {count} items one after the other")
    return RecordIndex(url, bounds, firsts, tables[: 4 * (count + 1)])


def framed_item(index: RecordIndex, number: int, read: Read, cache: BlockCache) -> memoryview:
    """Return a view of an item's bytes in its decompressed frame, which is kept in `cache`.

    Args:
        index: a result of `index_of_frames`.
        number: number of the item in the chunk.
        read: returns the bytes of a range of the chunk.
        cache: keeps decompressed frames.
    Raises:
        ValueError: the frame is damaged.
    """
    block, _ = index.block(number)
    offsets, firsts = np.frombuffer(index.extra, "<u4"), index.firsts
    assert firsts is not None
    begin, at, stop, end = (int(offsets[n]) for n in (firsts[block], number, number + 1, firsts[block + 1]))

    def expanded() -> tuple[memoryview, int]:
        data = b""
        for piece in expanded_pieces("zst", io.BytesIO(memoryview(read(*index.span(block))))):
            data += piece
            if len(data) > end - begin:
                break
        if len(data) != end - begin:
            raise ValueError(f"its frame does not expand to {end - begin} bytes, as its chunk says")
        return memoryview(data), len(data)

    found: memoryview = cache.get((index.path, block), expanded)
    return found[at - begin : stop - begin]
