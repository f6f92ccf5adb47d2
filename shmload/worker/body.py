"""What a worker does: claim rows of an ordered slot, decode them into place, finish; again, until the trainer closes.

It keeps no position. Its orders stand in the slots, so nothing is lost with it, and a row done twice gives the same bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from shmload import faults
from shmload._core.filler import DONE, ERROR, VOID, WorkerRing
from shmload._core.mapping import Mapping
from shmload.batch.layout import Layout, NotFixedError, layout_of_sample
from shmload.batch.packed import pack
from shmload.batch.place import RowPlacer
from shmload.errors import SampleError
from shmload.worker.failure import Failure
from shmload.worker.reader import in_place_of, read_path
from shmload.worker.sample_rng import begin_sample, end_samples
from shmload.worker.spec import Job

LOOK_AGAIN_S = 0.1  # a bell may be lost with a killed process; then the next look comes after this


class Bell(Protocol):
    """The part of a doorbell that a worker uses."""

    def post(self) -> None:
        """Rings."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for a ring."""


class Body:
    """One worker's loop over its view of the ring.

    Args:
        open_memory: (path, nbytes) -> mapping of a segment the trainer has made.
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
        init_failure: Failure | None = None,
    ) -> None:
        self._ring = ring
        self._job = job
        self._ready, self._orders, self._grants = ready, orders, grants
        self._open_memory = open_memory
        self._init_failure = init_failure
        self._in_place = in_place_of(job.dataset) if job.collate_fn is None and job.auto_collation else None
        self._path = read_path(job.dataset, job.collate_fn is not None, job.auto_collation)
        self._layout: Layout | None = None
        self._segments: dict[str, Mapping] = {}
        self._used: dict[int, str] = {}  # slot -> its segment, as this worker last saw it
        self._placers: dict[tuple[int, int, int], RowPlacer] = {}
        self._kept: tuple[Any, Any] | None = None  # (key, sample) decoded to learn the layout, not to be read twice
        self._num_foreign = 0
        self._key: Any = None

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
        try:
            own = self._fill()
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
        self._ring.write_error(failure.dumps(self._ring.text_capacity))

    # ------------------------------------------------------------ filling

    def _fill(self) -> int:
        if self._init_failure is not None:
            raise RuntimeError("the worker could not start")
        ring = self._ring
        keys = self._keys()
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
            raw = bytes(memoryview(self._open_memory(path.decode()))[: ring.order_nbytes])
        else:
            raw = ring.order_bytes()
        if ring.is_pickled:
            return pickle.loads(raw)  # written by the trainer
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
        self._key = key
        index = key if type(key) is int else -1
        self._ring.begin_row(row, index)
        job = self._job
        begin_sample(job.seed, self._ring.epoch, index, self._ring.worker_id, reseed=job.seed_samples)
        if faults.armed:
            faults.hit("mid_decode")

    def _samples(self, keys: list[Any], first: int, end: int) -> list[Any]:
        """Reads rows `first` to `end` into a list, by `__getitems__` if the dataset has it."""
        if first == end:
            return []
        if self._path == "__getitems__":
            self._begin(first, keys[first])
            self._key = None
            return list(self._job.dataset.__getitems__(keys[first:end]))
        return [self._sample(row, keys[row]) for row in range(first, end)]

    def _place(self, keys: list[Any]) -> int:
        ring = self._ring
        first, end = ring.first_row, ring.end_row
        samples = self._samples(keys, first, end) if self._path == "__getitems__" else None
        head = self._sample(first, keys[first]) if samples is None else samples[0]
        if not ring.has_layout and not self._find_layout(head):
            self._keep(keys[first], head)
            return VOID
        if ring.is_packed_only or (samples is not None and len(samples) != end - first):
            self._keep(keys[first], head)
            return self._ask_repack(keys, [head] if samples is None else samples)
        placer = self._placer()
        for row in range(first, end):
            if ring.is_abandoned:
                return VOID
            if samples is not None:
                sample = samples[row - first]
            else:
                sample = head if row == first else self._sample(row, keys[row])
            if not placer.put(sample, row):
                if samples is None and ring.nchunks == 1:
                    samples = [placer.get(r) for r in range(row)] + [sample]
                return self._ask_repack(keys, samples or [])
        return DONE

    def _read_into(self, keys: list[Any]) -> int:
        ring = self._ring
        placer = self._placer()
        assert self._in_place is not None
        read_into = self._in_place.read_into
        assert read_into is not None
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
        self._key = None
        read_batch_into(np.asarray(keys[first:end], np.int64), self._placer().out_rows(first, end))
        return DONE

    # ------------------------------------------------------------ packed batches

    def _ask_repack(self, keys: list[Any], samples: list[Any]) -> int:
        """Fills the batch packed if it is all this worker's; else asks the trainer to order it so."""
        if self._ring.nchunks == 1:
            return self._fill_packed(keys, samples)
        self._ring.ask_repack()
        return VOID

    def _fill_packed(self, keys: list[Any], samples: list[Any]) -> int:
        """Reads what is not in `samples` yet, collates, and writes the whole batch."""
        ring, job = self._ring, self._job
        if not job.auto_collation:
            batch = self._convert(self._sample(0, keys[0]))
        else:
            samples = samples + self._samples(keys, len(samples), len(keys))
            batch = self._collate(samples)
        packed = pack(batch)
        del batch, samples
        self._num_foreign = packed.num_foreign
        if ring.payload[3] < packed.nbytes and not self._grow(packed.nbytes):
            return VOID
        _, path, offset, _ = ring.payload
        packed.write(self._memory(path), offset)
        ring.set_used(packed.nbytes)
        return DONE

    def _convert(self, sample: Any) -> Any:
        if self._job.collate_fn is not None:
            return self._job.collate_fn(sample)
        from torch.utils.data import default_convert

        return default_convert(sample)

    def _collate(self, samples: list[Any]) -> Any:
        if self._job.collate_fn is not None:
            return self._job.collate_fn(samples)
        from shmload.worker.torch_side import default_collate

        return default_collate(samples)

    def _grow(self, nbytes: int) -> bool:
        """Waits for a payload of that size; False if nobody wants the batch any more."""
        ring = self._ring
        ring.need(nbytes)
        self._ready.post()
        faults.hit("waiting_grant")
        while not ring.is_granted:
            if ring.is_closing or ring.is_abandoned:
                return False
            self._grants.wait(LOOK_AGAIN_S)
        if ring.payload[3] < nbytes:
            raise SampleError(
                f"a packed batch of {nbytes} bytes does not fit its slot of {ring.payload[3]}, and the ring may not grow: "
                "raise ring_bytes, or make the batch smaller"
            )
        return True

    # ------------------------------------------------------------ layout and memory

    def _keep(self, key: Any, sample: Any) -> None:
        """Keeps a sample that was read in vain, so that it need not be read twice."""
        if self._path != "__getitems__":
            self._kept = ((self._ring.epoch, key), sample)

    def _find_layout(self, sample: Any) -> bool:
        """Settles where fields lie from the first sample this worker has read; False if nobody wants the batch any more."""
        ring = self._ring
        try:
            text = layout_of_sample(sample).dumps()
        except (NotFixedError, pickle.PicklingError, AttributeError):
            text = b""
        if len(text) > ring.layout_capacity:
            text = b""
        faults.hit("before_layout")
        while not ring.has_layout:
            if ring.is_closing or ring.is_abandoned:
                return False
            if ring.ask_layout():  # again each time: the worker that asked first may have died over it
                faults.hit("while_asking_layout")
                ring.propose_layout(text)
                self._ready.post()
            faults.hit("waiting_layout")
            self._grants.wait(LOOK_AGAIN_S)
        return True

    def _placer(self) -> RowPlacer:
        """The placer over the claimed slot."""
        ring = self._ring
        key = (ring.slot, ring.payload_version, ring.nrows)
        placer = self._placers.get(key)
        if placer is None:
            if self._layout is None:
                self._layout = Layout.loads(ring.layout_text)
            _, path, offset, nbytes = ring.payload
            needed = self._layout.nbytes(ring.nrows)
            if needed > nbytes:
                raise SampleError(f"a batch of {ring.nrows} rows needs {needed} bytes, its slot has {nbytes}")
            stale = [k for k in self._placers if k[0] == ring.slot and k[1] != ring.payload_version]
            for k in stale:
                del self._placers[k]
            placer = self._placers[key] = RowPlacer(self._layout, self._memory(path), offset, ring.nrows)
        return placer

    def _memory(self, path: bytes) -> Mapping:
        """The claimed slot's segment, mapped. One that no slot uses any more is let go: it may be large, and is gone for others."""
        name = path.decode()
        self._used[self._ring.slot] = name
        memory = self._segments.get(name)
        if memory is None:
            memory = self._segments[name] = self._open_memory(name)
            for stale in self._segments.keys() - set(self._used.values()):
                del self._segments[stale]
        return memory
