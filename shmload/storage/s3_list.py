"""Listing a bucket: pages of XML, gathered and put in order.

All pages are read before the first object is given (about 200 bytes an object): the order is then right also where a server's is
not, and nobody works on the beginning of a listing whose end cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from shmload.errors import StoreError
from shmload.storage.keys import is_key
from shmload.storage.retry import Unsure
from shmload.storage.s3_errors import local_name
from shmload.storage.store import StoredObject

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
    query = {"list-type": "2", "encoding-type": "url", "max-keys": str(_PAGE), "prefix": store.prefix + prefix}
    if token is not None:
        query["continuation-token"] = token
    with store.request("GET", None, query=query) as answer:
        if answer.status != 200:
            raise store.failure(answer, store.url, doing)
        text = answer.text()
    try:
        root = ElementTree.fromstring(text)
        if local_name(root) != "ListBucketResult":
            raise Unsure(f"the server sent {local_name(root)!r} where a listing was asked for")
        return _parsed(store, root)
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise Unsure(f"the server sent no readable listing ({error})") from None


def _parsed(store: S3Store, root: ElementTree.Element) -> tuple[list[StoredObject], str | None]:
    above = {local_name(element): element.text or "" for element in root}
    encoded = above.get("EncodingType") == "url"
    found = []
    for element in root:
        if local_name(element) != "Contents":
            continue
        values = {local_name(child): child.text or "" for child in element}
        name = unquote_plus(values["Key"]) if encoded else values["Key"]
        if not name.startswith(store.prefix):
            raise ValueError(f"{name!r} is not below {store.prefix!r}")
        key = name[len(store.prefix) :]
        if is_key(key):  # not so the markers "folder/" of other programs
            found.append(StoredObject(key, int(values["Size"]), values["ETag"].strip('"')))
    if above.get("IsTruncated") != "true":
        return found, None
    return found, above["NextContinuationToken"]
