"""What a worker does: claim rows of an ordered slot, decode them into place, finish; again, until the trainer closes.

It keeps no position. Its orders stand in the slots, so nothing is lost with it, and a row done twice gives the same bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from shmload import faults
from shmload._core.filler import DONE, ERROR, VOID, WorkerRing
from shmload._core.mapping import Mapping
from shmload.batch.collate import pack_samples, registered_functions
from shmload.batch.layout import Layout
from shmload.batch.packed import PackedBatch, pack
from shmload.batch.ragged_rows import Arenas, RaggedRows
from shmload.worker.failure import Failure
from shmload.worker.iterable import IterablePass
from shmload.worker.notes import dump_note
from shmload.worker.reader import in_place_of, read_alone, read_path
from shmload.worker.sample_rng import begin_sample, end_samples
from shmload.worker.slot_memory import LOOK_AGAIN_S, Bell, SlotMemory
from shmload.worker.snapshot import Snapshots
from shmload.worker.spec import Job
from shmload.worker.threads import ReadingThreads

MISFITS_MAX = 2  # batches of a worker that may begin as rows in vain


class Body:
    """One worker's loop over its view of the ring.

    Args:
        open_memory: (path) -> mapping of a segment the trainer has made.
        source: the way through the dataset, if it is an iterable one.
        snapshots: what takes them, if the loader wants any.
        init_failure: what went wrong before the first order, if anything did: every order then fails with it.
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
        init_failure: Failure | None = None,
    ) -> None:
        self._ring = ring
        self._job = job
        self._ready, self._orders = ready, orders
        self._memory = SlotMemory(ring, ready, grants, open_memory)
        self._source = source
        self._snapshots = snapshots
        self._init_failure = init_failure
        is_default = job.collate_fn is None and job.auto_collation
        self._in_place = in_place_of(job.dataset, job.ragged) if is_default else None
        layout = None if self._in_place is None else self._in_place.layout()
        self._ragged_layout = layout if layout is not None and layout.is_ragged else None
        self._path = read_path(job.dataset, job.collate_fn is not None, job.auto_collation, job.ragged)
        self._has_ended = False  # the iterable dataset, at the claimed order
        self._kept: tuple[Any, Any] | None = None  # (key, sample) decoded to learn the layout, not to be read twice
        self._given: Any = None  # the batch sampler's own object, if it is no list of int
        self._has_getitems = self._path in ("__getitems__", "collate_fn") and bool(
            getattr(job.dataset, "__getitems__", None)
        )
        self._threads = ReadingThreads(job.num_threads) if job.num_threads > 1 else None
        self._num_misfits = 0  # batches begun as rows whose samples turned out to differ
        self._arenas = Arenas()
        self._num_foreign = 0
        self._key: Any = None  # of the sample being read, if one is
        self._row = -1

    def run(self) -> None:
        """Works until the trainer closes the ring."""
        ring = self._ring
        ring.announce()
        while not ring.is_closing:
            faults.hit("before_claim")
            if ring.claim():
                faults.hit("after_claim")
                self._work()
                continue
            ring.waiting(True)
            self._orders.wait(LOOK_AGAIN_S)
            ring.waiting(False)

    def _work(self) -> None:
        ring = self._ring
        self._num_foreign = 0
        self._key = None
        self._row = -1
        self._has_ended = False
        try:
            own = self._fill_or_end()
            if own == DONE and self._snapshots is not None:
                own = self._send_note()
        except Exception as error:
            self._report(error)
            own = ERROR
        end_samples()
        faults.hit("before_finish")
        must_ring = ring.finish(own, num_foreign=self._num_foreign)
        faults.hit("after_finish")
        if must_ring:
            faults.hit("before_post")
            self._ready.post()

    def _report(self, error: Exception) -> None:
        if self._init_failure is not None:
            failure = self._init_failure
        else:
            sample = "" if self._key is None else f"sample {self._key!r}, "
            note = f"shmload: {sample}epoch {self._ring.epoch}, batch {self._ring.step}"
            failure = Failure.of(error, f"in DataLoader worker process {self._ring.worker_id}", note)
            if self._job.tolerates_bad_samples:
                failure = failure._replace(rows=self._bad_rows())
        self._ring.write_error(failure.dumps(self._ring.text_capacity))

    # ------------------------------------------------------------ filling

    def _fill_or_end(self) -> int:
        try:
            return self._fill()
        except StopIteration:
            if self._source is None:
                raise
            self._has_ended = self._source.has_ended = True  # as torch, which takes a collate_fn's for the iterator's
            return DONE

    def _fill(self) -> int:
        if self._init_failure is not None:
            raise RuntimeError("the worker could not start")
        ring = self._ring
        keys = self._keys()
        if self._source is not None:
            return self._fill_from(self._source, keys)
        if self._ragged_layout is not None:
            return self._read_ragged(self._ragged_layout, keys)
        if ring.is_packed or self._path == "collate_fn" or not self._job.auto_collation:
            return self._fill_packed(keys, [])
        if ring.has_layout and ring.is_packed_only:
            return self._ask_repack(keys, [])
        if self._path == "read_batch_into":
            return self._read_batch_into(keys)
        if self._path == "read_into":
            return self._read_into(keys)
        return self._place(keys)

    def _keys(self) -> Any:
        """What the order asks for: the whole batch's indices (an array for `read_batch_into`), or the sampler's keys."""
        ring = self._ring
        path = ring.order_path
        if path:
            raw = bytes(memoryview(self._memory.open(path.decode()))[: ring.order_nbytes])
        else:
            raw = ring.order_bytes()
        self._given = None
        if ring.is_pickled:
            keys = self._given = pickle.loads(raw)  # written by the trainer
            return keys if type(keys) is list else list(keys)
        indices = np.frombuffer(raw, np.int64)
        return indices if self._path == "read_batch_into" else indices.tolist()

    def _sample(self, row: int, key: Any) -> Any:
        """Reads one sample, under its own randomness in seed mode."""
        self._begin(row, key)
        if self._kept is not None and self._kept[0] == (self._ring.epoch, key):
            sample, self._kept = self._kept[1], None
            return sample
        return self._job.dataset[key]

    def _begin(self, row: int, key: Any) -> None:
        self._key, self._row = key, row
        index = _index_of(key)
        self._ring.begin_row(row, index)
        job = self._job
        begin_sample(job.seed, self._ring.epoch, index, self._ring.worker_id, reseed=job.seed_samples)
        if faults.armed:
            faults.hit("mid_decode")

    def _samples(self, keys: list[Any], first: int, end: int) -> list[Any]:
        """Reads rows `first` to `end` into a list, by `__getitems__` if the dataset has it."""
        if first >= end:
            return []
        if self._has_getitems and self._job.auto_collation:
            self._begin(first, keys[first])
            self._key, self._row = None, -1
            is_whole = self._given is not None and end - first == len(keys)
            samples = self._job.dataset.__getitems__(self._given if is_whole else keys[first:end])
            return samples if type(samples) is list else list(samples)
        if self._threads is None:
            samples = [self._sample(row, keys[row]) for row in range(first, end)]
        else:
            dataset = self._job.dataset
            samples = list(self._by_threads(lambda row: dataset[keys[row]], keys, first, end))
        self._key, self._row = None, -1
        return samples

    def _by_threads(self, read: Callable[[int], Any], keys: list[Any], first: int, end: int) -> Iterator[Any]:
        """What `read` gives for each row, several at a time."""
        assert self._threads is not None
        job, epoch, worker = self._job, self._ring.epoch, self._ring.worker_id

        def read_row(row: int) -> Any:
            begin_sample(job.seed, epoch, _index_of(keys[row]), worker, reseed=False)
            try:
                return read(row)
            finally:
                end_samples()

        return self._threads.results(read_row, range(first, end), lambda row: self._begin(row, keys[row]))

    def _place(self, keys: list[Any]) -> int:
        ring = self._ring
        first, end = ring.first_row, ring.end_row
        if ring.nchunks == 1 and self._num_misfits >= MISFITS_MAX:
            return self._fill_packed(keys, [])
        reads_all = self._path == "__getitems__" or self._threads is not None
        samples = self._samples(keys, first, end) if reads_all else None
        head = self._sample(first, keys[first]) if samples is None else samples[0]
        if not ring.has_layout and not self._memory.find_layout(head):
            self._keep(keys[first], head)
            return VOID
        if ring.is_packed_only or (samples is not None and len(samples) != end - first):
            self._keep(keys[first], head)
            return self._ask_repack(keys, [head] if samples is None else samples)
        placer = self._memory.placer()
        for row in range(first, end):
            if ring.is_abandoned:
                return VOID
            if samples is not None:
                sample = samples[row - first]
            else:
                sample = head if row == first else self._sample(row, keys[row])
            if not placer.put(sample, row):
                self._num_misfits += 1
                if samples is None and ring.nchunks == 1:
                    samples = [placer.get(r) for r in range(row)] + [sample]
                return self._ask_repack(keys, samples or [])
        return DONE

    def _read_into(self, keys: list[Any]) -> int:
        ring = self._ring
        placer = self._memory.placer()
        assert self._in_place is not None
        read_into = self._in_place.read_into
        assert read_into is not None
        if self._threads is not None:
            for _ in self._by_threads(
                lambda row: read_into(keys[row], placer.out(row)), keys, ring.first_row, ring.end_row
            ):
                if ring.is_abandoned:
                    return VOID
            return DONE
        for row in range(ring.first_row, ring.end_row):
            if ring.is_abandoned:
                return VOID
            self._begin(row, keys[row])
            read_into(keys[row], placer.out(row))
        return DONE

    def _read_batch_into(self, keys: Any) -> int:
        ring = self._ring
        assert self._in_place is not None
        read_batch_into = self._in_place.read_batch_into
        assert read_batch_into is not None
        first, end = ring.first_row, ring.end_row
        self._begin(first, keys[first].item() if isinstance(keys, np.ndarray) else keys[first])
        self._key, self._row = None, -1
        read_batch_into(np.asarray(keys[first:end], np.int64), self._memory.placer().out_rows(first, end))
        return DONE

    def _read_ragged(self, layout: Layout, keys: Any) -> int:
        assert self._in_place is not None
        assert self._job.ragged is not None
        rows = RaggedRows(layout, self._job.ragged, len(keys), self._memory.room_for, self._arenas)
        if not self._in_place.read_ragged(keys, rows, partial(self._begin_ragged, keys)):
            return VOID
        return self._write(rows.finish())

    def _begin_ragged(self, keys: Any, row: int) -> bool:
        at = max(row, 0)
        self._begin(at, keys[at] if type(keys) is list else keys[at].item())
        if row < 0:  # all rows at once
            self._key, self._row = None, -1
        return not self._ring.is_abandoned

    # ------------------------------------------------------------ packed batches

    def _ask_repack(self, keys: list[Any], samples: list[Any]) -> int:
        """Fills the batch packed if it is all this worker's; else asks the trainer to order it so."""
        if self._ring.nchunks == 1:
            return self._fill_packed(keys, samples)
        self._ring.ask_repack()
        return VOID

    def _fill_packed(self, keys: list[Any], samples: list[Any]) -> int:
        """Reads what is not in `samples` yet, collates, and writes the whole batch."""
        if not self._job.auto_collation:
            return self._write(pack(self._convert(self._sample(0, keys[0]))))
        return self._write(self._packed(samples + self._samples(keys, len(samples), len(keys))))

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
        """Makes a batch of what comes next; at the end of the iterator only a note is sent."""
        ring, job = self._ring, self._job
        source.enter(ring.epoch, keys[0])
        if not job.auto_collation:
            for sample in self._up_to(source, 1):
                return self._write(pack(self._convert(sample)))
            self._has_ended = True
            return DONE
        placer, num_placed = None, 0
        samples: list[Any] = []
        for sample in self._up_to(source, len(keys)):
            if num_placed == 0 and not samples and self._path != "collate_fn":
                if not ring.has_layout and not self._memory.find_layout(sample):
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
        return self._write(self._packed(samples))

    def _up_to(self, source: IterablePass, limit: int) -> Iterator[Any]:
        for row in range(limit):
            self._begin(row, None)
            try:
                sample = source.next()
            except StopIteration:
                return
            yield sample

    def _send_note(self) -> int:
        """Tells the trainer, along with the batch, where this worker stands."""
        ring, snapshots = self._ring, self._snapshots
        assert snapshots is not None
        if not (self._has_ended or snapshots.is_due(ring.step)):
            return DONE
        snapshot = snapshots.take()
        note = dump_note(snapshot, has_ended=self._has_ended)
        if len(note) > ring.text_capacity:
            used = ring.used_nbytes or self._memory.layout.nbytes(ring.nrows)
            at = self._memory.append(0 if self._has_ended else used, snapshot)
            if at < 0:
                return VOID
            note = dump_note((at, len(snapshot)), has_ended=self._has_ended)
        ring.write_note(note)
        return DONE

    # ------------------------------------------------------------ bad samples

    def _bad_rows(self) -> tuple[int, ...]:
        """The claimed rows that cannot be read, one of which has just shown itself; none if it is the batch that failed."""
        ring = self._ring
        first, end = (0, ring.nrows) if ring.is_packed else (ring.first_row, ring.end_row)
        keys = self._keys()
        bad = [] if self._row < 0 else [self._row]
        for row in range(first if self._row < 0 else self._row + 1, end):
            try:
                self._begin(row, keys[row] if type(keys) is list else keys[row].item())
                read_alone(self._job.dataset, self._in_place, self._job.ragged, keys[row])
            except Exception:
                bad.append(row)
        return tuple(bad)

    def _convert(self, sample: Any) -> Any:
        self._ring.end_rows()  # what comes now is no sample's doing
        if self._job.collate_fn is not None:
            return self._job.collate_fn(sample)
        from torch.utils.data import default_convert

        return default_convert(sample)

    def _packed(self, samples: list[Any]) -> PackedBatch:
        self._ring.end_rows()  # as in _convert
        job = self._job
        if job.collate_fn is not None:
            return pack(job.collate_fn(samples))
        packed = pack_samples(samples, job.ragged, registered_functions())
        if packed is not None:
            return packed
        from shmload.worker.torch_side import default_collate

        return pack(default_collate(samples))

    def _keep(self, key: Any, sample: Any) -> None:
        """Keeps a sample that was read in vain, so that it need not be read twice."""
        if self._path != "__getitems__":
            self._kept = ((self._ring.epoch, key), sample)


def _index_of(key: Any) -> int:
    """The sample's index; -1 if the sampler's key is no integer."""
    return key if type(key) is int and -(1 << 63) <= key < 1 << 63 else -1
