"""The note that travels with a batch in torch mode: where its worker stands, and whether its iterable dataset has ended.

    one byte of flags | the snapshot, or where in the payload it lies if it is longer than a note may be

A worker that has nothing new to tell sends the flags alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from shmload.worker.snapshot import SAME

_ENDED, _IN_PAYLOAD = 1, 2
_PLACE = struct.Struct("<QQ")


class Note(NamedTuple):
    """What came with a batch.

    `snapshot` is the worker's, pickled (SAME: as its last one); `has_ended` says that no batch came: the iterator is at its end.
    """

    snapshot: bytes
    has_ended: bool


END = bytes([_ENDED])  # how a note begins that comes alone: no batch, and nothing in the payload
NO_NEWS = Note(SAME, has_ended=False)
_NO_NEWS = bytes([0])  # as NO_NEWS is dumped


def dump_note(snapshot: bytes | tuple[int, int], *, has_ended: bool) -> bytes:
    """A note.

    Args:
        snapshot: itself, or (offset, nbytes) in the payload.
    """
    flags = _ENDED * has_ended
    if isinstance(snapshot, tuple):
        return bytes([flags | _IN_PAYLOAD]) + _PLACE.pack(*snapshot)
    return bytes([flags]) + snapshot


def load_note(dumped: bytes, payload_bytes: Callable[[int, int], bytes] | None) -> Note | None:
    """Inverse of `dump_note`; None if nothing came along.

    Args:
        payload_bytes: (offset, nbytes) -> that part of the payload; may be None if it begins with END.
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
