"""ObjectStream: the objects of a store as samples, in the order of the listing, while the listing is still in progress.

`RemoteDataset` assigns an index to each sample, so it lists all of them first. A stream has neither indices nor a length: it
requests the next page of the listing after it has read the objects of the previous one, and holds only the objects that are being
fetched.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from shmload.errors import ObjectMissing
from shmload.formats.compression import split_compression
from shmload.formats.file_names import is_hidden
from shmload.formats.known_formats import layout_of
from shmload.formats.plain_files import PlainFiles
from shmload.formats.tar.shard_index import KEY
from shmload.storage.open_store import open_store
from shmload.storage.store import Store, StoredObject

__all__ = ["ObjectStream"]

log = logging.getLogger("shmload")


def pass_over(samples: Iterator[Any], number: int, what: str) -> None:
    """Skip the first `number` samples, because they are already packed. `what` is the beginning of the error's message.

    Raises:
        ValueError: there are fewer samples, so the packed ones would wrongly be kept.
    """
    if (found := sum(1 for _ in islice(samples, number))) < number:
        raise ValueError(
            f"{what} after {found} samples, but {number} that began with the same ones are packed already: give another seed to "
            "pack these again"
        )


class ObjectStream:
    """An iterable of samples `{"__key__": name, extension: bytes}`, one for each object below a URL.

    Objects with a name in their path that begins with . or _ are ignored, as in all folders.

    Args:
        url: URL of a folder, or a store, which must support listing; every object below it is a sample.
        client: as for `open_store`.
        at_once: number of objects that are fetched in parallel and held.
    Raises:
        StoreError: while iterating: the store does not answer, or an object has changed since it was listed.
        ObjectMissing: while iterating: all objects in the listing are ignored.
        ValueError: while iterating: an object is a shard with its own samples; a packing to be continued has more samples than the
            listing.
    Thread/process safety: each iteration has its own threads.
    """

    def __init__(self, url: str | Store, client: Any = None, *, at_once: int = 16) -> None:
        if at_once < 1:
            raise ValueError(f"at_once must be at least 1, got {at_once}")
        self._store = open_store(url, client) if isinstance(url, str) else url
        self._at_once = at_once

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.starting_at(0)

    def starting_at(self, number: int) -> Iterator[dict[str, Any]]:
        """Iterate, beginning with a later object.

        Args:
            number: position of the first object in the listing; earlier ones are listed but not fetched.
        """
        listed = self._visible()
        under_way: deque[Future[dict[str, Any]]] = deque()
        pool = ThreadPoolExecutor(self._at_once, "shmload-objects")
        try:
            pass_over(listed, number, f"the listing of {self._store.url} ended")
            for found in listed:
                under_way.append(pool.submit(self._sample, found))
                if len(under_way) == self._at_once:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _visible(self) -> Iterator[StoredObject]:
        """Yield the objects of the listing that are not hidden."""
        first_hidden, num_hidden, num_visible = "", 0, 0
        for found in getattr(self._store, "as_listed", self._store.list_objects)():
            if is_hidden(found.key):
                num_hidden += 1
                first_hidden = first_hidden or found.key
                continue
            num_visible += 1
            yield found
        if num_hidden:
            what = f"{num_hidden} objects are ignored because a name in their path begins with . or _, such as {first_hidden!r}"
            log.debug("%s: %s", self._store.url, what)
            if not num_visible:
                raise ObjectMissing(f"{self._store.url}: contains no samples: {what}; give the folder that they are in")

    def _sample(self, found: StoredObject) -> dict[str, Any]:
        if not isinstance(layout_of(split_compression(found.key)[0]), PlainFiles | None):
            raise ValueError(
                f"{self._store.url}/{found.key} is a shard of many samples, and here each object is one: read it by RemoteDataset, "
                "which `shmload pack` does without --in-order"
            )
        folder, slash, name = found.key.rpartition("/")
        stem, dot, extension = name.rpartition(".")
        if not (stem and dot and extension):
            stem, extension = name, "data"
        data = bytes(self._store.get(found.key, etag=found.etag or None))
        return {KEY: folder + slash + stem.replace(".", "_").strip(), extension.lower(): data}
