"""Listing a bucket: pages, gathered and put in order.

All pages are read before the first object is given (about 200 bytes an object): the order is then right also where a server's is
not, and nobody works on the beginning of a listing whose end cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from shmload.errors import StoreError
from shmload.storage.keys import is_key
from shmload.storage.retry import Unsure
from shmload.storage.store import StoredObject
from shmload.storage.web import unquoted

if TYPE_CHECKING:
    from shmload.storage.s3 import S3Store

__all__ = ["list_objects"]

_PAGE = 1000  # objects in one answer: as many as servers give


def list_objects(store: S3Store, prefix: str) -> Iterator[StoredObject]:
    """The objects whose keys begin with `prefix`, in order of their keys; names that are no keys of ours are left out."""
    found: list[StoredObject] = []
    token: str | None = None
    doing = f"list {store.url}/{prefix}"
    while True:
        page, following = store.repeatedly(doing, partial(_page, store, prefix, token, doing))
        found += page
        if following is None:
            break
        if following == token:
            raise StoreError(f"cannot {doing}: {store.client.endpoint} gives the same page again and again")
        token = following
    found.sort(key=lambda each: each.key)
    return iter(found)


def _page(store: S3Store, prefix: str, token: str | None, doing: str) -> tuple[list[StoredObject], str | None]:
    after: dict[str, Any] = {} if token is None else {"ContinuationToken": token}
    wait_s = store.patience.stall_s
    page = store.call("list_objects_v2", doing, wait_s=wait_s, Prefix=store.prefix + prefix, MaxKeys=_PAGE, **after)
    try:
        truncated = page["IsTruncated"]  # every listing says it, and botocore takes any XML for one
        listed = [(each["Key"], each["Size"], unquoted(each["ETag"])) for each in page.get("Contents", ())]
        following = page["NextContinuationToken"] if truncated else None
    except KeyError as error:
        raise Unsure(f"the server sent no listing (there is no {error.args[0]} in it)") from None
    found = []
    for name, nbytes, etag in listed:
        if not name.startswith(store.prefix):
            raise Unsure(f"the server listed {name!r}, which is not below {store.prefix!r}")
        key = name[len(store.prefix) :]
        if is_key(key):  # not so the markers "folder/" of other programs
            found.append(StoredObject(key, nbytes, etag))
    return found, following
