"""The packing itself: which stretches of the order are still to be packed, and each of them from the loader's batches to
shards.

The order is cut into shards as it comes, so where a shard begins depends on the sizes of all samples before it. A packing that
goes on therefore keeps the whole shards with which the order begins, and packs the rest.

The dataset to be packed, seen from the packer: how many samples, and the members of any of them.

A dataset that only opens files of a list is packed from these files, byte for byte, and no image is decoded. That it does no
more cannot be told from its code, so some of its samples are compared with what Pillow makes of their files.

The dataset that a packing's loader reads: position in the packing order -> the sample's members as they stand in a shard.

Workers do all of the encoding, headers and padding included, in the slot of the ring. The trainer writes out what lies there.
Where a sample comes to lie depends on its position alone, so the number of workers changes no byte.

upload_cv_dataset: any dataset of images and labels, as shards in a store.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shmload import faults
from shmload.formats.images.folder import ImageFolder
from shmload.formats.tar.dataset import KEY
from shmload.formats.tar.writer import BLOCK, archive_nbytes, member_header, member_name
from shmload.loader import ShmLoader
from shmload.remote.fetch import Manifest
from shmload.remote.packing.generation import NUM_THREADS, Generation, Record, ShardFile, ShardSender, Spool
from shmload.remote.packing.members import Members, file_member, members_of, value_member
from shmload.schedule.schedule import Permutation
from shmload.storage.client import client_of, open_store
from shmload.storage.local import Store
from shmload.worker.sample_rng import begin_sample, kept_generators

NUM_PROBED_FILES = 4  # samples of a dataset of files that are compared
_TRANSFORMS = ("transform", "transforms", "target_transform")


@dataclass
class PackedSamples:
    """Any dataset, whose samples are encoded."""

    dataset: Any
    quality: int | None
    draws: bool = True  # whether reading a sample may draw random numbers

    def __len__(self) -> int:
        return len(self.dataset)

    def members(self, index: int) -> tuple[str, Members]:
        """What a sample's key begins with, and its members, sorted by extension."""
        sample = self.dataset[index]
        key = sample.get(KEY) if isinstance(sample, Mapping) else None
        return (f"{key}-" if isinstance(key, str) else ""), members_of(sample, self.quality)


@dataclass
class Files:
    """A dataset of files, which are copied, with labels.

    Args:
        entries: paths, or pairs of path and label.
        has_labels: whether each entry is a path and a label, not only a path.
    """

    entries: Sequence[Any]
    has_labels: bool = True
    draws: bool = False

    def __len__(self) -> int:
        return len(self.entries)

    def members(self, index: int) -> tuple[str, Members]:
        entry = self.entries[index]
        if not self.has_labels:
            return "", [file_member(entry)]
        path, label = entry
        return "", sorted([file_member(path), value_member(label, None)], key=lambda member: member[0])

    def update(self, digest: Any) -> None:
        """Adds names and labels of all files to a digest of hashlib's."""
        for entry in self.entries:
            path, label = entry if self.has_labels else (entry, None)
            name = "/".join(path.rsplit("/", 2)[-2:])
            digest.update(f"{name}\0{label!r}\0".encode("utf-8", "surrogateescape"))


class PackedParts:
    """Samples of sources, in an order: what Subset and ConcatDataset of torch stand for.

    Args:
        parts: the sources.
        part, index: int64 arrays; of each sample, which source it is of, and which of its samples.
    """

    def __init__(self, parts: Sequence[PackSource], part: Any, index: Any) -> None:
        self.parts, self.part, self.index = parts, part, index
        self.draws: bool = any(source.draws for source in parts)

    def __len__(self) -> int:
        return len(self.part)

    def members(self, index: int) -> tuple[str, Members]:
        return self.parts[int(self.part[index])].members(int(self.index[index]))


PackSource = PackedSamples | Files | PackedParts  # a dataset as the packer reads it; picklable


