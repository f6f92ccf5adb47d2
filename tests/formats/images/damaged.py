"""Damages JPEG files with restart markers, and checks what reading a part of one gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from shmload._core.jpeg import recode
from shmload.formats.images.jpeg_header import jpeg_header
from tests.formats.images.jpegs import SAMPLINGS, encoded, intervals, part_of, sequential, shrunk

WIDTHS = (0, 8, 48, 100)  # minimum of pixels between two markers; 0 means one row


def damage(data: bytes, rng: random.Random) -> bytes:
    """Returns the file with some bits, bytes or markers changed, added or removed; the header often changes."""
    changed = bytearray(data)
    found = [end for _, end in intervals(data)]
    for _ in range(rng.choice((1, 1, 2, 6))):
        at, kind = rng.randrange(2, len(changed)), rng.randrange(5)
        marker = min(rng.choice(found), len(changed) - 2)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = 0xFF
        elif kind == 2:
            changed[marker + 1] = rng.choice((0xD0, 0xD3, 0, 0xD9, 0xC4, 0xFF))
        elif kind == 3 and len(changed) > 100:
            del changed[marker : marker + rng.choice((1, 2, 7))]
        else:
            changed[at:at] = bytes((0xFF, rng.choice((0xD0, 0xD1, 0xD5, 0, 0xD9))))
    return bytes(changed[: rng.randrange(4, len(changed))] if rng.random() < 0.05 else changed)


def read_damaged(data: bytes, rng: random.Random) -> str:
    """Reads a random part of a file and assert that it equals the part of a sequential read.

    Returns:
        "refused", "read", "passed" (the damage was outside of what was read) or "unread" (the header was invalid or too large).
    """
    try:
        header = jpeg_header(data)
    except ValueError:
        return "unread"
    if header.height * header.width > 100_000:
        return "unread"
    reduction = rng.choice((1, 1, 2, 4, 8))
    height, width = shrunk(data, reduction)
    top, left = rng.randrange(height), rng.randrange(width)
    part = (top, left, rng.randint(top + 1, min(height, top + 60)), rng.randint(left + 1, width))
    options: dict[str, Any] = {"is_fast": rng.random() < 0.5, "is_strict": rng.random() < 0.7}
    found = _outcome(lambda: part_of(data, part, reduction, **options))
    expected = _outcome(lambda: sequential(data, part, reduction, **options))
    if isinstance(found, str):
        assert expected == found
        return "refused"
    if isinstance(expected, str):
        options["is_strict"] = False
        assert np.array_equal(sequential(data, part, reduction, **options), found)
        return "passed"
    assert np.array_equal(expected, found)
    return "read"


def file_with_markers(rng: random.Random) -> bytes:
    file = encoded(rng.randint(1, 130), rng.randint(1, 200), rng.choice(SAMPLINGS), rng.choice((30, 90)))
    return recode(file, least_width=rng.choice(WIDTHS))


def _outcome(read: Callable[[], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | str:
    try:
        return read()
    except ValueError as error:
        return str(error)
