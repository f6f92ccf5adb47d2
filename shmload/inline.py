"""Reading in the trainer itself (`num_workers=0`): the same samples, randomness and batches, without a ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmload.batch.deliver import structure
from shmload.batch.place import RowOut
from shmload.worker.reader import in_place_of
from shmload.worker.sample_rng import begin_sample, end_samples, kept_generators
from shmload.worker.spec import Job


class InlineReader:
    """Reads whole batches of a dataset into private memory."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._in_place = in_place_of(job.dataset) if job.collate_fn is None and job.auto_collation else None

    def read(self, keys: Any, epoch: int) -> Any:
        """The batch of these samples. In seed mode the trainer's global generators are as before afterwards."""
        try:
            if self._job.seed is None or not self._job.seed_samples:
                return self._read(keys, epoch)
            with kept_generators():
                return self._read(keys, epoch)
        finally:
            end_samples()

    def _read(self, keys: Any, epoch: int) -> Any:
        job = self._job
        keys = keys.tolist() if isinstance(keys, np.ndarray) else list(keys)
        if self._in_place is not None:
            return self._read_in_place(keys, epoch)
        if not job.auto_collation:
            self._begin(keys[0], epoch)
            sample = job.dataset[keys[0]]
            return (job.collate_fn or torch.utils.data.default_convert)(sample)
        getitems = getattr(job.dataset, "__getitems__", None)
        if getitems:
            self._begin(keys[0], epoch)
            samples = getitems(keys)
        else:
            samples = [self._sample(key, epoch) for key in keys]
        return (job.collate_fn or torch.utils.data.default_collate)(samples)

    def _sample(self, key: Any, epoch: int) -> Any:
        self._begin(key, epoch)
        return self._job.dataset[key]

    def _begin(self, key: Any, epoch: int) -> None:
        job = self._job
        begin_sample(job.seed, epoch, key if type(key) is int else -1, 0, reseed=job.seed_samples)

    def _read_in_place(self, keys: list[Any], epoch: int) -> Any:
        assert self._in_place is not None
        layout = self._in_place.layout()
        make = torch.zeros if layout.zero_fill else torch.empty
        tensors = [make((len(keys), *f.shape), dtype=getattr(torch, f.dtype)) for f in layout.fields]
        rows = {
            f.name: t.numpy() if f.element.numpy is not None else t for f, t in zip(layout.fields, tensors, strict=True)
        }
        if self._in_place.read_batch_into is not None:
            self._begin(keys[0], epoch)
            self._in_place.read_batch_into(np.asarray(keys, np.int64), RowOut(rows, slice(0, len(keys))))
        else:
            assert self._in_place.read_into is not None
            for row, key in enumerate(keys):
                self._begin(key, epoch)
                self._in_place.read_into(key, RowOut(rows, row))
        return structure(layout.tree, tensors)
