"""The interface of every store: objects under keys.

Keys are relative to the store's root and use "/" between parts in every store. An object is written as a whole or not at all, so no
reader ever sees half of one. A change between two reads shows in the object's `etag`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import Buffer

__all__ = ["Store", "StoredObject"]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a store.

    Attributes:
        key: key relative to the store's root.
        nbytes: length of the object.
        etag: version of the object; it changes whenever the bytes may have changed.
    """

    key: str
    nbytes: int
    etag: str


class Store(Protocol):
    """Objects under keys. Picklable; each process opens its own connections, so a store works after fork and spawn.

    Every method raises StoreError, which names the URL, the operation and the store's answer but no credentials, or its subclass
    ObjectMissing if the object does not exist. Transient errors are retried first, with growing pauses.
    """

    @property
    def url(self) -> str:
        """Return the URL of the root, without credentials."""

    def head(self, key: str) -> StoredObject:
        """Return the object's length and version without reading its bytes."""

    def get(self, key: str, *, etag: str | None = None) -> Buffer:
        """Return all bytes of an object, read-only. If `etag` is given, another version is an error."""

    def read_into(self, key: str, out: Buffer, *, offset: int = 0, etag: str | None = None) -> None:
        """Fill `out` with the object's bytes from `offset` on, by parallel ranges and without the GIL.

        It is an error if the object ends before `out` is full, changes while it is read, or has another version than `etag`.
        """

    def put(self, key: str, data: Buffer) -> StoredObject:
        """Write an object, replacing an older one. Return its length and version."""

    def put_file(self, key: str, path: Path) -> StoredObject:
        """Write a file's bytes as an object, like `put`, in parts if it is large. Only a few parts are in memory at once."""

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield all objects under the folder `prefix`, in order of their keys. "a" contains "a/b" but not "ab"."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing objects are skipped."""
