"""Send one claim of a worker to its actor, and write the reply into the ring.

Each worker of the ring has several proxies, so that its actor decodes one batch while the previous one is transferred or copied.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import DONE, ERROR, VOID, WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.rows import copy_from
from shmload.batch.layout import aligned
from shmload.ray.actor_set import ActorSet, Call
from shmload.ray.messages import Reply, Slot, Task
from shmload.ray.worker_actor import same_layout
from shmload.worker.failure import Failure
from shmload.worker.note import dump_note
from shmload.worker.slot_memory import Bell, SlotMemory


class WorkerProxy:
    """A worker's representative in the ring for one claim at a time, whose samples an actor decodes.

    Args:
        ring: the proxy's own view of the ring, with the worker's number.
        actors: the actors of all workers.
        ready: the bell that wakes the trainer.
        grants: the bell that the trainer rings when it has granted memory or a layout.
        open_memory: (path) -> mapping of a segment of the trainer's.
    """

    def __init__(
        self, ring: WorkerRing, actors: ActorSet, *, ready: Bell, grants: Bell, open_memory: Callable[[str], Mapping]
    ) -> None:
        self.ring = ring
        self._actors = actors
        self._ready = ready
        self._memory = SlotMemory(ring, ready, grants, open_memory)
        self._num_foreign = self._num_irregular = 0
        self._equal: set[bytes] = set()  # texts of layouts that equal the ring's
        self._call: Call | None = None  # the claim's call, if it needs one
        self._error: Exception | None = None  # the error that prevented the call

    def begin(self) -> None:
        """Send the claim to the worker's actor.

        Call this in the order of claims, because torch mode's random streams depend on it.
        """
        ring = self.ring
        ring.end_rows()
        self._call = self._error = None
        if not ring.is_packed and ring.nchunks > 1 and ring.has_layout and ring.is_packed_only:
            return
        try:
            self._call = self._actors.begin(ring.worker_id, "work", self._task())
        except Exception as error:
            self._error = error

    def end(self) -> None:
        """Wait for the reply to the claim, write it into the ring, and end the claim."""
        ring = self.ring
        self._num_foreign = self._num_irregular = 0
        try:
            own = self._fill()
        except Exception as error:
            note = f"shmload: epoch {ring.epoch}, batch {ring.batch}"
            failure = Failure.of(error, f"in DataLoader worker process {ring.worker_id}", note)
            ring.write_error(failure.dumps(ring.text_capacity))
            own = ERROR
        self._call = self._error = None
        if ring.finish(own, num_foreign=self._num_foreign, num_irregular=self._num_irregular):
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
            error = outcome.error
            if outcome.note is not None and (note := self._note(outcome.note, ring.text_capacity // 2, 0)) is not None:
                error = Failure.with_worker(error, note)
            ring.write_error(error)
            ring.awaits_repair = self._actors.repeats_in_order
            return ERROR
        if outcome.note is not None and outcome.note[1]:  # the iterator has ended without a batch
            return self._send_note(outcome.note)
        if not ring.is_packed and not ring.has_layout and not self._memory.agree_on_layout(outcome.layout or b""):
            return VOID
        if outcome.num_written:
            return DONE if outcome.note is None else self._send_note(outcome.note)
        if outcome.row_nbytes is not None and not self._fits(outcome.layout or b"") and ring.nchunks == 1:
            call = self._actors.begin(ring.worker_id, "pack_rows", outcome, ring.nrows)
            outcome = self._result(call)._replace(note=outcome.note)
        own = self._write(outcome)
        return self._send_note(outcome.note) if own == DONE and outcome.note is not None else own

    def _result(self, call: Call) -> Reply:
        ring, actors = self.ring, self._actors
        outcome: Reply = actors.result(ring.worker_id, call)
        self._num_irregular += outcome.num_irregular
        if outcome.place is not None:
            ring.count_fetch(
                outcome.payload.nbytes + outcome.num_written,
                is_remote=not outcome.num_written and outcome.place[0] != actors.node_id,
                node=outcome.place[0].encode(),
                num_actors=actors.num_actors(ring.worker_id, outcome.place),
            )
        return outcome

    def _task(self) -> Task:
        ring = self.ring
        path = ring.order_path
        order = bytes(memoryview(self._memory.open(path.decode()))[: ring.order_nbytes]) if path else ring.order_bytes()
        is_packed = ring.is_packed or (ring.has_layout and ring.is_packed_only)
        slot = None
        if not is_packed and ring.has_layout and self._actors.can_write_ring(ring.worker_id):
            _, path, offset, nbytes = ring.payload
            slot = Slot(ring.slot, path.decode(), offset, nbytes, ring.layout_text)
        return Task(ring.epoch, ring.step, ring.first_row, ring.end_row, ring.nrows, order, ring.is_pickled, is_packed, slot)

    def _fits(self, text: bytes) -> bool:
        """Return whether rows of this layout can be copied into the ring, because its layout is the same."""
        ring = self.ring
        if ring.is_packed or ring.is_packed_only:
            return False
        if text in self._equal or text == ring.layout_text:
            return True
        if not same_layout(text, ring.layout_text):
            return False
        self._equal.add(text)
        return True

    def _write(self, outcome: Reply) -> int:
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
        """Copy rows, which are dense field by field, to their places in the batch. `Layout.place` defines both layouts."""
        ring = self.ring
        num_rows = ring.end_row - ring.first_row
        slot = self._memory.room(sum(aligned(ring.nrows * nbytes) for nbytes in row_nbytes))
        source, target = payload.ctypes.data, slot.ctypes.data
        for nbytes in row_nbytes:
            copy_from(target + ring.first_row * nbytes, source, num_rows * nbytes)
            source += aligned(num_rows * nbytes)
            target += aligned(ring.nrows * nbytes)

    def _send_note(self, note: tuple[bytes, bool]) -> int:
        """Write the actor's note; a long snapshot is appended to the batch's memory. Return DONE, or VOID if it gets no memory."""
        ring = self.ring
        used = 0 if note[1] else ring.used_nbytes or self._memory.layout.nbytes(ring.nrows)
        dumped = self._note(note, ring.text_capacity, used)
        if dumped is None:
            return VOID
        ring.write_note(dumped)
        return DONE

    def _note(self, note: tuple[bytes, bool], capacity: int, used_nbytes: int) -> bytes | None:
        """Return a note as bytes, like `WorkerLoop._note`; None if the snapshot gets no memory, because the batch is not wanted."""
        snapshot, has_ended = note
        dumped = dump_note(snapshot, has_ended=has_ended)
        if len(dumped) > capacity:
            at = self._memory.append(used_nbytes, snapshot)
            if at < 0:
                return None
            dumped = dump_note((at, len(snapshot)), has_ended=has_ended)
        return dumped
