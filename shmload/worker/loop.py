"""The worker's loop: claim a chunk of rows, read its samples into the slot, mark it as finished, until the trainer closes the ring.

The loop keeps no position: its orders are in the slots. So a killed worker loses nothing, because another one reads its rows again,
and in seed mode gets the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import CLOCK_BOOTTIME, clock_gettime_ns, monotonic_ns
from typing import Any, Protocol

import numpy as np

from shmload import faults
from shmload._core.filler import DONE, ERROR, VOID, WorkerRing
from shmload._core.mapping import Mapping
from shmload.batch.collate import difference_note, pack_samples, samples_in
from shmload.batch.layout import Layout
from shmload.batch.packed_batch import PackedBatch, pack
from shmload.batch.ragged_rows import Arenas, RaggedRows
from shmload.batch.registered_functions import collates_as_shipped, registered_functions
from shmload.errors import RingTooSmall
from shmload.metrics import irregular_files
from shmload.processes.identity import start_of
from shmload.worker.failure import Failure
from shmload.worker.in_place_dataset import InPlace
from shmload.worker.iterable_pass import IterablePass
from shmload.worker.job import Job
from shmload.worker.note import dump_note
from shmload.worker.sample_reader import SampleReader
from shmload.worker.sample_rng import begin_reading, end_samples
from shmload.worker.slot_memory import LOOK_AGAIN_S, Bell, SlotMemory
from shmload.worker.snapshot import Snapshots


def process_begin_ns() -> int:
    """Return CLOCK_MONOTONIC at the start of this process, to a clock tick (10 ms); 0 if /proc does not show it.

    The kernel counts from boot and includes suspended time.
    """
    ticks = start_of("self")
    if not ticks:
        return 0
    return int(ticks) * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - (clock_gettime_ns(CLOCK_BOOTTIME) - monotonic_ns())


MISFITS_MAX = 2  # batches that a worker may begin as rows and repack before it packs all batches from the start


class RankHelper(Protocol):
    """A part of the loop that claims chunks of other ranks' rings, implemented in helping.py."""

    def claim(self) -> WorkerLoop | None:
        """Claim a chunk of another rank's ring. Return the loop that fills it; None if there is nothing to do."""

    def leave_ended_ranks(self) -> None:
        """Check now and then whether other ranks have ended, and release their memory."""


