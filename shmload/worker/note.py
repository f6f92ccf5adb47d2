"""The note that travels with a batch in torch mode: the worker's snapshot, and whether its iterable dataset has ended.

    one byte of flags | the snapshot, or its place in the payload if it is longer than a note may be

A worker whose snapshot has not changed sends the flags alone.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import NamedTuple

SAME = b""  # the worker's snapshot equals its last one

_ENDED, _IN_PAYLOAD = 1, 2
_PLACE = struct.Struct("<QQ")
_NO_NEWS = bytes([0])  # NO_NEWS as bytes


class Note(NamedTuple):
    """What a worker sent with a batch.

    Attributes:
        snapshot: the worker's, pickled; SAME: it equals its last one.
        has_ended: no batch came, because the worker's iterator has ended.
    """

    snapshot: bytes
    has_ended: bool


END = bytes([_ENDED])  # the beginning of a note that comes without a batch and without a payload

NO_NEWS = Note(SAME, has_ended=False)

AFRESH = Note(pickle.dumps({}), has_ended=False)  # of a worker that has just replaced another


def dump_note(snapshot: bytes | tuple[int, int], *, has_ended: bool) -> bytes:
    """Return a note as bytes.

    Args:
        snapshot: itself, or (offset, nbytes) of its place in the payload.
        has_ended: the worker's iterator has ended.
    """
    flags = _ENDED * has_ended
    if isinstance(snapshot, tuple):
        return bytes([flags | _IN_PAYLOAD]) + _PLACE.pack(*snapshot)
    return bytes([flags]) + snapshot


def load_note(dumped: bytes, payload_bytes: Callable[[int, int], bytes] | None) -> Note | None:
    """Return the note that `dump_note` made; None if the bytes are empty.

    Args:
        dumped: what `dump_note` returned.
        payload_bytes: (offset, nbytes) -> that part of the payload; may be None if the note begins with END.
    """
    if dumped == _NO_NEWS:
        return NO_NEWS
    if not dumped:
        return None
    flags, snapshot = dumped[0], dumped[1:]
    if flags & _IN_PAYLOAD:
        assert payload_bytes is not None
        snapshot = payload_bytes(*_PLACE.unpack(snapshot))
    return Note(snapshot or SAME, bool(flags & _ENDED))
