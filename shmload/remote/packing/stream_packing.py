"""The packing of an iterable of samples, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import Any

from shmload.remote.object_stream import ObjectStream, pass_over
from shmload.remote.packing.image_members import NotPixelsError
from shmload.remote.packing.pack_options import PackOptions
from shmload.remote.packing.shard_packing import BATCH_NBYTES, BATCH_SIZE_MAX, NUM_PROBED, Packing, PackProgress
from shmload.remote.packing.stream_encoding import EncodedMembers, StreamEncoder
from shmload.storage.store import Store


class StreamPacking(Packing):
    """The packing of an iterable in its order. This process iterates over it, and workers encode the samples.

    An interrupted packing can be continued if the iterable yields the same samples again; those that are in the store are skipped.

    Args:
        samples: the iterable.
        store, options, on_progress: as for `Packing`.
    """

    def __init__(
        self, samples: Iterable[Any], store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None
    ) -> None:
        if options.part[1] > 1:
            raise ValueError(
                f"part={options.part} is of a dataset with a length, and where a part of an iterable begins is not known. Pack a "
                "map-style dataset, or what each machine has with append=True, one after the other"
            )
        super().__init__(store, options, on_progress, None)
        self._iterable, source = samples, _numbered(samples)
        encoder, first = self._first_encoded(source)
        if not first:
            raise ValueError("an iterable of at least 1 sample is needed; this one is empty: check what it reads")
        self._stream = chain(enumerate(members for _, members in first), source)
        self._choose(self._digest([record for record, _ in first], None, encoder.float_images))
        self._encoder = replace(encoder, coding=self._coding(), first=self._first)

    def _first_encoded(self, source: Iterator[tuple[int, Any]]) -> tuple[StreamEncoder, list[tuple[bytes, EncodedMembers]]]:
        """Return the encoder, and the first samples with their records. They decide how images of floats are stored."""
        options = self._options
        encoders = [StreamEncoder(options.coding, options.quality, options.serializers, 0, each) for each in self._float_images()]
        found: list[list[tuple[bytes, EncodedMembers]]] = [[] for _ in encoders]
        for number, sample in islice(source, NUM_PROBED):  # encoded at once, because the iterable may reuse the object
            for encoder, encoded in list(zip(encoders, found, strict=True)):
                try:
                    encoded.append((encoder.record(number, sample), encoder.encoded(sample)))
                except NotPixelsError:
                    if len(encoders) == 1:
                        raise
                    del encoders[0], found[0]
        return encoders[0], found[0]

    def _batches(self, at: int) -> Iterator[tuple[memoryview, list[int]]]:
        records: list[bytes] = []
        nbytes = 0
        stream: Iterator[tuple[int, Any]] = self._stream
        if at and type(self._iterable) is ObjectStream:  # it can begin after the samples that are in the store
            stream = _numbered(self._iterable.starting_at(at), at)
        else:
            pass_over(stream, at, "this iterable ended")
        for record in self._encoder.all(stream, self._num_workers(None), self._options.multiprocessing_context):
            records.append(record)
            nbytes += len(records[-1])
            if nbytes >= BATCH_NBYTES or len(records) == BATCH_SIZE_MAX:
                yield memoryview(b"".join(records)), list(accumulate(map(len, records)))
                records, nbytes = [], 0
        if records:
            yield memoryview(b"".join(records)), list(accumulate(map(len, records)))


def _numbered(samples: Iterable[Any], first: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield the samples with their numbers. An exception of the iterable gets a note with the number."""
    source, number = iter(samples), first
    while True:
        try:
            sample = next(source)
        except StopIteration:
            return
        except Exception as error:
            error.add_note(f"reading sample {number} of the iterable")
            raise
        yield number, sample
        number += 1
