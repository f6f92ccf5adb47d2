"""The options of a packing, with their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shmload.formats.compression import zstd_pieces
from shmload.formats.encryption import SampleCipher
from shmload.formats.tar.member_compression import ZSTD_LEVEL
from shmload.formats.tar.writer import archive_nbytes, member_name
from shmload.remote.packing.encoded_samples import MemberCoding
from shmload.remote.packing.members import Serializers
from shmload.remote.packing.pack_part import MOST_PARTS

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
