"""Write the stages of a pipeline after a control block, and read them, for `shmload top` and other readers outside the program."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

About = Sequence[tuple[str, str]]  # (name, place) of each stage of a pipeline

_ABOUT = struct.Struct("<I8s")  # number of bytes of the text before it, and a mark
_MARK = b"stages 1"
_ABOUT_NBYTES = 4000  # largest text; later stages are left out


def dump_stages(about: About) -> bytes:
    """Return the bytes to store after the control block of a pipeline's ring; empty for other loaders."""
    if not about:
        return b""
    num_shown = len(about)
    while len(text := json.dumps([*about[:num_shown]]).encode()) > _ABOUT_NBYTES:
        num_shown -= 1
    return text + _ABOUT.pack(len(text), _MARK)


def load_stages(block: memoryview) -> About | None:
    """Return the stages that `dump_stages` wrote at the end of a block; None if there are none."""
    first = len(block) - _ABOUT.size
    if first < 0:
        return None
    nbytes, mark = _ABOUT.unpack(block[first:])
    if mark != _MARK or nbytes > first:
        return None
    try:
        return [(str(name), str(where)) for name, where in json.loads(bytes(block[first - nbytes : first]))]
    except (ValueError, TypeError):
        return None
