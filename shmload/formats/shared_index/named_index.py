"""One copy of a named SharedIndex per node: the first process of the run builds it, and the others map it."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import NamedTuple

from shmload.formats.shared_bytes import Reference, SharedBytes
from shmload.formats.shared_index.index_layout import IndexLayout
from shmload.formats.shared_index.packed_index import PackedIndex
from shmload.processes.run_key import run_key
from shmload.shm.meeting import Meeting
from shmload.shm.names import SHM_DIR, meeting_stem
from shmload.shm.segment_group import SegmentGroup

Fingerprint = str | bytes | int | None


class _Board(NamedTuple):
    """The record of a run's processes about an index under its name. Any of the references, if it still works, maps its memory."""

    layout: IndexLayout
    fingerprint: Fingerprint  # given by the user
    digest: str  # hash of the entries
    references: tuple[Reference, ...]


def share(
    name: str, pack: Callable[[], PackedIndex], fingerprint: Fingerprint, *, is_packed: bool
) -> tuple[IndexLayout, SharedBytes]:
    """Return the layout and the memory of the index that this run has under `name`. Build it if no process has done so yet.

    Args:
        name: name of the index within this run and node.
        pack: builds the index; called by one process of the node, or by each if the entries must be compared.
        fingerprint: identifies the contents: equal fingerprints are assumed to mean equal entries.
        is_packed: every process has the entries, so that they are compared if there is no fingerprint.
    Raises:
        ValueError: other processes have different entries.
        OSError: the meeting cannot be created.
    """
    group = SegmentGroup()  # starts the reaper, which cleans up the meeting if this process is killed
    meeting = Meeting(meeting_stem("index", name, *run_key()))
    try:
        with meeting.locked_board():
            text = meeting.read()
            board: _Board | None = pickle.loads(text) if text else None
            memory = _attached_to(board) if board is not None else None
            if board is None or memory is None:
                packed = pack()
                memory = packed.shared()
                board = _Board(packed.layout, fingerprint, packed.digest(), ())
            else:
                theirs: object = board.fingerprint
                mine: object = fingerprint
                if theirs is None and mine is None and is_packed:
                    theirs, mine = board.digest, pack().digest()
                if theirs != mine:
                    raise ValueError(
                        f"SharedIndex(name={name!r}): another rank of this node has other entries under this name ({theirs}; "
                        f"here {mine}). Build it from the same entries in the same order in every rank, or give different indexes "
                        "different names"
                    )
            assert memory.reference is not None  # because it was created on this machine
            meeting.write(pickle.dumps(board._replace(references=(*board.references, memory.reference))))
    except BaseException as error:
        _leave(meeting, group)
        if isinstance(error, OSError) and error.filename is not None:
            error.add_note(
                f"SharedIndex(name={name!r}) meets this run's other ranks in {SHM_DIR}; without a name each rank holds its own copy"
            )
        raise
    weakref.finalize(memory, _leave, meeting, group)
    return board.layout, memory


def _attached_to(board: _Board) -> SharedBytes | None:
    for reference in board.references:
        try:
            return SharedBytes.attach(reference, keeps_open=True)
        except FileNotFoundError:
            continue
    return None


def _leave(meeting: Meeting, group: SegmentGroup) -> None:
    meeting.leave()
    group.close()
