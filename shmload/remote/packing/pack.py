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

What a packing keeps in the store: its claim, a record beside each shard, and at its end the manifest.

    packing.json                            generation of the packing under way; the last one that began
    <generation>/shard-000000.tar.json      written after its shard and index: these are whole
    manifest.json                           of the newest whole generation; written last

A shard of a bucket counts as whole if it has its length: objects are written whole or not at all. Files of a folder are read, and
their checksums compared.

A generation is named after the dataset and the arguments, so the same packing finds what it has done, whoever killed it, and
two of the same at once write the same bytes under the same names. One of another kind takes the claim over: who finds another
name in it stops. Once the manifest is written, all other objects in folders of generations are removed, except of one that was
claimed since. Objects that are no such names are never touched.

Where shards lie until they are sent: a few files without names, which go with the process, also when it is killed.

They lie in memory if it has room for them, and are written over by the next shards: pages that are there cost one copy, and new
ones of a disk's file system several times that.

A shard on its way: written into a file without a name, which goes with its last descriptor, also when the process is
killed.

Sends finished shards while the next ones are packed, by a few threads; room for a few shards is all it takes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from shmload import faults
from shmload._core.crc32c import crc32c
from shmload.errors import ObjectMissing, ShardCorrupt, StoreError
from shmload.formats.images.image_folder import ImageFolder
from shmload.formats.tar.shards import KEY, ShardIndex, pack_index
from shmload.formats.tar.writer import BLOCK, archive_nbytes, member_header, member_name
from shmload.loader import ShmLoader
from shmload.remote.manifest import INDEX_SUFFIX, MANIFEST_NAME, IndexEntry, Manifest, ShardEntry
from shmload.remote.packing.encoding import Members, file_member, members_of, value_member
from shmload.schedule.schedule import Permutation
from shmload.shm.segment import available_bytes
from shmload.storage.client import client_of, open_store
from shmload.storage.local import LocalStore, Store, StoredObject
from shmload.worker.own_generators import OwnGenerators
from shmload.worker.sample_rng import begin_sample, kept_generators

_SHARE = 8  # of the memory there is, one part is for shards


class Spool:
    """Files that are used again.

    Args:
        nbytes: of all of them together, as far as can be told.
        folder: where they lie; None: in memory, or if that is short where temporary files do.
    """

    def __init__(self, nbytes: int, folder: str | None) -> None:
        self._folder = folder
        self.is_memory = folder is None and nbytes <= available_bytes() // _SHARE
        self._free: list[IO[bytes]] = []
        self._made = ExitStack()

    def take(self) -> IO[bytes]:
        """A file that nobody has; what was in it is still there."""
        if self._free:
            file = self._free.pop()
            file.seek(0)
            return file
        if self.is_memory:
            return self._made.enter_context(open(os.memfd_create("shmload-pack"), "r+b", buffering=0))
        return self._made.enter_context(tempfile.TemporaryFile(prefix="shmload-pack-", dir=self._folder, buffering=0))

    def give(self, file: IO[bytes]) -> None:
        """Takes a file back."""
        self._free.append(file)

    def close(self) -> None:
        """Gives the room of all files back."""
        self._made.close()


@dataclass(frozen=True)
class Record:
    """A shard that is in the store, as it is noted there for a packing that goes on.

    Attributes:
        first: position in the packing order of its first sample.
        extensions: of its members, sorted.
    """

    first: int
    extensions: tuple[str, ...]
    shard: ShardEntry

    @property
    def number(self) -> int:
        """Of the shard, which its name ends in."""
        return int(self.shard.name.rpartition("-")[2].removesuffix(".tar"))

    @property
    def stop(self) -> int:
        """Position behind its last sample."""
        return self.first + self.shard.num_samples


