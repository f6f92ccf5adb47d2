"""The packing of a map-style dataset. A loader encodes the samples in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from shmload.loader import ShmLoader
from shmload.remote.packing.encoded_samples import RECORD, EncodedSamples, PackSource, source_of
from shmload.remote.packing.image_members import FloatImages, NotPixelsError
from shmload.remote.packing.pack_options import PackOptions
from shmload.remote.packing.shard_packing import BATCH_NBYTES, BATCH_SIZE_MAX, NUM_PROBED, Packing, PackProgress
from shmload.storage.store import Store
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import generators_kept


class DatasetPacking(Packing):
    """The packing of a map-style dataset, in a random order.

    Args:
        dataset: the dataset.
        store, options, on_progress: as for `Packing`.
    """

    def __init__(
        self, dataset: Any, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None
    ) -> None:
        source = source_of(dataset, options.quality, options.serializers)
        if not len(source):
            raise ValueError("a dataset of at least 1 sample is needed; this one is empty: check the path it reads")
        super().__init__(store, options, on_progress, len(source))
        self._samples = EncodedSamples(source, seed=options.seed, coding=options.coding)
        probed = sorted({number * (len(source) - 1) // (NUM_PROBED - 1) for number in range(NUM_PROBED)})
        probes = self._probes(source, probed)
        mean = sum(map(len, probes)) // len(probes)
        self._batch_size = min(max(BATCH_NBYTES // mean, 1), BATCH_SIZE_MAX)
        self._choose(self._digest(probes, source, self._samples.float_images))
        self._samples.begin(self._coding(), self._first)

    def _probes(self, source: PackSource, indices: Sequence[int]) -> list[bytes]:
        """Return the records of some samples. They decide how images of floats are stored."""
        *preferred, last = self._float_images()
        with generators_kept():
            own = OwnGenerators(source)

            def records(float_images: FloatImages) -> list[bytes]:
                self._samples.float_images = float_images
                return [b"".join(self._samples.pieces(index, own)) for index in indices]

            for each in preferred:
                with suppress(NotPixelsError):
                    return records(each)
            return records(last)

    def _batches(self, at: int) -> Iterator[tuple[memoryview, list[int]]]:
        stop = self._span[1] or 0
        num_workers = self._num_workers(-(-(stop - at) // self._batch_size))
        loader: ShmLoader[Any] = ShmLoader(
            self._samples,
            self._batch_size,
            sampler=range(at, stop),
            num_workers=num_workers,
            multiprocessing_context=self._options.multiprocessing_context if num_workers else None,
            seed=0,
            seed_samples=False,
            ragged="jagged",
        )
        with loader:
            for batch in loader:
                values, offsets = batch[RECORD]
                yield memoryview(values.numpy()), offsets[1:].tolist()
