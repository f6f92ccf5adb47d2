"""Writing a bucket: one request for small objects, parts for large ones, whole or not at all.

A request that failed may have been done all the same. Writing the same bytes again is harmless; where an object is to be new, one
that is there after such a failure and holds these very bytes is taken for ours.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from shmload.errors import ObjectExists, ObjectMissing, StoreError
from shmload.storage.retry import Tries, Unsure
from shmload.storage.s3_errors import code_and_message, local_name
from shmload.storage.store import StoredObject
from shmload.storage.web import etag_of

if TYPE_CHECKING:
    from shmload.storage.s3 import S3Store

__all__ = ["delete", "put", "put_file"]

_PART_NBYTES = 16 << 20
_MOST_PARTS = 10_000  # S3's own limit
_AT_ONCE = 1000  # objects in one request to delete


def put(store: S3Store, key: str, data: memoryview, *, only_if_absent: bool) -> StoredObject:
    """Writes one object by one request."""
    url = store.url_of(key)
    doing = f"write {url}"
    unsure = False
    tries = Tries(store.patience, doing)
    if only_if_absent and _is_there(store, key):  # a server that knows no conditions would overwrite
        raise ObjectExists(f"there is an object already, and it was to be new: {url}")
    while True:
        try:
            headers = {"If-None-Match": "*"} if only_if_absent else {}
            with store.request("PUT", key, headers=headers, body=data) as answer:
                if answer.status == 200:
                    answer.text()
                    return StoredObject(key, len(data), etag_of(answer, url))
                if only_if_absent and answer.status == 412:
                    if unsure and bytes(store.get(key)) == data:
                        return store.head(key)
                    raise ObjectExists(f"there is an object already, and it was to be new: {url}")
                raise store.failure(answer, url, doing)
        except Unsure as failure:
            unsure = True
            tries.failed(failure)


def put_file(store: S3Store, key: str, path: Path) -> StoredObject:
    """Writes a file's bytes; what is larger than one part is sent in parts, as many at once as the client says."""
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes <= _PART_NBYTES:
            return put(store, key, memoryview(file.read()), only_if_absent=False)
        return _Upload(store, key, file.fileno(), nbytes).run()


def delete(store: S3Store, keys: Sequence[str]) -> None:
    """Removes objects, a thousand in one request."""
    doing = f"delete objects of {store.url}"
    for begin in range(0, len(keys), _AT_ONCE):
        some = keys[begin : begin + _AT_ONCE]
        if not store.repeatedly(doing, partial(_delete_some, store, some, doing)):
            for key in some:
                store.repeatedly(f"delete {store.url_of(key)}", partial(_delete_one, store, key))


def _delete_some(store: S3Store, keys: Sequence[str], doing: str) -> bool:
    """Whether the server could do it; some know no request for many."""
    names = "".join(f"<Object><Key>{escape(store.prefix + key)}</Key></Object>" for key in keys)
    body = f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Quiet>true</Quiet>{names}</Delete>'.encode()
    md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    headers = {"Content-MD5": md5, "Content-Type": "application/xml"}
    with store.request("POST", None, query={"delete": ""}, headers=headers, body=memoryview(body)) as answer:
        if answer.status in (405, 501):
            return False
        if answer.status != 200:
            raise store.failure(answer, store.url, doing)
        text = answer.text()
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise Unsure(f"the server's answer cannot be read ({error})") from None
    if local_name(root) != "DeleteResult":
        raise Unsure(f"the server sent {local_name(root)!r} where a list of what was deleted was asked for")
    for element in root:
        if local_name(element) == "Error":
            said = {local_name(child): child.text or "" for child in element}
            if said.get("Code") not in ("NoSuchKey", "InternalError", "SlowDown"):
                raise StoreError(
                    f"cannot delete s3://{store.bucket}/{said.get('Key')}: the server says {said.get('Code')} "
                    f"({said.get('Message', '')[:200]}); let the bucket's owner allow it"
                )
            if said["Code"] != "NoSuchKey":
                raise Unsure(f"the server says {said['Code']} of {said.get('Key')}")
    return True


def _delete_one(store: S3Store, key: str) -> None:
    url = store.url_of(key)
    with store.request("DELETE", key) as answer:
        if answer.status not in (200, 204, 404):
            raise store.failure(answer, url, f"delete {url}")
        answer.text()


def _is_there(store: S3Store, key: str) -> bool:
    try:
        store.head(key)
    except ObjectMissing:
        return False
    return True