class ShardFile:
    """A shard that is being written.

    Args:
        name: that it will have.
        first: position in the packing order of its first sample.
        spool: has a file for it.
    """

    def __init__(self, name: str, first: int, spool: Spool) -> None:
        self.name, self.first = name, first
        self.nbytes = self.num_samples = 0
        self._crc = 0
        self._spool, self._file = spool, spool.take()

    @property
    def path(self) -> Path:
        """A path by which this process opens it."""
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    def append(self, records: memoryview, num_samples: int) -> None:
        """Adds samples, which lie end to end."""
        self._write(records)
        self.num_samples += num_samples

    def finish(self) -> tuple[Record, bytes]:
        """Ends the archive; what is noted of it, and its index."""
        self._write(memoryview(bytes(archive_nbytes(self.nbytes) - self.nbytes)))
        self._file.truncate()  # of a longer shard before it
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            packed = pack_index(self.name, data)
        extensions = tuple(sorted(ShardIndex(self.name, packed).extensions))
        index = IndexEntry(self.name + INDEX_SUFFIX, len(packed), f"{crc32c(packed):08x}")
        entry = ShardEntry(self.name, self.nbytes, self.num_samples, f"{self._crc:08x}", index)
        return Record(self.first, extensions, entry), packed

    def _write(self, data: memoryview) -> None:
        self._crc = crc32c(data, self._crc)
        self.nbytes += len(data)
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Gives its file back."""
        self._spool.give(self._file)


logger = logging.getLogger("shmload")
CLAIM = "packing.json"
_NOTE = ".json"
_OURS = re.compile(r"([0-9a-f]{16})/shard-[0-9]{6,9}\.tar(\.index|\.json)?")
_AT_ONCE = 4  # files that are read to be compared


class Generation:
    """One packing's part of a dataset's folder.

    Args:
        store: the dataset's folder.
        name: of the generation.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self.name = store, name

    def shard_name(self, number: int) -> str:
        """Where a shard goes."""
        return f"{self.name}/shard-{number:06d}.tar"

    def claim(self) -> None:
        """Says that this is the packing under way."""
        self._store.put(CLAIM, json.dumps({"generation": self.name}).encode("ascii") + b"\n")

    def check(self) -> None:
        """Returns if this is still the packing under way.

        Raises:
            StoreError: another one has begun since, or has ended.
        """
        if (other := self._claimed()) != self.name and not self.is_settled():
            now = "its claim is gone" if other is None else f"generation {other}"
            raise StoreError(
                f"{self._store.url}: another packing into this folder was begun ({now}) while generation {self.name} was being "
                "packed; this one stops. One folder holds one dataset: give each its own, or run one after the other"
            )

    def is_settled(self) -> bool:
        """Whether this is the dataset, and no packing is under way."""
        return self._claimed() is None and self.committed() is not None

    def _claimed(self) -> str | None:
        try:
            return str(json.loads(bytes(self._store.get(CLAIM)))["generation"])
        except ObjectMissing:
            return None
        except (ValueError, KeyError, TypeError):
            return "unknown"

    def committed(self) -> Manifest | None:
        """The manifest, if it is of this generation."""
        try:
            found = Manifest.parse(self._store.get(MANIFEST_NAME), name=f"{self._store.url}/{MANIFEST_NAME}")
        except (ObjectMissing, ShardCorrupt):  # one that is damaged is going to be replaced
            return None
        return found if found.generation == self.name else None

    def note(self, record: Record) -> None:
        """Says that a shard is whole."""
        shard = record.shard
        note = {"first": record.first, "extensions": list(record.extensions), "shard": asdict(shard)}
        self._store.put(shard.name + _NOTE, json.dumps(note).encode("ascii"))

    def forget(self, records: Sequence[Record]) -> None:
        """Takes back what was said of shards, which are going to be written anew."""
        if records:
            self._store.delete([record.shard.name + _NOTE for record in records])

    def records(self) -> list[Record]:
        """Shards of this generation that are in the store, whole, by their first positions."""
        there = self._there()
        manifest = self.committed()
        found = self._noted(there) if manifest is None else _of_manifest(manifest)
        found = [record for record in found if _is_there(record.shard, there)]
        with ThreadPoolExecutor(_AT_ONCE, "shmload-check") as pool:
            are_whole = list(pool.map(self._is_whole, found))
        whole = [record for record, is_whole in zip(found, are_whole, strict=True) if is_whole]
        return sorted(whole, key=lambda record: record.first)

    def _is_whole(self, record: Record) -> bool:
        if not isinstance(self._store, LocalStore):
            return True
        for each in (record.shard, record.shard.index):
            path, crc = self._store.root / each.name, ""
            with suppress(OSError, ValueError), open(path, "rb") as file:  # removed, or emptied, since it was listed
                crc = f"{crc32c(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)):08x}"
            if crc != each.crc32c:
                logger.info("%s is not as it was written: it is packed again", path)
                return False
        return True

    def _noted(self, there: Iterable[str]) -> list[Record]:
        """What the notes say."""
        found = []
        for key in there:
            if not key.endswith(_NOTE) or not _OURS.fullmatch(key):
                continue
            with suppress(ValueError, KeyError, TypeError, ObjectMissing):  # no record is less than a wrong one: packed again
                note = json.loads(bytes(self._store.get(key)))
                shard = ShardEntry.of(note["shard"], self.name, key)
                if shard.name + _NOTE == key and type(note["first"]) is int and note["first"] >= 0:
                    found.append(Record(note["first"], tuple(map(str, note["extensions"])), shard))
        return found

    def _there(self) -> dict[str, StoredObject]:
        return {each.key: each for each in self._store.list_objects(self.name)}

    def commit(self, records: Sequence[Record], seed: int) -> Manifest:
        """Makes these shards the dataset: writes the manifest, then removes what it replaces.

        Raises:
            StoreError: shards are not there any more, or another packing was begun.
        """
        shards = tuple(record.shard for record in records)
        manifest = Manifest(
            self.name,
            seed,
            sum(shard.num_samples for shard in shards),
            sum(shard.nbytes for shard in shards),
            tuple(sorted({extension for record in records for extension in record.extensions})),
            shards,
        )
        self.check()
        self._has_all(shards)
        faults.hit("before_manifest")
        if self.committed() != manifest:
            self._store.put(MANIFEST_NAME, manifest.dump())
        faults.hit("after_manifest")
        self._has_all(shards)  # one that ended between check and put has removed them: then the manifest must not go unnoticed
        self._clean(manifest)
        return manifest

    def _has_all(self, shards: Iterable[ShardEntry]) -> None:
        there = self._there()
        if absent := [shard.name for shard in shards if not _is_there(shard, there)]:
            raise StoreError(
                f"{self._store.url}: {absent[0]} was written and is not there as it was ({len(absent)} shards in all): something "
                "else writes to or empties this folder. Run the same packing again: it packs what is missing"
            )

    def _clean(self, manifest: Manifest) -> None:
        """Removes what is of no use any more: other generations, notes, the claim."""
        claimed = self._claimed()
        kept = {name for shard in manifest.shards for name in (shard.name, shard.index.name)}
        under_way = set() if claimed == self.name else {claimed}
        found = [each.key for each in self._store.list_objects()]
        ours = [(key, match[1]) for key in found if (match := _OURS.fullmatch(key)) is not None]
        self._store.delete([key for key, generation in ours if key not in kept and generation not in under_way])
        faults.hit("cleaning")
        if claimed == self.name:
            self._store.delete([CLAIM])


