"""Parse what MosaicML's and LitData's shards have in common: the table of offsets, and some encodings of values."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload.errors import ShardCorrupt
from shmload.formats.block_index import Bounds, Read


def offsets_table(url: str, nbytes: int, read: Read) -> tuple[Bounds, int]:
    """Read the table at the beginning of a shard: the number of samples and their offsets, as uint32.

    Returns:
        the offset of each sample and the end of the last one, int64, shape `(samples + 1,)`; and the offset of the table's end.
    Raises:
        ShardCorrupt: the table is truncated, or its offsets are not valid.
    """
    head = bytes(memoryview(read(0, min(4, nbytes))).cast("B"))
    count = int.from_bytes(head, "little")
    end = 4 * (count + 2)
    if len(head) < 4 or end > nbytes:
        raise ShardCorrupt(
            f"{url}: at byte 0: it says {count} samples, but the table of their offsets needs {end} of its {nbytes} bytes"
        )
    bounds = np.frombuffer(memoryview(read(4, end - 4)), "<u4").astype(np.int64)
    if bounds[0] < end or bounds[-1] > nbytes or np.any(bounds[1:] < bounds[:-1]):
        raise ShardCorrupt(f"{url}: at byte 4: the offsets of its {count} samples are out of order, or beyond its {nbytes} bytes")
    return bounds, end


def text_of(data: Any) -> str:
    return bytes(data).decode()


def raw_image(data: Any) -> NDArray[np.uint8]:
    """Return a raw PIL image as a new array `(height, width[, channels])`.

    Its bytes are width, height and length of the mode, as uint32, then the mode and the pixels.
    """
    width, height, length = struct.unpack_from("<3I", data)
    mode, pixels = text_of(data[12 : 12 + length]), data[12 + length :]
    channels = {"L": (), "P": (), "RGB": (3,), "RGBA": (4,), "CMYK": (4,), "YCbCr": (3,), "LA": (2,), "HSV": (3,), "LAB": (3,)}
    if mode not in channels:
        raise ValueError(f"a raw image of mode {mode!r} is not known here; known are {', '.join(channels)}")
    return np.frombuffer(pixels, np.uint8).reshape(height, width, *channels[mode]).copy()


def sized_parts(data: Any, at: int) -> list[Any]:
    """Return views of the parts of a list. At offset `at` are their number and their lengths, as uint32, then the parts."""
    (count,) = struct.unpack_from("<I", data, at)
    sizes = np.frombuffer(data, "<u4", count, at + 4).tolist()
    at, parts = at + 4 + 4 * count, []
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    if at > len(data):
        raise ValueError(f"{count} parts end at byte {at} of {len(data)}")
    return parts


def unpickled(data: Any, allowed: bool) -> Any:
    if not allowed:
        raise ValueError("it is a pickle, which can run any code when it is read: pass allow_pickle=True to read it")
    try:
        return pickle.loads(data)
    except pickle.UnpicklingError as error:
        raise ValueError(f"it is a pickle that cannot be read: {error}") from error
