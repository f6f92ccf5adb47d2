"""upload_cv_dataset: pack any dataset of images and labels into shards in a store.

A loader encodes the samples in worker processes, and this process writes the batches to shards. The order of samples is cut into
shards while it is packed, so the beginning of a shard depends on the sizes of all samples before it. A packing that continues
therefore keeps the complete shards at the beginning of the order and packs the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice
from typing import Any, Literal

from shmload import faults
from shmload.formats.compression import zstd_pieces
from shmload.formats.encryption import SampleCipher
from shmload.formats.tar.member_compression import ZSTD_LEVEL
from shmload.formats.tar.writer import archive_nbytes, member_name
from shmload.introspect.tables import is_table
from shmload.loader import ShmLoader
from shmload.remote.manifest import Manifest
from shmload.remote.object_stream import ObjectStream, pass_over
from shmload.remote.packing.encoded_samples import RECORD, EncodedSamples, Files, MemberCoding, PackedParts, PackSource, source_of
from shmload.remote.packing.generation import Generation, manifest_of
from shmload.remote.packing.image_members import FloatImages, NotPixelsError
from shmload.remote.packing.members import Serializers
from shmload.remote.packing.pack_part import MOST_PARTS, PackPart
from shmload.remote.packing.shard_file import ShardFile
from shmload.remote.packing.shard_record import ShardRecord
from shmload.remote.packing.shard_sender import NUM_THREADS, ShardSender
from shmload.remote.packing.spool import Spool
from shmload.remote.packing.stream_encoding import EncodedMembers, StreamEncoder
from shmload.storage.client import client_of
from shmload.storage.open_store import open_store
from shmload.storage.store import Store
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import generators_kept

logger = logging.getLogger("shmload")

_PICTURES = frozenset(("jpg", "png"))  # extensions of float images that are stored as pictures
VERSION = 1  # of the encoding of samples; part of the generation's name
NUM_PROBED = 8  # samples that distinguish one dataset from another
_BATCH_NBYTES = 4 << 20
_BATCH_SIZE_MAX = 256


Compress = Literal["samples", "shards"] | None


@dataclass(frozen=True)
class PackOptions:
    """Options for packing a dataset.

    Attributes:
        maxsize, maxcount: greatest size of a shard's tar file in bytes, before compression, and its greatest number of samples.
        workers: processes that encode; 0 encodes in this process.
        seed: seed of the order and of the dataset's random numbers.
        quality: JPEG quality for images that are not encoded yet. If None, they become PNG.
        restart_markers: add restart markers to JPEG files, without loss.
        compress: "samples" or "shards" compresses with zstd; None does not compress.
        compression_level: zstd level, 1 to 22.
        cipher: encrypts samples; None does not encrypt.
        append: keep the existing shards, and add these after them as a new generation.
        part: the part of the dataset that this machine packs: (number, count), counted from 1.
        serializers: the user's: type -> (extension, function that converts a value to bytes).
        multiprocessing_context: start method of the workers.
        spool_folder: folder for shards until they are sent. If None, in memory, or in the system's temporary folder if memory is
            short.
    """

    maxsize: int
    maxcount: int
    workers: int
    seed: int
    quality: int | None = None
    restart_markers: bool = False
    multiprocessing_context: Any = None
    spool_folder: str | None = None
    compress: Compress = None
    compression_level: int = ZSTD_LEVEL
    cipher: SampleCipher | None = None
    serializers: Serializers = field(default_factory=dict)
    append: bool = False
    part: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if self.maxsize < archive_nbytes(0) or self.maxcount < 1 or self.workers < 0:
            raise ValueError(
                f"maxsize is at least {archive_nbytes(0)} bytes, maxcount 1 and workers 0; got {self.maxsize}, {self.maxcount} and "
                f"{self.workers}"
            )
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ValueError(f"quality must be from 1 to 100, or None for lossless, got {self.quality}")
        if self.compress not in (None, "samples", "shards") or not 1 <= self.compression_level <= 22:
            raise ValueError(
                'compress is "samples", "shards" or None, and compression_level from 1 to 22; got '
                f"{self.compress!r} and {self.compression_level}"
            )
        for kind, given in self.serializers.items():
            if not (isinstance(kind, type) and isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
                raise TypeError(f"serializers are type -> (extension, function that makes bytes); got {kind!r}: {given!r}")
            member_name("0", given[0])
        if not (len(self.part) == 2 and 1 <= self.part[0] <= self.part[1] <= MOST_PARTS):
            raise ValueError(f"part is (number, count), from (1, count) on, and count is {MOST_PARTS} at most; got {self.part}")
        if self.compress:
            list(zstd_pieces(memoryview(b""), 1))  # report a missing library now, not in a worker

    @property
    def coding(self) -> MemberCoding:
        """Return the transformation of members. It lacks the generation, which encryption needs and which is not known yet."""
        return MemberCoding(self.restart_markers, self.compression_level if self.compress == "samples" else None)


@dataclass(frozen=True)
class PackProgress:
    """The progress of a packing.

    Attributes:
        total: number of samples in the part that is packed; None if unknown, as for an iterable.
        num_samples: samples packed so far, including those of existing shards.
        nbytes: size of the shards that are complete in the store.
        num_shards: number of these shards.
        num_found: number of these shards that existed when the packing began.
    """

    total: int | None
    num_samples: int = 0
    nbytes: int = 0
    num_shards: int = 0
    num_found: int = 0


class Packing:
    """The packing of a map-style dataset into a store, which `run` performs.

    Args:
        dataset: the dataset.
        store: the folder to write to.
        options: the options.
        on_progress: called from time to time with the progress.
    Attributes:
        num_found: number of shards that existed when it began.
        missing: parts that are not yet complete.
    """

    missing: Sequence[PackPart] = ()
    _span: tuple[int, int | None]  # range of positions in the order to pack

    def __init__(
        self, dataset: Any, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None
    ) -> None:
        source = source_of(dataset, options.quality, options.serializers)
        if not len(source):
            raise ValueError("a dataset of at least 1 sample is needed; this one is empty: check the path it reads")
        self._begin(store, options, on_progress, len(source))
        self._samples = EncodedSamples(source, seed=options.seed, coding=options.coding)
        probed = sorted({number * (len(source) - 1) // (NUM_PROBED - 1) for number in range(NUM_PROBED)})
        probes = self._probes(source, probed)
        mean = sum(map(len, probes)) // len(probes)
        self._batch_size = min(max(_BATCH_NBYTES // mean, 1), _BATCH_SIZE_MAX)
        self._span = self._part.span(len(source))
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

    def _float_images(self) -> list[FloatImages]:
        """Return the ways to store images of floats, by preference; only that of the dataset that is appended to, if it has one."""
        there = manifest_of(self._store) if self._options.append else None
        extensions = set() if there is None else {extension.partition(".")[0] for extension in there.extensions}
        if ("npy" in extensions) == bool(extensions & _PICTURES):
            return ["png", "npy"]
        return ["npy"] if "npy" in extensions else ["png"]

    def _begin(
        self, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None, total: int | None
    ) -> None:
        self._options, self._store, self._on_progress, self._total = options, store, on_progress, total
        self._part = PackPart(*options.part)
        self._span = (0, total)
        self._records: list[ShardRecord] = []  # of the shards that are in the store
        self.num_found = self._num_packed = self._first = 0

    def _digest(self, probes: list[bytes], source: PackSource | None, float_images: FloatImages) -> str:
        """Return a hash of the arguments and the dataset, for the name of the generation.

        Args:
            probes: records of some samples.
            source: the dataset, if it has a length.
            float_images: how images of floats are stored.
        """
        options, digest = self._options, hashlib.sha256()
        arguments = (options.seed, options.maxsize, options.maxcount, options.quality, options.restart_markers)
        digest.update(json.dumps((VERSION, self._total, *arguments)).encode("ascii"))
        if self._part.count > 1:
            digest.update(f"{self._part.count} parts".encode("ascii"))
        if options.compress or options.cipher is not None:
            fingerprint = None if options.cipher is None else options.cipher.fingerprint
            digest.update(json.dumps((options.compress, options.compression_level, fingerprint)).encode("ascii"))
        if float_images == "npy":
            digest.update(b"float images npy")
        for probe in probes:
            digest.update(probe)
        if isinstance(source, Files | PackedParts):
            source.update(digest)
        return digest.hexdigest()

    def _choose(self, digest: str) -> None:
        """Choose the generation's name and the dataset to append to. The newest existing generation may be that of the same call.

        Raises:
            ValueError: the existing dataset is encrypted with another key.
        """
        options = self._options
        there = manifest_of(self._store) if options.append else None
        before = there
        if there is not None and _name(digest, there.before()) == there.generation:
            before = there.before()
            logger.warning(
                "%s: its newest generation was packed by the same call from the same samples, by the %d that are compared, so "
                "nothing is appended: give another seed if they differ",
                self._store.url,
                NUM_PROBED,
            )
        key = "" if options.cipher is None else options.cipher.fingerprint
        if before is not None and before.key != key:
            raise ValueError(
                f"{self._store.url}: a dataset is encrypted with one key or with none: what is there with {before.key or 'none'}, "
                f"and what is appended with {key or 'none'}, by their fingerprints: append with the key of the first packing"
            )
        self._first = 0 if before is None else before.num_samples
        suffix = ".tar.zst" if options.compress == "shards" else ".tar"
        self._generation = Generation(self._store, _name(digest, before), suffix, before, self._part, self._total)

    def other_dataset(self) -> Manifest | None:
        """Return the dataset in the folder that this packing is going to replace; None if there is none."""
        return self._generation.other_dataset()

    @property
    def replaced(self) -> Manifest | None:
        """Return the dataset that this packing has replaced in its folder, if it could be read."""
        return self._generation.replaced

    def _coding(self) -> MemberCoding:
        """Return the transformation of members, now that the generation has its name."""
        return replace(self._options.coding, cipher=self._options.cipher, generation=self._generation.name)

    def run(self) -> Manifest:
        """Pack what is not in the store yet, and write the manifest unless other parts are `missing`."""
        generation = self._generation
        found = generation.records()
        self._records = self._part.whole(found, self._total)
        at = self._records[-1].stop if self._records else self._span[0]
        self.num_found = len(self._records)
        if self.num_found:
            logger.info("%s: %d shards of generation %s are there already", self._store.url, self.num_found, generation.name)
        if at == self._span[1] and generation.is_settled():
            return self._commit()
        generation.claim()
        faults.hit("claimed")
        generation.forget(found[self.num_found :])  # they are packed again
        self._num_packed = at - self._span[0]
        self._report()
        level = self._options.compression_level if self._options.compress == "shards" else None
        num_files = NUM_THREADS + 1 if level is None else 2 * NUM_THREADS + 1
        self._spool = Spool(num_files * self._options.maxsize, self._options.spool_folder)
        sender = ShardSender(self._store, generation, self._sent, level)
        try:
            if self._span[1] is None or at < self._span[1]:
                self._pack(sender, at)
            sender.wait(0)
        finally:
            sender.close()
            self._spool.close()
        self._records.sort(key=lambda record: record.number)
        return self._commit()

    def _commit(self) -> Manifest:
        cipher = self._options.cipher
        seed, key = self._options.seed, "" if cipher is None else cipher.fingerprint
        if self._part.count > 1:
            records, self.missing = self._generation.all_parts()
            if self.missing:
                self._generation.check()
                return self._generation.manifest(self._records, seed, key)
            self._records = records
        return self._generation.commit(self._records, seed, key)

    def _pack(self, sender: ShardSender, at: int) -> None:
        """Pack the samples from position `at` into further shards."""
        shard: ShardFile | None = None
        number = self.num_found
        try:
            for records, ends in self._batches(at):
                begin = last = 0  # offsets in `records`: end of what is in a shard, and end of the last sample seen
                count = 0
                for end in ends:
                    if shard is not None and self._is_full(shard, end - begin, count + 1):
                        shard.append(records[begin:last], count)
                        sender.send(shard)
                        begin, count, number, shard = last, 0, number + 1, None
                    if shard is None:
                        sender.wait(NUM_THREADS)  # while the next shard is being written
                        shard = ShardFile(self._generation.shard_name(number), at, self._spool)
                    last, count, at = end, count + 1, at + 1
                assert shard is not None
                shard.append(records[begin:last], count)
                self._num_packed += len(ends)
                self._report()
            if shard is not None:  # an iterable may end where the existing shards end
                sender.send(shard)
                shard = None
        finally:
            if shard is not None:
                shard.close()

    def _is_full(self, shard: ShardFile, nbytes: int, count: int) -> bool:
        """Return whether a shard has no room for `nbytes` more bytes and `count` more samples."""
        is_full = shard.num_samples + count > self._options.maxcount
        return is_full or archive_nbytes(shard.nbytes + nbytes) > self._options.maxsize

    def _batches(self, at: int) -> Iterator[tuple[memoryview, list[int]]]:
        """Yield the records from position `at`, in order: the bytes of a batch, and the offsets where its records end."""
        stop = self._span[1] or 0
        num_workers = self._num_workers(stop - at)
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

    def _num_workers(self, num_samples: int | None) -> int:
        wanted = self._options.workers
        found = min(wanted, len(os.sched_getaffinity(0)))
        if num_samples is not None:
            found = min(found, -(-num_samples // self._batch_size))
        if found < wanted:
            logger.info("packing uses %d of %d workers, because there are no more processors or batches of samples", found, wanted)
        return found

    def _sent(self, record: ShardRecord) -> None:
        self._records.append(record)
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            nbytes = sum(record.shard.nbytes for record in self._records)
            first, stop = self._span
            total = None if stop is None else stop - first
            self._on_progress(PackProgress(total, self._num_packed, nbytes, len(self._records), self.num_found))


def _name(digest: str, before: Manifest | None) -> str:
    """Return the name of a generation: a hash of `digest` and of the dataset that it is appended to."""
    return (digest if before is None else hashlib.sha256(f"{digest} {before.digest}".encode()).hexdigest())[:16]


class StreamPacking(Packing):
    """The packing of an iterable in its order. This process iterates over it, and workers encode the samples.

    An interrupted packing can be continued if the iterable yields the same samples again; those that are in the store are skipped.
    """

    def __init__(
        self, samples: Iterable[Any], store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None
    ) -> None:
        if options.part[1] > 1:
            raise ValueError(
                f"part={options.part} is of a dataset with a length, and where a part of an iterable begins is not known. Pack a "
                "map-style dataset, or what each machine has with append=True, one after the other"
            )
        self._begin(store, options, on_progress, None)
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
            if nbytes >= _BATCH_NBYTES or len(records) == _BATCH_SIZE_MAX:
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


def packing_of(
    dataset: Any, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None = None
) -> Packing:
    """Return the packing of a dataset or of an iterable of samples, to be run. Arguments are those of `Packing`.

    Raises:
        TypeError: it is neither of these.
        ValueError: it is empty.
    """
    from torch.utils.data import IterableDataset

    if is_table(dataset) or (isinstance(dataset, Mapping) and dataset and 0 not in dataset):
        raise TypeError(
            f"a dataset gives a sample for each number, and this {type(dataset).__name__} gives its columns by name: give its "
            "rows, such as frame.to_dict('records') of a DataFrame, or [dict(zip(columns, row)) for row in "
            "zip(*columns.values())] of a dict"
        )
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_stream = hasattr(dataset, "__iter__") and not is_map_style and not isinstance(dataset, (str, bytes, Mapping))
    is_stream |= isinstance(dataset, IterableDataset)  # torch's IterableDataset has a __getitem__ that only raises
    return (StreamPacking if is_stream else Packing)(dataset, store, options, on_progress)


def upload_cv_dataset(
    ds: Any,
    client: Any = None,
    bucket: str = "",
    base_folder: str = "",
    maxsize: float = 1e8,
    maxcount: int = 100_000,
    workers: int = 30,
    *,
    seed: int = 0,
    quality: int | None = None,
    restart_markers: bool = False,
    compress: Compress = None,
    compression_level: int = ZSTD_LEVEL,
    key: bytes | None = None,
    append: bool = False,
    part: tuple[int, int] = (1, 1),
    serializers: Serializers | None = None,
    multiprocessing_context: Any = None,
    spool_folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
) -> Manifest:
    """Pack a dataset into tar shards, which webdataset can also read, and write them to a store.

    Samples are packed in a random order determined by the seed. Worker processes encode them into the ring, this process writes
    shards, and threads send them in parallel. The shards are identical, byte for byte, for any number of workers and any start
    method.

    To continue a packing that was killed, run it again with the same arguments and dataset: shards that are complete in the store,
    which is verified by reading them back, are neither encoded nor sent again. Readers see the previous dataset until the new one
    is complete; then the old shards are removed. If two different datasets are packed into the same folder, the packing that began
    first stops with an error.

    docs/packing.md describes how images and labels are stored: files are copied unchanged, other images become PNG, and nothing is
    pickled.

    Args:
        ds: a map-style dataset whose samples are (image, label), an image, or dicts. An iterable of such samples (a generator, a
            fluent RemoteDataset, torch's IterableDataset) is packed in its own order: this process reads it, and workers encode. To
            continue after a kill, it must yield the same samples again.
        client: from `make_client`, or boto3's; None if `bucket` is a local folder or a URL; a dict of options for a URL of another
            cloud (`open_store`).
        bucket, base_folder: where to write the dataset; one folder per dataset.
        maxsize: greatest size of a shard's tar file in bytes, before compression; only a larger single sample exceeds it.
        maxcount: greatest number of samples per shard.
        workers: processes that encode, at most one per processor; 0 encodes in this process.
        seed: seed of the order, and of the dataset's random numbers (augmentations).
        quality: encode images that are not encoded yet as JPEG of this quality, 1 to 100. If None, as PNG, without loss.
        restart_markers: add restart markers to JPEG files, without loss, so that readers decode only what a crop needs.
        compress: "samples" compresses each member with zstd, "txt" as "txt.zst", except integers and formats that are compressed
            themselves (JPEG, PNG, FLAC, ...); "shards" compresses each shard, as .tar.zst. Both need the extra `zstd`.
        compression_level: zstd level, 1 to 22.
        key: 32-byte key to encrypt each member, "txt" as "txt.enc" (extra `encryption`); it is not stored anywhere.
        append: keep the existing samples, and add these after them as a new generation. Repeating the same call right afterward
            adds nothing.
        part: (number, count), counted from (1, count): this machine packs one of `count` parts of the dataset, and others pack the
            rest with the same arguments, at any time. Each one that finds all parts complete writes the manifest. Samples and order
            are the same as on one machine; the boundaries of shards also depend on `count`.
        serializers: for values of your own types, `{Graph: ("graph", dumps)}`: type -> (extension, function that returns bytes).
        multiprocessing_context: start method of the workers: "fork", "spawn", "forkserver" or a context.
        spool_folder: folder for up to three shards until they are sent, five if they are compressed, in unnamed files. If None, in
            memory if that many shards of `maxsize` take at most an eighth of free memory, otherwise in the system's temporary
            folder.
        on_progress: called from time to time with a `PackProgress`.
    Returns:
        The manifest that was written: `manifest.json` in the folder, which `RemoteDataset(client, bucket, base_folder)` reads. If
        other parts are missing, nothing is written, and the manifest describes only this part.
    Raises:
        StoreError: the store cannot be written, or another packing into the folder was begun.
        TypeError, ValueError: an argument is invalid, or a sample cannot be encoded; the message names its field.
    Cost: CPU time of about two copies and one checksum of each file; files that are copied are not decoded.
    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from shmload.remote import upload_cv_dataset
        >>> images = [(np.full((8, 8, 3), number, np.uint8), number) for number in range(10)]
        >>> manifest = upload_cv_dataset(
        ...     images, bucket=tempfile.mkdtemp(), base_folder="grey", maxcount=4, workers=0
        ... )
        >>> manifest.num_samples, len(manifest.shards), manifest.extensions
        (10, 3, ('cls', 'png'))
    """
    options = PackOptions(
        int(maxsize),
        int(maxcount),
        int(workers),
        seed,
        quality,
        restart_markers,
        multiprocessing_context,
        None if spool_folder is None else os.fspath(spool_folder),
        compress,
        compression_level,
        None if key is None else SampleCipher(key),
        dict(serializers or {}),
        append,
        part,
    )
    return packing_of(ds, store_of(client, bucket, base_folder), options, on_progress).run()


def store_of(client: Any, bucket: str, base_folder: str) -> Store:
    """Return the store for a dataset's folder. Arguments are those of `upload_cv_dataset`.

    Raises:
        ValueError: no location is given.
    """
    if not bucket:
        raise ValueError("bucket is needed: its name, or without a client a folder or a URL")
    if client is None or isinstance(client, Mapping):
        return open_store("/".join(part.rstrip("/") for part in (os.fspath(bucket), base_folder) if part), client)
    return client_of(client).store(bucket, base_folder)
