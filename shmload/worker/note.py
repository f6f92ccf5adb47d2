"""The note that a worker sends with a batch in torch mode: its snapshot, and whether its iterable dataset has ended.

    one byte of flags | the snapshot, or its place in the payload if it is longer than a note may be

A worker whose snapshot has not changed sends only the flags.
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
    """A note, decoded.

    Attributes:
        snapshot: the worker's pickled snapshot; SAME if it equals the last one.
        has_ended: there is no batch, because the worker's iterator has ended.
    """

    snapshot: bytes
    has_ended: bool


ENDED = bytes([_ENDED])  # the first byte of a note that has no batch, and no part in a payload

NO_NEWS = Note(SAME, has_ended=False)  # the snapshot has not changed, and the iterator has not ended

AFRESH = Note(pickle.dumps({}), has_ended=False)  # the note of a worker that has just replaced another, and starts without a state


def dump_note(snapshot: bytes | tuple[int, int], *, has_ended: bool) -> bytes:
    """Return a note as bytes.

    Args:
        snapshot: the snapshot, or (offset, nbytes) of its place in the payload.
        has_ended: the worker's iterator has ended.
    """
    flags = _ENDED * has_ended
    if isinstance(snapshot, tuple):
        return bytes([flags | _IN_PAYLOAD]) + _PLACE.pack(*snapshot)
    return bytes([flags]) + snapshot


def load_note(dumped: bytes, payload_bytes: Callable[[int, int], bytes] | None) -> Note | None:
    """Return the note that `dump_note` made; None if the bytes are empty, because no note was due.

    Args:
        dumped: the result of `dump_note`.
        payload_bytes: (offset, nbytes) -> that part of the payload; may be None if the note begins with ENDED.
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
