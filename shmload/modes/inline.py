"""Reading in the trainer itself (`num_workers=0`): the same samples, randomness and batches, without a ring."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmload._core.trainer import Order
from shmload.batch.collate import RowOut, pack_samples, private_rows, private_tensors, registered_functions
from shmload.batch.deliver import PrivateBatch, structure, unpack
from shmload.batch.ragged import Arenas, Ragged, RaggedRows
from shmload.engine.orders import NOTHING, BadSamples
from shmload.worker.reader import no_room
from shmload.worker.sample_rng import begin_many, begin_sample, drew_for_many, end_samples, kept_generators
from shmload.worker.spec import Job

if TYPE_CHECKING:
    from shmload.engine.builder import LoaderConfig


class InlineReader:
    """Reads whole batches of a dataset into private memory.

    Args:
        bad_samples: what is done about samples that cannot be read.
    """

    def __init__(self, job: Job, bad_samples: BadSamples) -> None:
        self._job = job
        self._bad_samples = bad_samples
        self._in_place = job.plan.in_place(job.dataset)
        self._reads_many = job.plan.has_getitems  # until its samples draw random numbers
        self._arenas = Arenas()
        self._row = -1

    def read(self, order: Order) -> Any:
        """The batch of an order; NOTHING if every sample of it is skipped. Seed mode leaves the trainer's generators alone."""
        try:
            if self._job.seed is None or not self._job.seed_samples:
                return self._read_good(order)
            with kept_generators():
                return self._read_good(order)
        finally:
            end_samples()

    def _read_good(self, order: Order) -> Any:
        while order.nrows:
            indices = order.indices
            keys = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
            self._row = -1
            try:
                return self._read(keys, order.epoch)
            except Exception as error:
                bad = self._bad_rows(keys, order.epoch) if self._bad_samples.are_tolerated else ()
                if not bad:
                    raise
                order.indices = self._bad_samples.replaced(order, bad, partial(_itself, error))
        return NOTHING

    def _bad_rows(self, keys: list[Any], epoch: int) -> list[int]:
        """The rows that cannot be read, one of which has just shown itself; none if it is the batch that failed."""
        bad = [] if self._row < 0 else [self._row]
        for row in range(self._row + 1, len(keys)):
            try:
                self._begin(row, keys[row], epoch)
                self._job.plan.try_sample(self._job.dataset, self._in_place, keys[row])
            except Exception:
                bad.append(row)
        return bad

    def _read(self, keys: list[Any], epoch: int) -> Any:
        job = self._job
        if self._in_place is not None and self._in_place.takes(keys):
            return self._read_in_place(keys, epoch)
        if not job.auto_collation:
            self._begin(0, keys[0], epoch)
            sample = job.dataset[keys[0]]
            self._row = -1
            return (job.collate_fn or torch.utils.data.default_convert)(sample)
        if self._reads_many:
            self._begin(-1, keys[0], epoch)
            begin_many(can_repeat=True, compares=job.seed_samples)
            samples = job.dataset.__getitems__(keys)
            self._reads_many = not drew_for_many()  # what a sample draws is keyed by the sample
        if not self._reads_many:
            samples = [self._sample(row, key, epoch) for row, key in enumerate(keys)]
            self._row = -1
        return (job.collate_fn or partial(collated, ragged=job.plan.ragged))(samples)

    def _sample(self, row: int, key: Any, epoch: int) -> Any:
        self._begin(row, key, epoch)
        return self._job.plan.sample(self._job.dataset, key)

    def _begin(self, row: int, key: Any, epoch: int) -> None:
        self._row = row
        job = self._job
        begin_sample(job.seed, epoch, key if type(key) is int else -1, 0, reseed=job.seed_samples)

    def _begin_ragged(self, keys: list[Any], row: int, epoch: int) -> bool:
        self._begin(row, keys[max(row, 0)], epoch)
        if row < 0:
            begin_many(can_repeat=False)
        return True

    def _read_in_place(self, keys: list[Any], epoch: int) -> Any:
        assert self._in_place is not None
        plan = self._job.plan
        layout = plan.layout
        assert layout is not None
        if plan.is_whole:
            assert plan.ragged is not None
            ragged_rows = RaggedRows(layout, plan.ragged, len(keys), no_room, self._arenas)
            self._in_place.read_ragged(keys, ragged_rows, lambda row: self._begin_ragged(keys, row, epoch))
            return unpack(PrivateBatch(ragged_rows.finish()))
        tensors = private_tensors(layout, len(keys))
        rows = private_rows(layout, len(keys), tensors)
        if self._in_place.read_batch_into is not None:
            self._begin(-1, keys[0], epoch)
            begin_many(can_repeat=False)
            self._in_place.read_batch_into(np.asarray(keys, np.int64), RowOut(rows, slice(0, len(keys))))
        else:
            assert self._in_place.read_into is not None
            for row, key in enumerate(keys):
                self._begin(row, key, epoch)
                self._in_place.read_into(key, RowOut(rows, row))
        return structure(layout.tree, tensors)


def collated(samples: list[Any], ragged: Ragged | None) -> Any:
    """The batch of some samples, in private memory: torch's default collate, and with a rule what that does not take."""
    packed = None if ragged is None else pack_samples(samples, ragged, registered_functions())
    return torch.utils.data.default_collate(samples) if packed is None else unpack(PrivateBatch(packed))


def _itself(error: BaseException) -> BaseException:
    return error


def next_of_dataset(config: LoaderConfig, order: Order, row: int) -> int:
    """The index that takes a bad sample's place where a sampler orders: the dataset's next.

    Raises:
        TypeError: the sampler gives keys.
    """
    ordered = order.indices[row]
    if not isinstance(ordered, int | np.integer):
        raise TypeError(f'on_error="substitute" needs integer indices: the sampler gave {ordered!r}. Use "skip"')
    return (int(ordered) + 1) % len(config.dataset)
