"""The packing of samples into shards: choose the generation, cut the order into shards, send them, and write the manifest.

The order of samples is cut into shards while it is packed, so the beginning of a shard depends on the sizes of all samples before
it. A packing that continues therefore keeps the complete shards at the beginning of the order and packs the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shmload import faults
from shmload.formats.tar.writer import archive_nbytes
from shmload.remote.manifest import Manifest
from shmload.remote.packing.encoded_samples import Files, MemberCoding, PackedParts, PackSource
from shmload.remote.packing.generation import Generation, manifest_of
from shmload.remote.packing.image_members import FloatImages
from shmload.remote.packing.pack_options import PackOptions
from shmload.remote.packing.pack_part import PackPart
from shmload.remote.packing.shard_file import ShardFile
from shmload.remote.packing.shard_record import ShardRecord
from shmload.remote.packing.shard_sender import NUM_THREADS, ShardSender
from shmload.remote.packing.spool import Spool
from shmload.storage.store import Store

logger = logging.getLogger("shmload")

NUM_PROBED = 8  # samples that distinguish one dataset from another
BATCH_NBYTES = 4 << 20
BATCH_SIZE_MAX = 256

_PICTURES = frozenset(("jpg", "png"))  # extensions of float images that are stored as pictures
_VERSION = 1  # of the encoding of samples; part of the generation's name


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
    """The packing of samples into a store, which `run` performs. Subclasses encode the samples, in order.

    Args:
        store: the folder to write to.
        options: the options.
        on_progress: called from time to time with the progress.
        total: number of samples; None if unknown.
    Attributes:
        num_found: number of shards that existed when it began.
        missing: parts that are not yet complete.
    """

    missing: Sequence[PackPart] = ()

    def __init__(
        self, store: Store, options: PackOptions, on_progress: Callable[[PackProgress], None] | None, total: int | None
    ) -> None:
        self._options, self._store, self._on_progress, self._total = options, store, on_progress, total
        self._part = PackPart(*options.part)
        self._span = (0, None) if total is None else self._part.span(total)  # range of positions in the order to pack
        self._records: list[ShardRecord] = []  # of the shards that are in the store
        self.num_found = self._num_packed = self._first = 0

    def _batches(self, at: int) -> Iterator[tuple[memoryview, list[int]]]:
        """Yield the records from position `at`, in order: the bytes of a batch, and the offsets where its records end."""
        raise NotImplementedError

    # ------------------------------------------------------------ the generation

    def _float_images(self) -> list[FloatImages]:
        """Return the ways to store images of floats, by preference; only that of the dataset that is appended to, if it has one."""
        there = manifest_of(self._store) if self._options.append else None
        extensions = set() if there is None else {extension.partition(".")[0] for extension in there.extensions}
        if ("npy" in extensions) == bool(extensions & _PICTURES):
            return ["png", "npy"]
        return ["npy"] if "npy" in extensions else ["png"]

    def _digest(self, probes: list[bytes], source: PackSource | None, float_images: FloatImages) -> str:
        """Return a hash of the arguments and the dataset, for the name of the generation.

        Args:
            probes: records of some samples.
            source: the dataset, if it has a length.
            float_images: how images of floats are stored.
        """
        options, digest = self._options, hashlib.sha256()
        arguments = (options.seed, options.maxsize, options.maxcount, options.quality, options.restart_markers)
        digest.update(json.dumps((_VERSION, self._total, *arguments)).encode("ascii"))
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

    # ------------------------------------------------------------ running

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

    def _num_workers(self, num_batches: int | None) -> int:
        """Return the number of workers that can be used for a number of batches of samples; None if it is unknown."""
        wanted = self._options.workers
        found = min(wanted, len(os.sched_getaffinity(0)))
        if num_batches is not None:
            found = min(found, num_batches)
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
