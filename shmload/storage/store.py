"""What every store offers: objects under keys, read whole or by ranges, written whole.

Keys are relative to the store's root and use "/" between parts, whatever the store is. An object is written as a whole or not at
all: nobody ever reads half of one. What changed between two reads is seen by its `etag`.

Keys of objects: parts joined by "/", that name nothing outside the store's root and mean the same in every store.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import Buffer

from shmload.errors import StoreError

__all__ = [
    "Store",
    "StoredObject",
    "checked_key",
    "checked_prefix",
    "is_key",
]


def is_key(key: str) -> bool:
    """Whether the text can name an object: relative, no empty part, no "." or "..", nothing unprintable."""
    return (
        all(part not in ("", ".", "..") for part in key.split("/")) and key.isprintable() and len(key.encode()) <= 1024
    )


def checked_key(key: str, url: str) -> str:
    """The key, if it is one.

    Raises:
        StoreError: it is none; `url` says of which store.
    """
    if not is_key(key):
        raise StoreError(
            f'{key!r} is no key of {url}: a key is relative to it, has no empty part and no "." or "..", nothing '
            f"unprintable, and at most 1,024 bytes. Try {posixpath.normpath('/' + key).strip('/')!r}"
        )
    return key


def checked_prefix(prefix: str, url: str) -> str:
    """A folder's key with a "/" behind it; empty for the root."""
    trimmed = prefix.removesuffix("/")
    return checked_key(trimmed, url) + "/" if trimmed else ""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a store."""

    key: str  # relative to the store's root
    nbytes: int
    etag: str  # another one whenever the bytes may be others


class Store(Protocol):
    """Objects under keys. Picklable; opened again in each process that uses it, so it lives through fork and spawn.

    Every method raises StoreError, which says the URL, what was asked and what the store answered, never a credential; of an object
    that is not there, its subclass ObjectMissing. What may pass is tried again with growing pauses before that.
    """

    @property
    def url(self) -> str:
        """The root, without credentials."""

    def head(self, key: str) -> StoredObject:
        """What is there, without its bytes."""

    def get(self, key: str, *, etag: str | None = None) -> Buffer:
        """All bytes of an object; with `etag`, of that version or an error."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None) -> list[Buffer]:
        """Bytes at (offset, nbytes), several at once; each of the length asked for."""

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        """As many bytes as `out` has, from `offset`, straight into it, by ranges in parallel; the GIL is free meanwhile."""

    def put(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> StoredObject:
        """Writes an object; with `only_if_absent` an object that is there stays, and ObjectExists is raised."""

    def put_file(self, key: str, path: Path) -> StoredObject:
        """Writes a file's bytes, in parts if it is large. Memory stays at a few parts."""

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        """All objects under the folder `prefix` ("a" holds "a/b" but not "ab"), in order of their keys, however many."""

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; one that is not there is no error."""
