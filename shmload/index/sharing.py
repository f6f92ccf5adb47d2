"""One copy of an index for all ranks of a run on a node: the first to come builds it, the others map it.

They meet at a board (shm/meeting.py) that holds no entries, only the index's layout, what tells its content apart, and the ways to
its memory: the builder's segment, and every holder's own descriptor under /proc. So a newcomer finds the memory as long as anyone
has it, also when the builder has ended. The builder works inside the gate: if it is killed there, the next in line finds an empty
board and builds in its place.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import NamedTuple

from shmload.index.layout import Layout
from shmload.index.memory import Memory, Reference
from shmload.index.pack import Packed
from shmload.shm.group import Group
from shmload.shm.meeting import Meeting
from shmload.shm.names import SHM_DIR, meeting_stem
from shmload.world import run_key

Fingerprint = str | bytes | int | None


class _Board(NamedTuple):
    layout: Layout
    fingerprint: Fingerprint  # the user's
    digest: str  # of the entries
    ways: tuple[Reference, ...]


def share(name: str, pack: Callable[[], Packed], fingerprint: Fingerprint, *, is_packed: bool) -> tuple[Layout, Memory]:
    """The index that this run knows by a name, built if nobody has.

    Args:
        pack: builds it; called by one process of the node, or by each if it must be compared.
        fingerprint: stands for the content: equal fingerprints are taken for equal entries.
        is_packed: the entries are at hand in every process, so that without a fingerprint they are compared themselves.
    Raises:
        ValueError: the others hold other entries.
        OSError: there is no place to meet at.
    """
    group = Group()  # starts the reaper, which sees to the meeting if this process is killed
    meeting = Meeting(meeting_stem("index", name, *run_key()))
    try:
        with meeting.at_board():
            text = meeting.read()
            board: _Board | None = pickle.loads(text) if text else None
            memory = _attached(board) if board is not None else None
            if board is None or memory is None:
                packed = pack()
                memory = Memory.create(packed)
                board = _Board(packed.layout, fingerprint, packed.digest(), ())
            elif fingerprint is not None or board.fingerprint is not None:
                _check(name, str(board.fingerprint), str(fingerprint), board.fingerprint == fingerprint)
            elif is_packed:
                digest = pack().digest()
                _check(name, board.digest, digest, board.digest == digest)
            assert memory.reference is not None  # it was made here
            meeting.write(pickle.dumps(board._replace(ways=(*board.ways, memory.reference))))
    except BaseException as error:
        _leave(meeting, group)
        if isinstance(error, OSError) and error.filename is not None:
            error.add_note(
                f"SharedIndex(name={name!r}) meets this run's other ranks in {SHM_DIR}; without a name each rank holds its own copy"
            )
        raise
    weakref.finalize(memory, _leave, meeting, group)
    return board.layout, memory


def _attached(board: _Board) -> Memory | None:
    for way in board.ways:
        try:
            return Memory.attach(way, keeps_open=True)
        except FileNotFoundError:
            continue
    return None


def _check(name: str, theirs: str, mine: str, is_equal: bool) -> None:
    if not is_equal:
        raise ValueError(
            f"SharedIndex(name={name!r}): another rank of this node holds other entries under this name ({theirs}; here "
            f"{mine}). Build it from the same entries in the same order in every rank, or give different indexes different names"
        )


def _leave(meeting: Meeting, group: Group) -> None:
    meeting.leave()
    group.close()