def source_of(dataset: Any, quality: int | None) -> PackSource:
    """The source that a dataset is.

    Raises:
        TypeError: it has no length, or no samples by number.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"a dataset with __len__ and __getitem__ is needed, since samples are packed in a random order; got a "
            f"{type(dataset).__name__}. Put what an iterable yields in a list, or write it with shmload.formats.TarWriter"
        )
    from torch.utils.data import ConcatDataset, Subset

    if type(dataset) is Subset:
        inner = source_of(dataset.dataset, quality)
        return PackedParts([inner], np.zeros(len(dataset), np.int64), np.array(list(dataset.indices), np.int64))
    if type(dataset) is ConcatDataset:
        parts = [source_of(each, quality) for each in dataset.datasets]
        part = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
        return PackedParts(parts, part, np.concatenate([np.arange(len(each)) for each in parts]))
    if type(dataset) is ImageFolder and dataset.transform is None:
        return Files(dataset.samples, has_labels=dataset._has_labels)
    return _files_of(dataset) or PackedSamples(dataset, quality)


def _files_of(dataset: Any) -> Files | None:
    """The files of a dataset such as torchvision's ImageFolder, if its samples are these and nothing else."""
    if any(getattr(dataset, name, None) is not None for name in _TRANSFORMS):
        return None
    entries = getattr(dataset, "samples", None) or getattr(dataset, "imgs", None)
    if not isinstance(entries, (list, tuple)) or len(entries) != len(dataset):
        return None
    probed = sorted({number * (len(entries) - 1) // max(NUM_PROBED_FILES - 1, 1) for number in range(NUM_PROBED_FILES)})
    return Files(entries) if all(_is_file(dataset, entries, index) for index in probed) else None


def _is_file(dataset: Any, entries: Sequence[Any], index: int) -> bool:
    """Whether a sample is the image in its file, as it is or in another mode, and its label."""
    entry = entries[index]
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
        return False
    sample = dataset[index]
    if not (isinstance(sample, tuple) and len(sample) == 2 and type(sample[1]) is int and sample[1] == entry[1]):
        return False
    if not hasattr(sample[0], "getbands"):
        return False
    from PIL import Image

    with Image.open(entry[0]) as opened:
        picture = opened.convert(sample[0].mode)
    same: bool = picture.size == sample[0].size and picture.tobytes() == sample[0].tobytes()
    return same


RECORD = "record"


class EncodedSamples:
    """Records of samples: their members, one after the other, each filled up to a block.

    A dataset that draws random numbers (augmentations) draws them from (seed, index of the sample), so that a packing that goes
    on after a kill, or with other workers, makes the same bytes.

    Args:
        source: the samples.
        seed: of the order, and of what samples draw.
        restart_markers: JPEG files get restart markers, without loss.
    """

    schema = {RECORD: ("uint8", (None,))}  # noqa: RUF012  # as users write it

    def __init__(self, source: PackSource, *, seed: int, restart_markers: bool) -> None:
        self.source, self.seed, self.restart_markers = source, seed, restart_markers
        self.order = Permutation(len(source), seed=seed)
        self._width = max(8, len(str(len(source) - 1)))

    def __len__(self) -> int:
        return len(self.source)

    def read_batch_into(self, positions: Any, out: Any) -> None:
        """Writes the records at positions of the order, end to end."""
        indices = self.order.take(np.asarray(positions, np.int64)).tolist()
        if self.source.draws:
            with kept_generators():
                records = [self.pieces(index) for index in indices]
        else:
            records = [self.pieces(index) for index in indices]
        view, at = memoryview(out.reserve(RECORD, [sum(map(len, pieces)) for pieces in records])), 0
        for pieces in records:
            for piece in pieces:
                view[at : at + len(piece)] = piece
                at += len(piece)

    def pieces(self, index: int) -> list[bytes]:
        """The record of a sample: headers, payloads and what fills them up.

        Raises:
            Exception: as reading it raised; a note names the sample.
        """
        try:
            if self.source.draws:
                begin_sample(self.seed, 0, index, 0, reseed=True)
            prefix, members = self.source.members(index)
            number = f"{index:0{self._width}d}"
            pieces: list[bytes] = []
            for extension, data in members:
                if self.restart_markers and extension.rpartition(".")[2] in ("jpg", "jpeg"):
                    from shmload.formats.images.decoder import with_restart_markers

                    data = with_restart_markers(data)
                name = member_name(prefix + number, extension) if prefix else number.encode() + _behind(extension)
                pieces += [member_header(name, len(data)), data, bytes(-len(data) % BLOCK)]
            return pieces
        except Exception as error:
            error.add_note(f"sample {index} of the dataset")
            raise


@lru_cache(maxsize=1024)
def _behind(extension: str) -> bytes:
    """What stands in a member's name behind a key that is a number; checked once."""
    return member_name("0", extension)[1:]


logger = logging.getLogger("shmload")
VERSION = 1  # of what samples become: another one is another generation
NUM_PROBED = 8  # samples that tell one dataset from another
_BATCH_NBYTES = 4 << 20
_BATCH_SIZE_MAX = 256


@dataclass(frozen=True)
class PackOptions:
    """How a dataset is packed.

    Attributes:
        maxsize, maxcount: bytes of a shard's file, and its samples.
        workers: processes that encode; 0: this one.
        quality: of JPEG for images that are not encoded yet; None: PNG.
        multiprocessing_context: how workers start.
        spool_folder: where shards lie until they are sent; None: in memory, or if that is short where temporary files do.
    """

    maxsize: int
    maxcount: int
    workers: int
    seed: int
    quality: int | None = None
    restart_markers: bool = False
    multiprocessing_context: Any = None
    spool_folder: str | None = None

    def __post_init__(self) -> None:
        if self.maxsize < archive_nbytes(0) or self.maxcount < 1 or self.workers < 0:
            raise ValueError(
                f"maxsize is at least {archive_nbytes(0)} bytes, maxcount 1 and workers 0; got {self.maxsize}, {self.maxcount} and "
                f"{self.workers}"
            )
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ValueError(f"quality is from 1 to 100, or None for no loss; got {self.quality}")


@dataclass(frozen=True)
class PackProgress:
    """How far a packing is.

    Attributes:
        num_samples: packed, of `total`; those of shards that were there count.
        nbytes: of shards that are whole in the store; `num_shards` of them, of which `num_found` were there before.
    """

    total: int
    num_samples: int = 0
    nbytes: int = 0
    num_shards: int = 0
    num_found: int = 0


class Packing:
    """One packing of a dataset into a store.

    Attributes:
        num_found: shards that were there when it began.
    """

    def __init__(
        self, dataset: Any, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None
    ) -> None:
        source = source_of(dataset, options.quality)
        if not len(source):
            raise ValueError("a dataset of at least 1 sample is needed; this one is empty: check the path it reads")
        self._options, self._store, self._on_progress = options, store, on_progress
        self._samples = EncodedSamples(source, seed=options.seed, restart_markers=options.restart_markers)
        probed = sorted({number * (len(source) - 1) // (NUM_PROBED - 1) for number in range(NUM_PROBED)})
        probes = [b"".join(self._samples.pieces(index)) for index in probed]
        mean = sum(map(len, probes)) // len(probes)
        self._batch_size = min(max(_BATCH_NBYTES // mean, 1), _BATCH_SIZE_MAX)
        self._generation = Generation(store, self._name(probes))
        self._records: list[Record] = []  # of the shards that are in the store
        self.num_found = self._num_packed = 0

    def _name(self, probes: list[bytes]) -> str:
        """The generation's name: another one for other arguments or another dataset."""
        options, digest = self._options, hashlib.sha256()
        arguments = (options.seed, options.maxsize, options.maxcount, options.quality, options.restart_markers)
        digest.update(json.dumps((VERSION, len(self._samples), *arguments)).encode("ascii"))
        for probe in probes:
            digest.update(probe)
        if isinstance(self._samples.source, Files):
            self._samples.source.update(digest)
        return digest.hexdigest()[:16]

    def run(self) -> Manifest:
        """Packs what is not in the store yet, and writes the manifest."""
        total, at = len(self._samples), 0
        generation = self._generation
        found = generation.records()
        for record in found:
            if (record.first, record.number) != (at, len(self._records)) or record.stop > total:
                break
            self._records.append(record)
            at = record.stop
        self.num_found = len(self._records)
        if self.num_found:
            logger.info("%s: %d shards of generation %s are there already", self._store.url, self.num_found, generation.name)
        if at == total and generation.is_settled():
            return generation.commit(self._records, self._options.seed)
        generation.claim()
        faults.hit("claimed")
        generation.forget(found[self.num_found :])  # they are packed anew
        self._num_packed = at
        self._report()
        self._spool = Spool((NUM_THREADS + 1) * self._options.maxsize, self._options.spool_folder)
        sender = ShardSender(self._store, generation, self._sent)
        try:
            if at < total:
                self._pack(sender, at)
            sender.wait(0)
        finally:
            sender.close()
            self._spool.close()
        return generation.commit(sorted(self._records, key=lambda record: record.number), self._options.seed)

    def _pack(self, sender: ShardSender, at: int) -> None:
        """Packs the samples from position `at` on into further shards."""
        shard: ShardFile | None = None
        number = self.num_found
        try:
            for records, ends in self._batches(at):
                begin = last = 0  # of what is not written yet
                count = 0
                for end in ends:
                    if shard is not None and self._is_full(shard, end - begin, count + 1):
                        shard.append(records[begin:last], count)
                        sender.send(shard)
                        begin, count, number, shard = last, 0, number + 1, None
                    if shard is None:
                        sender.wait(NUM_THREADS)  # the next is being written meanwhile
                        shard = ShardFile(self._generation.shard_name(number), at, self._spool)
                    last, count, at = end, count + 1, at + 1
                assert shard is not None
                shard.append(records[begin:last], count)
                self._num_packed += len(ends)
                self._report()
            assert shard is not None
            sender.send(shard)
            shard = None
        finally:
            if shard is not None:
                shard.close()

    def _is_full(self, shard: ShardFile, nbytes: int, count: int) -> bool:
        """Whether a shard has no room for so many more bytes and samples."""
        is_full = shard.num_samples + count > self._options.maxcount
        return is_full or archive_nbytes(shard.nbytes + nbytes) > self._options.maxsize

    def _batches(self, at: int) -> Iterator[tuple[memoryview, list[int]]]:
        """Records from position `at` on, in their order: bytes of a batch, and where in it each ends."""
        stop = len(self._samples)
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

    def _num_workers(self, num_samples: int) -> int:
        wanted = self._options.workers
        found = min(wanted, len(os.sched_getaffinity(0)), -(-num_samples // self._batch_size))
        if found < wanted:
            logger.info("packing takes %d of %d workers: there are that many processors, or batches of samples", found, wanted)
        return found

    def _sent(self, record: Record) -> None:
        self._records.append(record)
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            nbytes = sum(record.shard.nbytes for record in self._records)
            self._on_progress(PackProgress(len(self._samples), self._num_packed, nbytes, len(self._records), self.num_found))


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
    multiprocessing_context: Any = None,
    spool_folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
) -> Manifest:
    """Packs a dataset into tar shards, which webdataset reads too, and writes them to a store.

    Samples are packed in a random order that the seed chooses. Worker processes encode them into the ring; this one writes
    shards, and threads send them meanwhile. Shards are the same, byte for byte, for any number of workers and any start method.

    A packing that was killed goes on when it is run again with the same arguments and dataset: shards that are whole in the
    store are neither encoded nor sent again. Readers see the dataset that was there before until the new one is whole; then the
    old shards are removed. Of two packings of different datasets into one folder, the one that began first stops with an error.

    What becomes of images and labels is in docs/packing.md: files are copied as they are, other images are PNG, nothing is
    pickled.

    Args:
        ds: map-style; samples are (image, label), an image, or dicts.
        client: of `make_client`, or boto3's; None: `bucket` is a folder of this machine, or a URL.
        bucket, base_folder: where the dataset goes; one folder for each dataset.
        maxsize: bytes of a shard's file, exceeded only by a sample that is larger alone.
        maxcount: samples of a shard.
        workers: processes that encode, at most as many as there are processors; 0: this one.
        seed: of the order, and of what the dataset draws (random augmentations).
        quality: JPEG with this quality, 1 to 100, for images that are not encoded yet; None: PNG, without loss.
        restart_markers: JPEG files get restart markers, without loss: readers then decode only what a crop needs.
        multiprocessing_context: how workers start: "fork", "spawn", "forkserver" or a context.
        spool_folder: where up to three shards lie until they are sent, in files without names. None: in memory if three of
            `maxsize` are at most an eighth of what is free, else where temporary files do.
        on_progress: called now and then with a `PackProgress`.
    Returns:
        what was written: `manifest.json` in the folder, which is read back by `RemoteDataset(client, bucket, base_folder)`.
    Raises:
        StoreError: the store cannot be written, or another packing into the folder was begun.
        TypeError, ValueError: an argument, or a sample that nothing keeps; the text names its field.
    Cost: CPU of about one copy and one checksum of each file; nothing is decoded where files are copied.
    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from shmload.remote import upload_cv_dataset
        >>> images = [(np.full((8, 8, 3), number, np.uint8), number) for number in range(10)]
        >>> manifest = upload_cv_dataset(images, bucket=tempfile.mkdtemp(), base_folder="grey", maxcount=4, workers=0)
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
    )
    return Packing(ds, store_of(client, bucket, base_folder), options, on_progress).run()


def store_of(client: Any, bucket: str, base_folder: str) -> Store:
    """The store of a dataset's folder.

    Raises:
        ValueError: nothing says where it is.
    """
    if not bucket:
        raise ValueError("bucket is needed: its name, or without a client a folder or a URL")
    if client is None:
        return open_store("/".join(part.rstrip("/") for part in (os.fspath(bucket), base_folder) if part))
    return client_of(client).store(bucket, base_folder)
