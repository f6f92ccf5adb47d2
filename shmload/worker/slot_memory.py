"""The worker's view of the claimed slot's memory: mapped segments, row placers, the layout, and more room on request."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shmload import faults
from shmload._core.filler import LAYOUT, ROOM, WorkerRing
from shmload._core.mapping import CAN_POPULATE, Mapping
from shmload.batch.layout import Layout, NotFixedError, layout_of_sample
from shmload.batch.ragged import Ragged
from shmload.batch.row_placer import RowPlacer
from shmload.errors import RingTooSmall, SampleError

BLOCK_NBYTES = 1 << 16  # bytes of a segment that get memory together
PREPARED_MAX = 4096  # number of chunks that a worker remembers to have memory
LOOK_AGAIN_S = 0.1  # longest sleep, because a wake-up may be lost with a killed process


class Bell(Protocol):
    """The part of a doorbell that a worker uses."""

    def post(self) -> None:
        """Ring the bell."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until the bell rings or the time is over. Return whether it rang."""


class SlotMemory:
    """The payload memory that one worker has mapped.

    Args:
        ring: the worker's end of the ring.
        ready: the bell that wakes the trainer.
        grants: the bell that the trainer rings when it has answered a request.
        open_memory: (path) -> mapping of a segment of the trainer's.
        is_helper: the ring belongs to another rank, for whose trainer this worker does not wait.
    """

    def __init__(
        self, ring: WorkerRing, ready: Bell, grants: Bell, open_memory: Callable[[str], Mapping], *, is_helper: bool = False
    ) -> None:
        self._ring, self._is_helper = ring, is_helper
        self._ready, self._grants = ready, grants
        self.open = open_memory
        self._layout: Layout | None = None
        self._is_detached = False
        self._segments: dict[str, Mapping] = {}
        self._used: dict[int, str] = {}  # slot -> the last segment that this worker found there
        self._placers: dict[tuple[int, int, int], RowPlacer] = {}
        self._blocks: dict[str, int] = {}  # segment -> one bit for each block that is known to have memory
        self._prepared: set[tuple[int, int, int, int, int]] = set()  # chunks that are known to have memory

    @property
    def layout(self) -> Layout:
        """Return the settled layout. There must be one (`ring.has_layout`)."""
        if self._layout is None:
            self._layout = Layout.loads(self._ring.layout_text)
        return self._layout

    def placer(self) -> RowPlacer:
        """Return the placer of the claimed slot, after making sure that the claimed rows have memory. Valid for this claim only."""
        ring = self._ring
        key = (ring.slot, ring.payload_version, ring.nrows)
        placer = self._placers.get(key)
        if placer is None:
            _, path, offset, nbytes = ring.payload
            needed = self.layout.nbytes(ring.nrows)
            if needed > nbytes:
                raise SampleError(f"a batch of {ring.nrows} rows needs {needed} bytes, its slot has {nbytes}")
            stale = [k for k in self._placers if k[0] == ring.slot and k[1] != ring.payload_version]
            for k in stale:
                del self._placers[k]
            placer = self._placers[key] = RowPlacer(self.layout, self.mapped(path), offset, ring.nrows)
        chunk = (*key, ring.first_row, ring.end_row)
        if chunk not in self._prepared:
            self._prepare_rows()
            if len(self._prepared) >= PREPARED_MAX:  # batches vary in size
                self._prepared.clear()
            self._prepared.add(chunk)
        return placer

    def _prepare_rows(self) -> None:
        ring = self._ring
        _, path, offset, _ = ring.payload
        for field, at in zip(self.layout.fields, self.layout.place(ring.nrows)[0], strict=True):
            begin = offset + at
            self._prepare(path, begin + ring.first_row * field.row_nbytes, begin + ring.end_row * field.row_nbytes)

    def _prepare(self, path: bytes, begin: int, end: int) -> Mapping:
        """Make the kernel allocate memory for bytes `begin` to `end` of a segment, unless it is known to exist. Return the segment.

        Raises:
            RingTooSmall: no memory is left.
        """
        memory = self.mapped(path)
        first, last = begin // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)
        seen = self._blocks.get(name := path.decode(), 0)
        missing = ((1 << last) - (1 << first)) & ~seen
        if missing and CAN_POPULATE:
            lowest, highest = (missing & -missing).bit_length() - 1, missing.bit_length()
            try:
                memory.populate(lowest * BLOCK_NBYTES, min(highest * BLOCK_NBYTES, memory.nbytes))
            except OSError as error:
                raise RingTooSmall(
                    f"a batch needs {end - begin} bytes that were free when the ring was created, but other processes have taken "
                    f"them ({error}). Free memory or /dev/shm, or lower prefetch_factor, num_workers or batch_size"
                ) from error
            self._blocks[name] = seen | missing
        return memory

    def mapped(self, path: bytes) -> Mapping:
        """Return the claimed slot's segment, mapped. Unmap segments that no slot uses any more, because they keep their memory."""
        name = path.decode()
        self._used[self._ring.slot] = name
        memory = self._segments.get(name)
        if memory is None:
            memory = self._segments[name] = self.open(name)
            if self._is_detached:
                memory.divert(False)
            for stale in self._segments.keys() - set(self._used.values()):
                del self._segments[stale]
                self._blocks.pop(stale, None)
        return memory

    def detach(self) -> None:
        """Let this worker write into no slot any more: into private memory instead. Called by the trainer, in another thread."""
        self._is_detached = True  # first, so that `mapped` diverts a segment that it adds after the loop has begun
        for memory in list(self._segments.values()):
            memory.divert(False)

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a view of the first `nbytes` bytes of the claimed slot, which have memory; empty if it has no payload yet."""
        _, path, offset, _ = self._ring.payload
        if not path:
            return np.empty(0, np.uint8)
        return np.ndarray(nbytes, np.uint8, self._prepare(path, offset, offset + nbytes), offset)  # type: ignore[arg-type]  # a buffer

    def room_for(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a view of the whole claimed slot, after making it at least `nbytes` large.

        It stays smaller if the batch is no longer wanted, and for a helper, which does not wait.
        """
        if self._ring.payload[3] < nbytes and not self._is_helper:
            self.grow(nbytes)
        return self.room(self._ring.payload[3])

    def grow(self, nbytes: int) -> bool:
        """Wait until the slot has a payload of `nbytes`, with undefined contents. Return False if the batch is no longer wanted.

        A helper does not wait: it asks for the room and for a new order of the batch, and returns False at once.
        """
        ring = self._ring
        ring.end_rows()  # the time from here on is the trainer's, not a sample's
        began = monotonic_ns()
        ring.need(nbytes)
        if self._is_helper:
            ring.ask_repack()
            return False
        self._ready.post()
        faults.hit("waiting_grant")
        while not ring.is_granted:
            if ring.is_closing or ring.is_abandoned:
                return False
            self._grants.wait(LOOK_AGAIN_S)
        ring.waited(ROOM, began)
        if ring.payload[3] < nbytes:
            raise SampleError(
                f"a variable batch of {nbytes} bytes does not fit its slot of {ring.payload[3]} bytes, and the ring may not grow. "
                "Raise ring_bytes, or make the batch smaller"
            )
        return True

    def append(self, used_nbytes: int, extra: bytes) -> int:
        """Write bytes after the first `used_nbytes` of the slot, which keep their contents.

        Returns:
            the offset of the bytes in the slot, a multiple of 64; -1 if the batch is no longer wanted.
        """
        at = -(-used_nbytes // 64) * 64
        _, path, offset, nbytes = self._ring.payload
        if nbytes < at + len(extra):
            # nothing is read if no bytes are used, because the slot may then have no memory
            kept = bytes(memoryview(self.mapped(path))[offset : offset + used_nbytes]) if used_nbytes else b""
            if not self.grow(at + len(extra)):
                return -1
            _, path, offset, nbytes = self._ring.payload
            memoryview(self._prepare(path, offset, offset + used_nbytes))[offset : offset + used_nbytes] = kept
        begin, end = offset + at, offset + at + len(extra)
        memoryview(self._prepare(path, begin, end))[begin:end] = extra
        return at

    def find_layout(self, sample: Any, ragged: Ragged | None) -> bool:
        """Derive the layout from the first sample, and agree on it. Return False if the batch is no longer wanted.

        Args:
            sample: the sample.
            ragged: the loader's rule for ragged fields.
        """
        try:
            text = layout_of_sample(sample, lists_are_rows=ragged is not None and ragged.lists_are_rows).dumps()
        except (NotFixedError, pickle.PicklingError, AttributeError):
            text = b""
        return self.agree_on_layout(text)

    def agree_on_layout(self, text: bytes) -> bool:
        """Propose a layout until this or another worker's is settled. Return False if the batch is no longer wanted.

        Args:
            text: the layout as bytes; empty if the samples do not have rows of one shape.
        """
        ring = self._ring
        if len(text) > ring.layout_capacity:
            text = b""
        ring.end_rows()  # as in `grow`
        began = monotonic_ns()
        faults.hit("before_layout")
        while not ring.has_layout:
            if ring.is_closing or ring.is_abandoned:
                return False
            if ring.ask_layout():  # asked again each time, because the worker that asked first may have died
                try:
                    faults.hit("while_asking_layout")
                    ring.propose_layout(text)
                except BaseException:
                    ring.give_up_layout()  # this worker continues to run, and would keep others from asking
                    raise
                self._ready.post()
            faults.hit("waiting_layout")
            self._grants.wait(LOOK_AGAIN_S)
        ring.waited(LAYOUT, began)
        return True