def _is_there(shard: ShardEntry, there: Mapping[str, StoredObject]) -> bool:
    """Whether a shard and its index are there, with as many bytes as they should have."""
    found = [there.get(each.name) for each in (shard, shard.index)]
    return [each and each.nbytes for each in found] == [shard.nbytes, shard.index.nbytes]


def _of_manifest(manifest: Manifest) -> list[Record]:
    found, first = [], 0
    for shard in manifest.shards:
        found.append(Record(first, manifest.extensions, shard))
        first += shard.num_samples
    return found


NUM_THREADS = 2


class ShardSender:
    """Puts shards into a store: each, then its index, then the note that both are whole.

    Args:
        sent: called with each record, in this thread, when its shard is whole.
    """

    def __init__(self, store: Store, generation: Generation, sent: Callable[[Record], None]) -> None:
        self._store, self._generation, self._sent = store, generation, sent
        self._pool = ThreadPoolExecutor(NUM_THREADS, "shmload-send")
        self._under_way: set[Future[Record]] = set()

    def send(self, shard: ShardFile) -> None:
        """Takes a shard that has all its samples."""
        record, index = shard.finish()
        self._generation.check()
        self._under_way.add(self._pool.submit(self._put, shard, record, index))

    def wait(self, num_left: int) -> None:
        """Waits until no more shards than these are on their way.

        Raises:
            Exception: what went wrong with one that was sent.
        """
        while len(self._under_way) > num_left:
            done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
            for future in done:
                self._sent(future.result())

    def close(self) -> None:
        """Ends the threads; what they are at comes to its end."""
        self._pool.shutdown(cancel_futures=True)

    def _put(self, shard: ShardFile, record: Record, index: bytes) -> Record:
        try:
            faults.hit("sending")
            self._store.put_file(record.shard.name, shard.path)
        finally:
            shard.close()
        faults.hit("shard_sent")
        self._store.put(record.shard.index.name, index)
        faults.hit("index_sent")
        self._generation.note(record)
        faults.hit("shard_noted")
        return record


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
        return prefix_and_members(self.dataset[index], self.quality)


