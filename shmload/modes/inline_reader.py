"""Read batches in the trainer's process (`num_workers=0`).

Samples, randomness and batches are the same as with workers, but there is no ring.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from shmload._core.trainer import Order
from shmload._core.twister import index_of
from shmload.batch.batch_memory import PrivateBatch
from shmload.batch.layout import Layout, structure
from shmload.batch.ragged_rows import Arenas, RaggedRows
from shmload.batch.row_placer import RowOut, private_rows, private_tensors
from shmload.batch.unpacking import unpack
from shmload.engine.bad_samples import BadSamples
from shmload.engine.outcome import NOTHING
from shmload.metrics import irregular_files
from shmload.modes.default_collate import collated
from shmload.worker.job import Job
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.read_plan import no_room
from shmload.worker.sample_reader import can_be_joined, joined
from shmload.worker.sample_rng import (
    Sample,
    begin_many,
    drew_between_samples,
    generators_kept,
    global_generators,
    key_in_pass,
    reading_of,
)


class InlineReader:
    """A reader of whole batches of a dataset into private memory.

    Args:
        job: how the dataset is read.
        bad_samples: the policy for samples that cannot be read.

    Attributes:
        base_seed: seed of the pass in torch mode.
        batch_of: step -> the number of its batch within the epoch, for messages.
    """

    def __init__(self, job: Job, bad_samples: BadSamples) -> None:
        self._job, self._bad_samples = job, bad_samples
        self._in_place = job.plan.in_place(job.dataset, checks_all=job.checks_all)
        self._reads_many = job.plan.has_getitems  # becomes False once its samples draw random numbers
        self._decodes_many = True  # for `read_batch_into`; becomes False once its samples draw random numbers
        self._own = job.own_generators()
        self._arenas = Arenas()
        self._generators = global_generators()
        self.base_seed = 0
        self.batch_of: Callable[[int], int] = int
        self._row, self._step = -1, 0
        self._has_read_all = False  # whether all samples of the batch have been read, and only the rest can fail
        self.begun = object()  # replaced for each sample or group of samples; `sample_info` and `sample_rng` use it
        self._key: Any = None
        self._epoch = 0

    def sample(self) -> Sample:
        """Return the sample that was begun last."""
        return self._job.seed, self._epoch, index_of(self._key), 0

    def own_key(self) -> tuple[int, int]:
        """Return the key of its generator in torch mode."""
        return key_in_pass(self.base_seed, self._step, self._row)

    def read(self, order: Order) -> Any:
        """Return the batch of an order, or NOTHING if all its samples are skipped.

        If samples are reseeded (`seed_samples`), the trainer's generators are unchanged afterward.
        """
        self._generators = global_generators()  # of the thread that reads
        self._step = order.step
        num_irregular = irregular_files.value
        try:
            with reading_of(self):
                if self._job.seed is None or not self._job.seed_samples:
                    return self._read_good(order)
                with generators_kept():
                    return self._read_good(order)
        finally:
            self._bad_samples.num_irregular += irregular_files.value - num_irregular

    def _read_good(self, order: Order) -> Any:
        """Return the batch of an order without its bad samples, if they are tolerated; NOTHING if none is left."""
        is_empty = order.nrows == 0  # a batch sampler may yield an empty list
        while order.nrows or is_empty:
            indices = order.indices
            if isinstance(indices, np.ndarray) and not order.is_samplers_object:
                keys = indices.tolist()
            else:
                keys = list(indices) if hasattr(indices, "__len__") else [indices]
            self._row, self._has_read_all = -1, False
            try:
                return self._read(keys, order)
            except Exception as error:
                tolerates = self._bad_samples.are_tolerated
                row = self._row if self._row >= 0 or tolerates else self._first_bad_row(keys, order.epoch)
                error.add_note(self._job.note(keys[row] if row >= 0 else None, order.epoch, self.batch_of(order.step), keys))
                bad = self._bad_rows(keys, order.epoch) if tolerates else ()
                if not bad:
                    raise
                order.indices = self._bad_samples.replaced(order, bad, partial(lambda raised: raised, error))
        return NOTHING

    def _first_bad_row(self, keys: list[Any], epoch: int) -> int:
        """Return the first row that cannot be read, after several that were read at once have failed; -1 if it is unknown.

        It is not searched for in shmload's own datasets, whose errors name what failed and may take long to occur.
        """
        if self._in_place is None or self._in_place.draws_nothing:
            return -1
        return next(iter(self._bad_rows(keys, epoch, most=1)), -1)

    def _bad_rows(self, keys: list[Any], epoch: int, most: int | None = None) -> list[int]:
        """Return the rows that cannot be read, from the one that just failed on; empty if the batch as a whole failed.

        With `most`, stop after so many. Generators, the dataset's own too, stay as the failure has left them. If all rows had been
        read, nothing is read again.
        """
        if self._has_read_all:
            return []
        bad = [] if self._row < 0 else [self._row]
        with generators_kept(), OwnGenerators(self._job.dataset).kept():
            for row in range(self._row + 1, len(keys)):
                if most is not None and len(bad) >= most:
                    break
                try:
                    self._begin(row, keys, epoch)
                    self._job.plan.try_sample(self._job.dataset, self._in_place, keys[row])
                except Exception:
                    bad.append(row)
        return bad

    def _read(self, keys: list[Any], order: Order) -> Any:
        """Return the batch of the samples, in the way that the plan provides."""
        job, epoch = self._job, order.epoch
        if self._in_place is not None and self._in_place.takes(keys):
            return self._read_in_place(keys, epoch)
        if not job.auto_collation:
            self._begin(0, keys, epoch)
            sample = job.dataset[keys[0]]
            self._row, self._has_read_all = -1, True
            return (job.collate_fn or torch.utils.data.default_convert)(sample)
        samples = self._read_samples(keys, order)
        self._has_read_all = True
        if job.collate_fn is not None:
            return job.collate_fn(samples)
        on_uneven = partial(self._bad_samples.report_uneven, order)
        return collated(samples, job.plan.ragged, keys=lambda: keys, on_uneven=on_uneven)

    def _read_samples(self, keys: list[Any], order: Order) -> Any:
        """Return the samples as a list, or what the dataset's `__getitems__` returns for them."""
        job, given = self._job, order.indices
        if isinstance(given, list | np.ndarray) and not order.is_samplers_object:
            given = keys
        if not keys:
            return job.dataset.__getitems__(given) if job.plan.has_getitems else []
        if self._reads_many:
            self._begin(-1, keys, order.epoch)
            begin_many(can_repeat=True, compares=job.seed_samples, own=self._own)
            samples = job.dataset.__getitems__(given)
            if not (drew_between_samples() and can_be_joined(samples)):
                return samples
            self._reads_many = False  # random numbers are keyed by the sample
        return self._read_one_by_one(keys, given, order.epoch)

    def _read_one_by_one(self, keys: list[Any], given: Any, epoch: int) -> Any:
        """Return the samples as a list, or joined from the results of the dataset's `__getitems__` for one key at a time.

        If such results cannot be joined, return the one for all keys, `given` by the batch sampler.
        """
        read, begin, plan, dataset = [], self._begin, self._job.plan, self._job.dataset
        for row, key in enumerate(keys):
            begin(row, keys, epoch)
            read.append(plan.read(dataset, key))
        self._row = -1
        if not plan.has_getitems:
            return read
        if (samples := joined(read)) is not None:
            return samples
        begin(-1, keys, epoch)
        return dataset.__getitems__(given)

    def _begin(self, row: int, keys: list[Any], epoch: int) -> None:
        """Set the randomness for the sample of a row, or, if `row` is -1, for the first of several that are read at once."""
        self._row, self._epoch, job = row, epoch, self._job
        key = self._key = keys[row if row > 0 else 0]
        self.begun = object()
        if job.seed_samples and job.seed is not None:
            self._generators.begin(job.seed, epoch, index_of(key), keys, row)
            if self._own is not None:
                self._own.begin(job.seed, epoch, index_of(key))

    def _begin_all(self, keys: list[Any], epoch: int) -> None:
        """Set the randomness for samples that are decoded at once, and watch whether they draw random numbers of no sample."""
        assert self._in_place is not None
        self._begin(-1, keys, epoch)
        compares = self._job.seed_samples and not self._in_place.draws_nothing and len(keys) > 1
        begin_many(can_repeat=False, compares=compares, own=self._own)

    def _decoded_without_draws(self) -> bool:
        """Return whether samples that were decoded at once have drawn no random numbers; else they are decoded one by one."""
        self._decodes_many = not drew_between_samples()
        return self._decodes_many

    def _begin_ragged(self, keys: list[Any], row: int, epoch: int) -> bool:
        if row < 0:
            self._begin_all(keys, epoch)
        else:
            self._begin(row, keys, epoch)
        return True

    def _read_in_place(self, keys: list[Any], epoch: int) -> Any:
        """Return the batch of samples that the dataset decodes into private memory."""
        assert self._in_place is not None
        plan, read_batch_into, read_into = self._job.plan, self._in_place.read_batch_into, self._in_place.read_into
        layout = plan.layout
        assert layout is not None
        if plan.is_whole:
            return self._read_ragged(keys, layout, epoch)
        tensors = private_tensors(layout, len(keys))
        rows = private_rows(layout, len(keys), tensors)
        if read_batch_into is None:
            assert read_into is not None
            for row, key in enumerate(keys):
                self._begin(row, keys, epoch)
                read_into(key, RowOut(rows, row))
            return structure(layout.tree, tensors)
        if self._decodes_many:
            self._begin_all(keys, epoch)
            read_batch_into(np.asarray(keys, np.int64), RowOut(rows, slice(0, len(keys))))
            if self._decoded_without_draws():
                return structure(layout.tree, tensors)
        for row, key in enumerate(keys):
            self._begin(row, keys, epoch)
            begin_many(can_repeat=False)
            read_batch_into(np.asarray([key], np.int64), RowOut(rows, slice(row, row + 1)))
        return structure(layout.tree, tensors)

    def _read_ragged(self, keys: list[Any], layout: Layout, epoch: int) -> Any:
        """Return the batch of samples with ragged fields that the dataset decodes into private memory."""
        assert self._in_place is not None
        assert self._job.plan.ragged is not None
        at_once = self._in_place.read_batch_into is not None and self._decodes_many
        for is_one_by_one in (False, True) if at_once else (True,):
            rows = RaggedRows(layout, self._job.plan.ragged, len(keys), no_room, self._arenas)
            self._in_place.read_ragged(keys, rows, lambda row: self._begin_ragged(keys, row, epoch), is_suspect=is_one_by_one)
            if is_one_by_one or self._decoded_without_draws():
                break
        self._row, self._has_read_all = -1, True
        return unpack(PrivateBatch(rows.finish()))