class WorkerLoop:
    """One worker's loop over one ring: its own, or another rank's that it helps.

    Args:
        ring: the worker's end of the ring.
        job: how samples are read and batches are made.
        ready: the bell that wakes the trainer.
        orders: the bell that wakes this worker for a new order.
        grants: the bell that wakes this worker when the trainer has granted memory or a layout.
        open_memory: (path) -> mapping of a segment of the trainer's.
        source: the pass through an iterable dataset; None for a map-style dataset.
        snapshots: takes snapshots of this worker; None if the loader needs none.
        helped_ranks: claims chunks of other ranks' rings when this ring has none; None if the worker never helps other ranks.
        is_helper: the ring belongs to another rank.
        init_failure: the error that prevented the worker's start, if any; every order then fails with it.
        kind: what the worker is, for messages.
    """

    def __init__(
        self,
        ring: WorkerRing,
        job: Job,
        *,
        ready: Bell,
        orders: Bell,
        grants: Bell,
        open_memory: Callable[[str], Mapping],
        source: IterablePass | None = None,
        snapshots: Snapshots | None = None,
        helped_ranks: RankHelper | None = None,
        is_helper: bool = False,
        init_failure: Failure | None = None,
        kind: str = "process",
    ) -> None:
        self._ring, self._job, self._ready, self._orders = ring, job, ready, orders
        self._memory = SlotMemory(ring, ready, grants, open_memory, is_helper=is_helper)
        self._kind = kind
        self._source, self._snapshots, self._helped_ranks, self._init_failure = source, snapshots, helped_ranks, init_failure
        self._plan = job.plan
        self._in_place: InPlace | None = None
        try:
            self._in_place = self._plan.in_place(job.dataset, checks_all=job.checks_all)
        except Exception as error:  # its file is missing or was changed
            where = f"in DataLoader worker {kind} {ring.worker_id}"
            self._init_failure = init_failure or Failure.of(error, where, "shmload: the worker could not open the dataset")
        self._has_ended = False  # the iterable dataset has ended at the claimed order
        self._reader = SampleReader(ring, job, self._in_place, open_memory)
        self._num_misfits = 0  # batches begun as rows whose samples turned out to differ
        self._arenas = Arenas()
        self._num_foreign = 0
        self._difference = ""  # note on the samples of the batch that torch's collate has refused

    def run(self, begun_ns: int) -> None:
        """Fill orders until the trainer closes the ring or no longer wants this worker.

        Args:
            begun_ns: CLOCK_MONOTONIC at the worker's start, for stats readers; 0 if not known.
        """
        ring = self._ring
        ring.announce(begun_ns)
        while ring.is_wanted:
            faults.hit("before_claim")
            if ring.claim():
                faults.hit("after_claim")
                self.work()
                if self._helped_ranks is not None:
                    self._helped_ranks.leave_ended_ranks()
            else:
                self._wait_or_help()
        self._orders.post()  # pass on the wake-up, which may have been meant for another worker
        faults.hit("leaving")

    def detach(self) -> bool:
        """Separate this worker, a thread that is stuck in a sample, from the ring and its memory. Called by the trainer.

        Returns:
            whether it was separated; False if it has no claim.
        """
        if not self._ring.detach():
            return False
        self._memory.detach()
        return True

    def _wait_or_help(self) -> None:
        """Wait for an order of this ring, or fill one chunk of another rank's ring."""
        self._ring.waiting(True)  # before claiming from other ranks, so that a rank which publishes later rings this worker's bell
        loop = None if self._helped_ranks is None else self._helped_ranks.claim()
        if loop is None:
            self._orders.wait(LOOK_AGAIN_S)
        self._ring.waiting(False)
        if loop is not None:
            loop.work()

    def work(self) -> None:
        """Fill the claimed chunk, and report to the trainer that it is done or has failed."""
        ring = self._ring
        self._num_foreign, num_irregular = 0, irregular_files.value
        begin_reading(self._reader)
        self._reader.begin_order()
        self._has_ended = False
        try:
            try:
                state = self._fill()
            except StopIteration:
                if self._source is None:
                    raise
                self._has_ended = self._source.has_ended = True  # torch also takes a collate_fn's StopIteration as the end
                state = DONE
            if state == DONE and self._snapshots is not None:
                state = self._send_note(self._snapshots)
        except Exception as error:
            self._report(error)
            state = ERROR
        end_samples()
        faults.hit("before_finish")
        must_ring = ring.finish(state, num_foreign=self._num_foreign, num_irregular=irregular_files.value - num_irregular)
        faults.hit("after_finish")
        if must_ring or faults.armed:  # an armed fault point must be reached even if the trainer does not sleep
            faults.hit("before_post")
            self._ready.post()

    def _report(self, error: Exception) -> None:
        if self._init_failure is not None:
            failure = self._init_failure
        else:
            key = self._ring.key if self._job.tolerates_bad_samples else self._reader.bad_key()
            keys = self._reader.keys() if key is None and self._source is None else ()
            note = self._job.note(key, self._ring.epoch, self._ring.batch, keys)
            if self._difference:  # not a note of the error itself, which would be a part of the text and must be torch's
                note, self._difference = f"{note}\n{self._difference}", ""
            failure = Failure.of(error, f"in DataLoader worker {self._kind} {self._ring.worker_id}", note)
            if self._job.tolerates_bad_samples and not isinstance(error, RingTooSmall):
                failure = failure._replace(rows=self._reader.bad_rows())
                # in torch mode, random streams continue from batch to batch, so the next order must wait for this one's repair
                self._ring.awaits_repair = self._job.seed is None and bool(failure.rows)
            if self._snapshots is not None:
                failure = failure._replace(worker=self._note_of_failed(self._snapshots))
                if failure.rows:  # the trainer drops the snapshot if it orders the good samples again
                    self._snapshots.forget()
        self._ring.write_error(failure.dumps(self._ring.text_capacity))

    # ------------------------------------------------------------ filling

    # The methods below that return an int return the final state of the claimed chunk: DONE, or VOID if its rows are not wanted in
    # this form any more, because the order was abandoned or the batch will be ordered again.

    def _fill(self) -> int:
        if self._init_failure is not None:
            raise RuntimeError("the worker could not start")
        ring = self._ring
        keys = self._reader.keys()
        if self._source is not None:
            return self._fill_from(self._source, keys)
        if ring.is_packed:
            return self._fill_packed(keys, [])
        if ring.has_layout and ring.is_packed_only:
            return self._ask_repack(keys, [])
        if self._in_place is not None and not self._in_place.takes(keys):
            return self._ask_repack(keys, [])
        if self._plan.path == "read_batch_into":
            return self._read_batch_into(keys)
        if self._plan.path == "read_into":
            return self._read_into(keys)
        return self._place(keys)

    def _place(self, keys: list[Any]) -> int:
        ring = self._ring
        first, end = ring.first_row, ring.end_row
        if ring.nchunks == 1 and self._num_misfits >= MISFITS_MAX:
            return self._fill_packed(keys, [])
        if not collates_as_shipped():
            return self._ask_repack(keys, []) if ring.has_layout or self._memory.agree_on_layout(b"") else VOID
        reader = self._reader
        if reader.reads_all:
            return self._place_all(reader.many(keys, first, end))
        head = reader.one(first, keys[first])
        if not ring.has_layout and not self._memory.find_layout(head, self._plan.ragged):
            reader.keep(keys[first], head)
            return VOID
        if ring.is_packed_only:
            return self._ask_repack(keys, [head])
        placer = self._memory.placer()
        writer = reader.writer(placer, keys, first)
        writer.fill(head, self._job.dataset)
        if writer.fits:
            return DONE if writer.row == end else VOID
        self._num_misfits += 1
        read = [*map(placer.get, range(writer.row)), writer.misfit] if ring.nchunks == 1 else []
        return self._ask_repack(keys, read)

    def _place_all(self, batch: Any) -> int:
        """Write the samples of `__getitems__` or of the threads into the claimed rows; if they do not fit there, pack the batch."""
        ring = self._ring
        samples = samples_in(batch)
        if not ring.has_layout:  # the slot gets its memory with the layout, so agree_on_layout that first
            is_settled = self._memory.find_layout(samples[0], self._plan.ragged) if samples else self._memory.agree_on_layout(b"")
            if not is_settled:
                return VOID
        if ring.is_packed_only or not samples or len(samples) != ring.end_row - ring.first_row:
            return self._repack_all(batch)
        placer = self._memory.placer()
        for row, sample in enumerate(samples, ring.first_row):
            if ring.is_abandoned:
                return VOID
            if not placer.put(sample, row):
                self._num_misfits += 1
                return self._repack_all(batch)
        return DONE

    def _repack_all(self, batch: Any) -> int:
        """Write a packed batch if this worker has claimed all its rows; else ask the trainer to order it as packed."""
        if self._ring.nchunks == 1:
            return self._write(self.packed(batch))
        self._ring.ask_repack()
        return VOID

    def _read_into(self, keys: list[Any]) -> int:
        ring = self._ring
        placer = self._memory.placer()
        read_into: Any = self._in_place.read_into  # type: ignore[union-attr]  # whose path this is
        if self._reader.threads is not None:
            for _ in self._reader.by_threads(lambda row: read_into(keys[row], placer.out(row)), keys, ring.first_row, ring.end_row):
                if ring.is_abandoned:
                    return VOID
            return DONE
        begin = self._reader.beginning()
        for row in range(ring.first_row, ring.end_row):
            if not begin(row, keys[row]):
                return VOID
            read_into(keys[row], placer.out(row))
        return DONE

    def _read_batch_into(self, keys: Any) -> int:
        ring = self._ring
        read_batch_into: Any = self._in_place.read_batch_into  # type: ignore[union-attr]  # whose path this is
        first, end, out = ring.first_row, ring.end_row, self._memory.placer().out
        if self._reader.decodes_many and not ring.is_suspect:
            self._reader.begin_all(first, keys[first], end - first)
            read_batch_into(np.asarray(keys[first:end], np.int64), out(slice(first, end)))
            if self._reader.decoded_without_draws():
                return DONE
        for row in range(first, end):
            if ring.is_abandoned:
                return VOID
            self._reader.begin_all(row, keys[row], 1)
            read_batch_into(np.asarray(keys[row : row + 1], np.int64), out(slice(row, row + 1)))
        return DONE

    def _read_ragged(self, layout: Layout, keys: Any) -> int:
        assert self._in_place is not None
        assert self._plan.ragged is not None
        begin, reader = self._reader.beginning(), self._reader

        def begin_row(row: int) -> bool:
            if row >= 0:
                return begin(row, keys[row].item() if isinstance(keys, np.ndarray) else keys[row])
            reader.begin_all(0, keys[0], len(keys))
            return not self._ring.is_abandoned

        def read(*, one_by_one: bool) -> RaggedRows | None:
            assert self._in_place is not None
            assert self._plan.ragged is not None
            rows = RaggedRows(layout, self._plan.ragged, len(keys), self._memory.room_for, self._arenas)
            return rows if self._in_place.read_ragged(keys, rows, begin_row, is_suspect=one_by_one) else None

        at_once = self._in_place.read_batch_into is not None and reader.decodes_many and not self._ring.is_suspect
        rows = read(one_by_one=not at_once)
        if at_once and rows is not None and not reader.decoded_without_draws():
            rows = read(one_by_one=True)
        if rows is None:
            return VOID
        reader.end()
        return self._write(rows.finish())

    # ------------------------------------------------------------ packed batches

    def _ask_repack(self, keys: Any, samples: list[Any]) -> int:
        """Fill a packed batch if this worker has claimed all its rows; else ask the trainer to order it as packed."""
        if self._ring.nchunks == 1:
            return self._fill_packed(keys, samples)
        if samples:
            self._reader.keep(keys[self._ring.first_row], samples[0])
        self._ring.ask_repack()
        return VOID

    def _fill_packed(self, keys: Any, samples: list[Any]) -> int:
        """Read the samples that `samples` lacks, collate all, and write the whole batch."""
        plan = self._plan
        if self._in_place is not None and plan.layout is not None and plan.is_whole and self._in_place.takes(keys):
            return self._read_ragged(plan.layout, keys)
        if isinstance(keys, np.ndarray):
            keys = keys.tolist()
        if not self._job.auto_collation:
            return self._write(pack(self._convert(self._reader.one(0, keys[0]))))
        rest = self._reader.many(keys, len(samples), len(keys))
        return self._write(self.packed(samples + rest if samples else rest))

    def _write(self, packed: PackedBatch) -> int:
        ring = self._ring
        self._num_foreign = packed.num_foreign
        if ring.payload[3] < packed.nbytes and not self._memory.grow(packed.nbytes):
            return VOID
        packed.write(self._memory.room(packed.nbytes))
        ring.set_used(packed.nbytes)
        return DONE

    # ------------------------------------------------------------ iterable datasets

    def _fill_from(self, source: IterablePass, keys: list[Any]) -> int:
        """Make a batch of the next samples. At the end of the iterator there is no batch, only a note."""
        ring, job = self._ring, self._job
        ring.end_rows()  # the time to make the iterator belongs to no sample
        source.enter(ring.epoch, keys[0])
        if not job.auto_collation:
            for sample in self._up_to(source, 1):
                return self._write(pack(self._convert(sample)))
            self._has_ended = True
            return DONE
        placer, num_placed = None, 0
        samples: list[Any] = []
        for sample in self._up_to(source, len(keys)):
            if num_placed == 0 and not samples and self._plan.path != "collate_fn" and collates_as_shipped():
                if not ring.has_layout and not self._memory.find_layout(sample, self._plan.ragged):
                    return VOID
                placer = None if ring.is_packed_only else self._memory.placer()
            if placer is not None:
                if placer.put(sample, num_placed):
                    num_placed += 1
                    continue
                samples, placer = [placer.get(row) for row in range(num_placed)], None
            samples.append(sample)
        if placer is not None and num_placed == len(keys):
            return DONE
        if placer is not None:
            samples = [placer.get(row) for row in range(num_placed)]
        if not samples or (job.drop_last and len(samples) < len(keys)):
            self._has_ended = True
            return DONE
        return self._write(self.packed(samples))

    def _up_to(self, source: IterablePass, limit: int) -> Iterator[Any]:
        for row in range(limit):
            self._reader.begin(row, None)
            try:
                sample = source.next()
            except StopIteration:
                return
            yield sample

    def _send_note(self, snapshots: Snapshots) -> int:
        """Send this worker's snapshot with the batch, if one is due. Return DONE, or VOID if the batch is no longer wanted."""
        ring = self._ring
        note = self._note(snapshots, ring.text_capacity, has_batch=not self._has_ended)
        if note is None:
            return VOID
        if note:
            ring.write_note(note)
        return DONE

    def _note(self, snapshots: Snapshots, capacity: int, *, has_batch: bool) -> bytes | None:
        """Return the note with this worker's snapshot; empty if none is due, None if the batch is no longer wanted.

        Args:
            snapshots: this worker's snapshots.
            capacity: bytes of the longest note; a longer snapshot is written into the payload.
            has_batch: the payload holds a batch, and the snapshot is written after it.
        """
        ring = self._ring
        if not (self._has_ended or snapshots.is_due(ring.step)):
            return b""
        snapshot = snapshots.take()
        note = dump_note(snapshot, has_ended=self._has_ended)
        if len(note) > capacity:
            used_nbytes = (ring.used_nbytes or self._memory.layout.nbytes(ring.nrows)) if has_batch else 0
            at = self._memory.append(used_nbytes, snapshot)
            if at < 0:
                return None
            note = dump_note((at, len(snapshot)), has_ended=self._has_ended)
        return note

    def _note_of_failed(self, snapshots: Snapshots) -> bytes:
        """Return the note to send with a failed batch's error; empty if none is due, or if it fails, so that the error is kept."""
        try:
            note = self._note(snapshots, self._ring.text_capacity // 2, has_batch=False)
        except Exception:
            note = None
        if note is None:
            snapshots.forget()
        return note or b""

    def _convert(self, sample: Any) -> Any:
        self._reader.end()
        if self._job.collate_fn is not None:
            return self._job.collate_fn(sample)
        from torch.utils.data import default_convert

        return default_convert(sample)

    def packed(self, samples: Any) -> PackedBatch:
        """Collate samples by the user's collate_fn or torch's rules, and return them as a packed batch.

        Args:
            samples: a list, or the result of the dataset's `__getitems__`.
        """
        self._reader.end()
        job = self._job
        if job.collate_fn is not None:
            return pack(job.collate_fn(samples))
        packed = pack_samples(samples, job.plan.ragged, registered_functions())
        if packed is not None:
            return packed
        from shmload.worker.torch_side import default_collate

        try:
            batch = default_collate(samples)
        except Exception:
            self._difference = difference_note(samples, self._reader.keys())
            raise
        return pack(batch)
