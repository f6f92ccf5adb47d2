"""The base of formats whose shards are consecutive blocks: a subclass finds the blocks and decodes them."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import Counter
from itertools import islice
from typing import Any, ClassVar

from shmload.errors import ShardCorrupt, ShmloadError
from shmload.formats.block_index import Read, RecordIndex
from shmload.formats.head import Head
from shmload.formats.summary import SIZED, Sizes, Summary, fields_seen, nbytes_of

__all__ = ["BlockFormat"]


class BlockFormat(ABC):
    """A `ShardFormat` whose shards are consecutive blocks. A subclass is a frozen dataclass with `name`, `index` and `decode`.

    Files are recognized by the endings of their names and described by their first samples, unless a subclass overrides this.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    endings: ClassVar[tuple[str, ...]] = ()

    @property
    def index_name(self) -> str:
        """Return the format's name and the options that decide where blocks begin. A kept index with another name is invalid."""
        return self.name

    @abstractmethod
    def index(self, url: str, nbytes: int, read: Read) -> RecordIndex:
        """Return the positions of the blocks of a shard; see `Format.index`."""

    @abstractmethod
    def decode(self, index: RecordIndex, data: memoryview, sample: int) -> dict[str, Any]:
        """Decode one sample from the bytes of its block; see `Format.decode`."""

    def recognize(self, head: Head) -> bool:
        return not head.is_folder and bool(self.endings) and head.stem.endswith(self.endings)

    def describe(self, head: Head, num_samples: int) -> Summary:
        data = memoryview(head.read())
        index = self.index(str(head.path), len(data), lambda at, nbytes: data[at : at + nbytes])
        every = (self.sample(index, n, lambda at, nbytes: data[at : at + nbytes]) for n in range(index.num_samples))
        seen = list(islice(every, max(min(SIZED, index.num_samples), num_samples)))
        fields = fields_seen(seen, Counter(name for sample in seen for name in sample), len(seen))
        notes = [f"compressed by {head.compression}: {len(data):,} bytes"] if head.compression else []
        sizes = Sizes.of(map(nbytes_of, seen))
        title = self.title or self.name
        return Summary(str(head.path), title, head.nbytes, index.num_samples, fields, sizes, seen[:num_samples], notes)

    def scan(self, url: str, nbytes: int, read: Read) -> bytes:
        return self._packed(url, nbytes, self.index(url, nbytes, read))

    def pack(self, url: str, data: Any) -> bytes:
        whole = memoryview(data).cast("B")
        return self.scan(url, len(whole), lambda offset, nbytes: whole[offset : offset + nbytes])

    def unpack(self, url: str, packed: Any, nbytes: int) -> RecordIndex | None:
        return RecordIndex.unpack(url, packed, self.index_name, nbytes)

    def known(self, url: str, nbytes: int) -> RecordIndex | None:
        return None

    def sample(self, index: RecordIndex, number: int, read: Read) -> dict[str, Any]:
        try:
            return self.decode(index, memoryview(read(*self.span(index, number))).cast("B"), number)
        except ShmloadError:
            raise
        except (ValueError, LookupError, TypeError, ArithmeticError, struct.error, EOFError, RecursionError) as error:
            raise ShardCorrupt(f"{index.path}: sample {number}, at byte {self.span(index, number)[0]}: {error}") from error

    def span(self, index: RecordIndex, number: int) -> tuple[int, int]:
        return index.span(index.block(number)[0])

    def _packed(self, url: str, nbytes: int, found: RecordIndex) -> bytes:
        if not found.is_sound(nbytes):
            raise ShardCorrupt(f"{url}: its {self.name} header names samples beyond its {nbytes} bytes, or out of order")
        return found.pack(self.index_name, nbytes)