class _Upload:
    """One object sent in parts. A part is read from the file when its turn comes and dropped when it is there."""

    def __init__(self, store: S3Store, key: str, fd: int, nbytes: int) -> None:
        self.store = store
        self.key = key
        self.url = store.url_of(key)
        self.doing = f"write {self.url}"
        self.fd = fd
        self.nbytes = nbytes
        self.part_nbytes = max(_PART_NBYTES, -(-nbytes // _MOST_PARTS))
        self.given_up = False

    def run(self) -> StoredObject:
        """Sends it all, or takes away what was sent."""
        upload = self.store.repeatedly(self.doing, self._begin)
        try:
            with ThreadPoolExecutor(self.store.parallel, "shmload-store") as threads:
                try:
                    offsets = range(0, self.nbytes, self.part_nbytes)
                    parts = list(threads.map(lambda i: self._send(upload, i + 1, offsets[i]), range(len(offsets))))
                except BaseException:
                    self.given_up = True
                    threads.shutdown(wait=False, cancel_futures=True)
                    raise
            self._complete(upload, parts)
        except BaseException:
            self._abort(upload)
            raise
        found = self.store.head(self.key)
        if found.nbytes != self.nbytes:
            raise StoreError(
                f"{self.url} has {found.nbytes:,} bytes, not the {self.nbytes:,} that were sent: another program writes there "
                "too, or the server lost the parts. Write each object from one place"
            )
        return found

    def _begin(self) -> str:
        with self.store.request("POST", self.key, query={"uploads": ""}, body=memoryview(b"")) as answer:
            if answer.status != 200:
                raise self.store.failure(answer, self.url, self.doing)
            text = answer.text()
        try:
            names = {local_name(element): element.text or "" for element in ElementTree.fromstring(text)}
            return names["UploadId"]
        except (ElementTree.ParseError, KeyError):
            raise Unsure("the server's answer names no upload") from None

    def _send(self, upload: str, number: int, offset: int) -> str:
        part = memoryview(bytearray(min(self.part_nbytes, self.nbytes - offset)))
        done = 0
        while done < len(part):
            got = os.preadv(self.fd, [part[done:]], offset + done)
            if got == 0:
                raise StoreError(
                    f"cannot {self.doing}: the file became shorter while it was sent. Write files before sending them"
                )
            done += got
        query = {"partNumber": str(number), "uploadId": upload}

        def try_once() -> str:
            if self.given_up:
                raise StoreError(f"cannot {self.doing}: another part failed")
            with self.store.request("PUT", self.key, query=query, body=part) as answer:
                if answer.status != 200:
                    raise self.store.failure(answer, self.url, self.doing)
                answer.text()
                return etag_of(answer, self.url)

        return self.store.repeatedly(self.doing, try_once)

    def _complete(self, upload: str, parts: Sequence[str]) -> None:
        """Makes the parts an object. An answer of 200 may still hold an error, as it begins before the server is done."""
        names = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{escape(etag)}&quot;</ETag></Part>"
            for number, etag in enumerate(parts, 1)
        )
        body = memoryview(f"<CompleteMultipartUpload>{names}</CompleteMultipartUpload>".encode())
        unsure = False
        tries = Tries(self.store.patience, self.doing)
        while True:
            try:
                query = {"uploadId": upload}
                with self.store.request("POST", self.key, query=query, body=body) as answer:
                    if answer.status == 404 and unsure:
                        return  # by a try whose answer was lost, or by nobody: a look at the object tells
                    if answer.status != 200:
                        raise self.store.failure(answer, self.url, self.doing)
                    text = answer.text()
                try:
                    root = ElementTree.fromstring(text)
                except ElementTree.ParseError:
                    raise Unsure("the server's answer cannot be read") from None
                if local_name(root) == "Error":
                    code, message = code_and_message(text)
                    raise Unsure(f"the server says {code} ({message})")
                return
            except Unsure as failure:
                unsure = True
                tries.failed(failure)

    def _abort(self, upload: str) -> None:
        """Takes the parts away; what cannot be reached now, the bucket's own rule for unfinished uploads removes."""

        def try_once() -> None:
            with self.store.request("DELETE", self.key, query={"uploadId": upload}) as answer:
                if answer.status not in (200, 204, 404):
                    raise self.store.failure(answer, self.url, self.doing)

        try:
            self.store.repeatedly(self.doing, try_once)
        except StoreError:
            pass
