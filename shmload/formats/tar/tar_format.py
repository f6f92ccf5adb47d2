"""The tar format as written by WebDataset: the members with the same key are one sample.

If a remote shard has no index, `scan_remote` builds it from the headers. The shard is represented by anonymous memory of its size,
to which the bytes that are read are copied at their offsets. Then the same scan runs as for a whole shard, with the same checks and
the same result. While members are small, pieces of a few MiB are read, because those contain many headers. The contents of large
members are not read, and their pages take no memory.
"""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from shmload._core import tar
from shmload.errors import ShardCorrupt
from shmload.formats.block_index import PIECE, Read
from shmload.formats.head import Head
from shmload.formats.summary import VALUES_SEEN, Sizes, Summary, fields_seen, nbytes_of
from shmload.formats.tar.shard_index import BLOCK, KEY, META_LIMIT, SUFFIX, ShardIndex, load_index, pack_index, unpack_index
from shmload.formats.tar.tar_dataset import TarDataset


def scan_remote(url: str, nbytes: int, read: Read) -> bytes:
    """Build the index of a remote shard in its saved form (shard_index.py), reading only what is necessary.

    Args:
        url: URL of the shard, for errors.
        nbytes: size of the shard.
        read: (offset, nbytes) -> the bytes there.
    Raises:
        ShardCorrupt: it is not a valid tar file; names the offset and the cause.
    """
    if nbytes < BLOCK:
        raise ShardCorrupt(f"{url}: at byte 0: a tar file has at least one block of {BLOCK} bytes, this has {nbytes}")
    shard = mmap.mmap(-1, nbytes)
    headers = tar.TarHeaders()
    have, at = range(0), 0  # the piece that was read last; everything before it has been scanned

    def need(offset: int, size: int) -> bytes:
        """Return bytes of the shard; fewer than requested at its end."""
        nonlocal have
        end = min(offset + size, nbytes)
        while not (offset in have and end <= have.stop) and offset < end:
            begin = have.stop if offset in have else offset
            stop = min(max(end, begin + PIECE), nbytes)
            shard[begin:stop] = bytes(read(begin, stop - begin))
            have = range(have.start if begin == have.stop else begin, stop)
        return shard[offset:end]

    while at + BLOCK <= nbytes:
        kind = headers.read_header(need(at, BLOCK))
        if kind < 0:
            break  # the scan reports the error
        at += BLOCK
        if kind == tar.END:
            need(at, nbytes - at)  # the scan checks that these are only zeros
            break
        if kind not in (tar.FILE, tar.OTHER):
            if headers.size > META_LIMIT:
                raise ShardCorrupt(f"{url}: at byte {at}: a name of {headers.size} bytes; at most {META_LIMIT} are read")
            if not headers.read_payload(kind, need(at, headers.size)):
                break
        at += -(-headers.size // BLOCK) * BLOCK
    return pack_index(url, shard)


@dataclass(frozen=True)
class Tar:
    """Tar files as written by WebDataset. A sample is the members of one key, as bytes by extension."""

    name: ClassVar[str] = "tar"
    title: ClassVar[str] = "tar"
    endings: ClassVar[tuple[str, ...]] = (".tar",)
    index_suffix: ClassVar[str] = SUFFIX

    def recognize(self, head: Head) -> bool:
        block = head.begin[:BLOCK]
        if len(block) < BLOCK or head.compression == "zlib":
            return False
        if not any(block):  # an archive without members has only its end marker
            return not any(head.begin[: 2 * BLOCK]) and len(head.begin) >= 2 * BLOCK
        try:
            checksum = int(block[148:156].strip(b" \0") or b"x", 8)
        except ValueError:
            return False
        return checksum == sum(block) - sum(block[148:156]) + 8 * 32

    def index(self, url: str, nbytes: int, read: Read) -> ShardIndex:
        found = self.unpack(url, self.scan(url, nbytes, read), nbytes)
        assert found is not None
        return found

    def decode(self, index: ShardIndex, data: memoryview, sample: int) -> dict[str, Any]:
        members = index.members(sample)
        begin = members_span(members)[0]
        return {extension: bytes(data[offset - begin : offset - begin + size]) for extension, offset, size in members}

    def describe(self, head: Head, num_samples: int) -> Summary:
        notes, nbytes, counts = [], [], Counter[str]()
        opened: Any = TarDataset(head.path, cache=False)
        if head.compression:
            from shmload.formats.tar.stream import TarStream  # imports torch

            notes = [f"compressed by {head.compression}: it can only be read in order, by TarStream"]
            opened = TarStream(head.path, rank=0, world_size=1)
            for sample in TarStream(head.path, decode=False, rank=0, world_size=1):
                members = {name: value for name, value in sample.items() if name != KEY}
                counts.update(list(members))
                nbytes.append(nbytes_of(members))
        else:  # the index is sufficient
            index = opened._opened().indexes[0]
            numbers = np.bincount(index.member_extensions, minlength=len(index.extensions))
            counts.update(dict(zip(index.extensions, numbers.tolist(), strict=True)))
            ends = np.cumsum(np.append(np.uint64(0), index.sizes))
            nbytes = np.diff(ends[index.first]).tolist()
        samples = list(islice(opened, max(num_samples, VALUES_SEEN)))
        fields = fields_seen(samples, counts, len(nbytes))
        return Summary(str(head.path), self.title, head.nbytes, len(nbytes), fields, Sizes.of(nbytes), samples[:num_samples], notes)

    def write_index(self, path: str) -> int:
        return int(load_index(path).num_samples)

    def scan(self, url: str, nbytes: int, read: Read) -> bytes:
        return scan_remote(url, nbytes, read)

    def pack(self, url: str, data: Any) -> bytes:
        return pack_index(url, data)

    def unpack(self, url: str, packed: Any, nbytes: int) -> ShardIndex | None:
        return unpack_index(url, packed, nbytes)

    def known(self, url: str, nbytes: int) -> None:
        return None

    def sample(self, index: ShardIndex, number: int, read: Read) -> dict[str, Any]:
        return self.decode(index, memoryview(read(*self.span(index, number))), number)

    def span(self, index: ShardIndex, number: int) -> tuple[int, int]:
        return members_span(index.members(number))


def members_span(members: list[tuple[str, int, int]]) -> tuple[int, int]:
    """Return the (offset, nbytes) of the range that contains all members of a sample, given `ShardIndex.members`."""
    begin = min(offset for _, offset, _ in members)
    return begin, max(offset + size for _, offset, size in members) - begin