def prefix_and_members(sample: Any, quality: int | None) -> tuple[str, Members]:
    """What the key of any sample begins with, and its members, sorted by extension."""
    key = sample.get(KEY) if isinstance(sample, Mapping) else None
    return (f"{key}-" if isinstance(key, str) else ""), members_of(sample, quality)


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
            f"a dataset with __len__ and __getitem__ is needed, or an iterable of samples, which are packed in its order; got a "
            f"{type(dataset).__name__}"
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
            own = OwnGenerators(self.source)
            with kept_generators():
                records = [self.pieces(index, own) for index in indices]
        else:
            records = [self.pieces(index) for index in indices]
        view, at = memoryview(out.reserve(RECORD, [sum(map(len, pieces)) for pieces in records])), 0
        for pieces in records:
            for piece in pieces:
                view[at : at + len(piece)] = piece
                at += len(piece)

    def pieces(self, index: int, own: OwnGenerators | None = None) -> list[bytes]:
        """The record of a sample: headers, payloads and what fills them up.

        Args:
            own: the source's generators, which are keyed for it with the global ones.
        Raises:
            Exception: as reading it raised; a note names the sample.
        """
        try:
            if self.source.draws:
                begin_sample(self.seed, 0, index, 0, reseed=True, own=own)
            prefix, members = self.source.members(index)
            return record_of(f"{index:0{self._width}d}", prefix, members, self.restart_markers)
        except Exception as error:
            error.add_note(f"sample {index} of the dataset")
            raise


def record_of(number: str, prefix: str, members: Members, restart_markers: bool) -> list[bytes]:
    """The record of a sample: headers, payloads and what fills them up."""
    pieces: list[bytes] = []
    for extension, data in members:
        if restart_markers and extension.rpartition(".")[2] in ("jpg", "jpeg"):
            from shmload.formats.images.decoder import with_restart_markers

            data = with_restart_markers(data)
        name = member_name(prefix + number, extension) if prefix else number.encode() + _behind(extension)
        pieces += [member_header(name, len(data)), data, bytes(-len(data) % BLOCK)]
    return pieces


@lru_cache(maxsize=1024)
def _behind(extension: str) -> bytes:
    """What stands in a member's name behind a key that is a number; checked once."""
    return member_name("0", extension)[1:]


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
        total: samples that there are; None: nobody knows, as of an iterable.
        num_samples: packed; those of shards that were there count.
        nbytes: of shards that are whole in the store; `num_shards` of them, of which `num_found` were there before.
    """

    total: int | None
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
        self._begin(store, options, on_progress, len(source))
        self._samples = EncodedSamples(source, seed=options.seed, restart_markers=options.restart_markers)
        probed = sorted({number * (len(source) - 1) // (NUM_PROBED - 1) for number in range(NUM_PROBED)})
        with kept_generators():
            own = OwnGenerators(source)
            probes = [b"".join(self._samples.pieces(index, own)) for index in probed]
        mean = sum(map(len, probes)) // len(probes)
        self._batch_size = min(max(_BATCH_NBYTES // mean, 1), _BATCH_SIZE_MAX)
        self._generation = Generation(store, self._name(probes, source))

    def _begin(
        self, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None, total: int | None
    ) -> None:
        self._options, self._store, self._on_progress, self._total = options, store, on_progress, total
        self._records: list[Record] = []  # of the shards that are in the store
        self.num_found = self._num_packed = 0

    def _name(self, probes: list[bytes], source: PackSource | None) -> str:
        """The generation's name: another one for other arguments or another dataset."""
        options, digest = self._options, hashlib.sha256()
        arguments = (options.seed, options.maxsize, options.maxcount, options.quality, options.restart_markers)
        digest.update(json.dumps((VERSION, self._total, *arguments)).encode("ascii"))
        for probe in probes:
            digest.update(probe)
        if isinstance(source, Files):
            source.update(digest)
        return digest.hexdigest()[:16]

    def run(self) -> Manifest:
        """Packs what is not in the store yet, and writes the manifest."""
        total, at = self._total, 0
        generation = self._generation
        found = generation.records()
        for record in found:
            is_next = (record.first, record.number) == (at, len(self._records))
            if not is_next or (total is not None and record.stop > total):
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
            if total is None or at < total:
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
            if shard is not None:  # an iterable may end where shards that were there do
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
            self._on_progress(PackProgress(self._total, self._num_packed, nbytes, len(self._records), self.num_found))


