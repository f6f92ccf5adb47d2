"""Write the stages of a pipeline after a control block, and read them, for `shmload top` and other readers outside the program."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

StagePlaces = Sequence[tuple[str, str]]  # (name, place) of each stage of a pipeline

_FOOTER = struct.Struct("<I8s")  # number of bytes of the text before it, and a mark
_MARK = b"stages 1"
_TEXT_NBYTES = 4000  # largest text; later stages are left out


def dump_stages(stage_places: StagePlaces) -> bytes:
    """Return the bytes to store after the control block of a pipeline's ring; empty for other loaders."""
    if not stage_places:
        return b""
    num_shown = len(stage_places)
    while len(text := json.dumps([*stage_places[:num_shown]]).encode()) > _TEXT_NBYTES:
        num_shown -= 1
    return text + _FOOTER.pack(len(text), _MARK)


def load_stages(block: memoryview) -> StagePlaces | None:
    """Return the stages that `dump_stages` wrote at the end of a block; None if there are none."""
    first = len(block) - _FOOTER.size
    if first < 0:
        return None
    nbytes, mark = _FOOTER.unpack(block[first:])
    if mark != _MARK or nbytes > first:
        return None
    try:
        return [(str(name), str(where)) for name, where in json.loads(bytes(block[first - nbytes : first]))]
    except (ValueError, TypeError):
        return None
