"""One errand at a time between the ring and an actor: a claim goes out, what comes back is copied into its rows, the claim ends.

A worker of the ring has several stand-ins, so that its actor decodes a batch while the one before travels or is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import DONE, ERROR, VOID, WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.rows import copy_from
from shmload.batch.layout import ALIGNMENT, Layout
from shmload.worker.actors.cluster import Call, Cluster
from shmload.worker.actors.errand import Errand, Outcome
from shmload.worker.failure import Failure
from shmload.worker.notes import dump_note
from shmload.worker.slot_memory import Bell, SlotMemory


class StandIn:
    """A claim's place in the ring, for one worker whose samples are decoded elsewhere.

    Args:
        ring: its own view, with the worker's number.
        open_memory: (path) -> mapping of a segment the trainer has made.
    """

    def __init__(
        self, ring: WorkerRing, cluster: Cluster, *, ready: Bell, grants: Bell, open_memory: Callable[[str], Mapping]
    ) -> None:
        self.ring = ring
        self._cluster = cluster
        self._ready = ready
        self._memory = SlotMemory(ring, ready, grants, open_memory)
        self._num_foreign = 0
        self._equal: set[bytes] = set()  # texts of layouts that are the ring's
        self._call: Call | None = None  # of the claim, if it needs one
        self._error: Exception | None = None  # why there is none

    def begin(self) -> None:
        """Sends the claim to the worker's actor. In the order of claims: torch mode's streams depend on it."""
        ring = self.ring
        ring.end_rows()
        self._call = self._error = None
        if not ring.is_packed and ring.nchunks > 1 and ring.has_layout and ring.is_packed_only:
            return
        try:
            self._call = self._cluster.begin(ring.worker_id, "work", self._errand())
        except Exception as error:
            self._error = error

    def end(self) -> None:
        """Waits for what comes of the claim, writes it, and ends the claim."""
        ring = self.ring
        self._num_foreign = 0
        try:
            own = self._fill()
        except Exception as error:
            note = f"shmload: epoch {ring.epoch}, batch {ring.batch}"
            failure = Failure.of(error, f"in DataLoader worker process {ring.worker_id}", note)
            ring.write_error(failure.dumps(ring.text_capacity))
            own = ERROR
        self._call = self._error = None
        if ring.finish(own, num_foreign=self._num_foreign):
            self._ready.post()

    def _fill(self) -> int:
        ring = self.ring
        if self._error is not None:
            raise self._error
        if self._call is None:
            ring.ask_repack()
            return VOID
        outcome = self._result(self._call)
        if outcome.own == ERROR:
            ring.write_error(outcome.error)
            return ERROR
        if outcome.note is not None and outcome.note[1]:  # the iterator has ended: there is no batch
            return self._send_note(outcome.note)
        if not ring.is_packed and not ring.has_layout and not self._memory.settle(outcome.layout or b""):
            return VOID
        if outcome.row_nbytes is not None and not self._fits(outcome.layout or b"") and ring.nchunks == 1:
            call = self._cluster.begin(ring.worker_id, "pack_rows", outcome, ring.nrows)
            outcome = self._result(call)._replace(note=outcome.note)
        own = self._write(outcome)
        return self._send_note(outcome.note) if own == DONE and outcome.note is not None else own

    def _result(self, call: Call) -> Outcome:
        ring, cluster = self.ring, self._cluster
        outcome: Outcome = cluster.result(ring.worker_id, call)
        if outcome.place is not None:
            ring.count_fetch(
                outcome.payload.nbytes,
                is_remote=outcome.place[0] != cluster.node_id,
                node=outcome.place[0].encode(),
                num_actors=cluster.num_actors(ring.worker_id, outcome.place),
            )
        return outcome

    def _errand(self) -> Errand:
        ring = self.ring
        path = ring.order_path
        order = bytes(memoryview(self._memory.open(path.decode()))[: ring.order_nbytes]) if path else ring.order_bytes()
        is_packed = ring.is_packed or (ring.has_layout and ring.is_packed_only)
        return Errand(
            ring.epoch, ring.step, ring.first_row, ring.end_row, ring.nrows, order, ring.is_pickled, is_packed
        )

    def _fits(self, text: bytes) -> bool:
        """Whether rows of this layout have their places in the ring."""
        ring = self.ring
        if ring.is_packed or ring.is_packed_only:
            return False
        if text in self._equal or text == ring.layout_text:
            return True
        try:  # the same layout may be written in several ways: pickle notes which strings are one object
            theirs, ours = Layout.loads(text), Layout.loads(ring.layout_text)
        except Exception:  # a class of the trainer's program alone
            return False
        if (theirs.fields, theirs.tree, theirs.zero_fill) != (ours.fields, ours.tree, ours.zero_fill):
            return False
        self._equal.add(text)
        return True

    def _write(self, outcome: Outcome) -> int:
        ring, payload = self.ring, outcome.payload
        if outcome.row_nbytes is not None and self._fits(outcome.layout or b""):
            self._place(payload, outcome.row_nbytes)
            return DONE
        if ring.nchunks > 1:
            ring.ask_repack()
            return VOID
        if ring.payload[3] < payload.nbytes and not self._memory.grow(payload.nbytes):
            return VOID
        copy_from(self._memory.room(payload.nbytes).ctypes.data, payload.ctypes.data, payload.nbytes)
        ring.set_used(payload.nbytes)
        self._num_foreign = outcome.num_foreign
        return DONE

    def _place(self, payload: NDArray[np.uint8], row_nbytes: tuple[int, ...]) -> None:
        """Copies rows, dense field by field, to where the batch has them; both as `Layout.place` lays them out."""
        ring = self.ring
        num_rows = ring.end_row - ring.first_row
        slot = self._memory.room(sum(_aligned(ring.nrows * nbytes) for nbytes in row_nbytes))
        source, target = payload.ctypes.data, slot.ctypes.data
        for nbytes in row_nbytes:
            copy_from(target + ring.first_row * nbytes, source, num_rows * nbytes)
            source += _aligned(num_rows * nbytes)
            target += _aligned(ring.nrows * nbytes)

    def _send_note(self, note: tuple[bytes, bool]) -> int:
        """Passes on what the actor says of itself, behind the batch where it is long."""
        ring, (snapshot, has_ended) = self.ring, note
        dumped = dump_note(snapshot, has_ended=has_ended)
        if len(dumped) > ring.text_capacity:
            used = 0 if has_ended else ring.used_nbytes or self._memory.layout.nbytes(ring.nrows)
            at = self._memory.append(used, snapshot)
            if at < 0:
                return VOID
            dumped = dump_note((at, len(snapshot)), has_ended=has_ended)
        ring.write_note(dumped)
        return DONE


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