class StreamPacking(Packing):
    """The packing of what an iterable yields, in its order, encoded by this process.

    One that was interrupted goes on if the iterable yields the same again: what shards in the store hold of it is passed over.
    """

    def __init__(
        self, samples: Iterable[Any], store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None
    ) -> None:
        self._begin(store, options, on_progress, None)
        source = iter(samples)
        first = list(islice(source, NUM_PROBED))
        if not first:
            raise ValueError("an iterable of at least 1 sample is needed; this one is empty: check what it reads")
        self._stream = enumerate(chain(first, source))
        self._generation = Generation(store, self._name([self._record(n, sample) for n, sample in enumerate(first)], None))

    def _record(self, number: int, sample: Any) -> bytes:
        try:
            prefix, members = prefix_and_members(sample, self._options.quality)
            return b"".join(record_of(f"{number:09d}", prefix, members, self._options.restart_markers))
        except Exception as error:
            error.add_note(f"sample {number} of the iterable")
            raise

    def _batches(self, at: int) -> Iterator[tuple[memoryview, list[int]]]:
        records: list[bytes] = []
        nbytes = 0
        for number, sample in islice(self._stream, at, None):
            records.append(self._record(number, sample))
            nbytes += len(records[-1])
            if nbytes >= _BATCH_NBYTES or len(records) == _BATCH_SIZE_MAX:
                yield memoryview(b"".join(records)), list(accumulate(map(len, records)))
                records, nbytes = [], 0
        if records:
            yield memoryview(b"".join(records)), list(accumulate(map(len, records)))


def packing_of(
    dataset: Any, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None = None
) -> Packing:
    """The packing of a dataset, or of an iterable of samples.

    Raises:
        TypeError: it is neither.
        ValueError: it is empty.
    """
    from torch.utils.data import IterableDataset

    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_stream = hasattr(dataset, "__iter__") and not is_map_style and not isinstance(dataset, (str, bytes, Mapping))
    is_stream |= isinstance(dataset, IterableDataset)  # torch's has a __getitem__ that only raises
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
        ds: map-style; samples are (image, label), an image, or dicts. An iterable of such samples (a generator, a fluent
            RemoteDataset, torch's IterableDataset) is packed in its own order, by this process alone; what goes on after a kill
            asks it for the same samples again.
        client: of `make_client`, or boto3's; None: `bucket` is a folder of this machine, or a URL; a dict: a URL of another
            cloud, whose library takes that (`open_store`).
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
    Cost: CPU of about two copies and one checksum of each file; nothing is decoded where files are copied.
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
    return packing_of(ds, store_of(client, bucket, base_folder), options, on_progress).run()


def store_of(client: Any, bucket: str, base_folder: str) -> Store:
    """The store of a dataset's folder.

    Raises:
        ValueError: nothing says where it is.
    """
    if not bucket:
        raise ValueError("bucket is needed: its name, or without a client a folder or a URL")
    if client is None or isinstance(client, Mapping):
        return open_store("/".join(part.rstrip("/") for part in (os.fspath(bucket), base_folder) if part), client)
    return client_of(client).store(bucket, base_folder)
