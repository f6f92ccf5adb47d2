"""Writing a bucket: one request for small objects, parts for large ones, whole or not at all.

A request that failed may have been done all the same. Writing the same bytes again is harmless; where an object is to be new, one
that is there after such a failure and holds these very bytes is taken for ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmload.errors import ObjectExists, ObjectMissing, StoreError
from shmload.storage.retry import Tries, Unsure
from shmload.storage.store import StoredObject
from shmload.storage.web import unquoted

if TYPE_CHECKING:
    from shmload.storage.s3 import S3Store

__all__ = ["delete", "put", "put_file"]

_PART_NBYTES = 16 << 20
_MOST_PARTS = 10_000  # S3's own limit
_AT_ONCE = 1000  # objects in one request to delete


def put(store: S3Store, key: str, data: bytes, *, only_if_absent: bool) -> StoredObject:
    """Writes one object by one request."""
    url = store.url_of(key)
    doing = f"write {url}"
    unsure = False
    tries = Tries(store.patience, doing)
    if only_if_absent and _is_there(store, key):  # a server that knows no conditions would overwrite
        raise ObjectExists(f"there is an object already, and it was to be new: {url}")
    condition: dict[str, Any] = {"IfNoneMatch": "*"} if only_if_absent else {}
    while True:
        try:
            answer = store.call("put_object", doing, key=key, but=(412,), Body=data, **condition)
            if _status(answer) != 412:
                etag = answer.get("ETag")
                return StoredObject(key, len(data), unquoted(etag)) if etag else store.head(key)
            if (unsure or _was_repeated(answer)) and bytes(store.get(key)) == data:
                return store.head(key)
            raise ObjectExists(f"there is an object already, and it was to be new: {url}")
        except Unsure as failure:
            unsure = True
            tries.failed(failure)


def put_file(store: S3Store, key: str, path: Path) -> StoredObject:
    """Writes a file's bytes; what is larger than one part is sent in parts, as many at once as the client says."""
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes <= _PART_NBYTES:
            return put(store, key, file.read(), only_if_absent=False)
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
    listed = {"Objects": [{"Key": store.prefix + key} for key in keys], "Quiet": True}
    answer = store.call("delete_objects", doing, but=(405, 501), Delete=listed)
    if _status(answer) in (405, 501):
        return False
    for failed in answer.get("Errors", ()):
        name, code, message = (str(failed.get(each) or "") for each in ("Key", "Code", "Message"))
        if code in ("InternalError", "SlowDown"):
            raise Unsure(f"the server says {code} of {name}")
        if code != "NoSuchKey":
            raise StoreError(
                f"cannot delete s3://{store.bucket}/{name}: the server says {code} "
                f"({store.client.credentials.redacted(message[:200])}); let the bucket's owner allow it"
            )
    return True


def _delete_one(store: S3Store, key: str) -> None:
    store.call("delete_object", f"delete {store.url_of(key)}", key=key, but=(404,))


def _status(answer: Mapping[str, Any]) -> int:
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def _was_repeated(answer: Mapping[str, Any]) -> bool:
    """Whether a client of the user's has tried more than once by itself."""
    return bool(answer["ResponseMetadata"].get("RetryAttempts"))


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
        answer = self.store.call("create_multipart_upload", self.doing, key=self.key)
        try:
            return str(answer["UploadId"])
        except KeyError:
            raise Unsure("the server's answer names no upload") from None

    def _send(self, upload: str, number: int, offset: int) -> dict[str, Any]:
        part = bytearray(min(self.part_nbytes, self.nbytes - offset))
        view = memoryview(part)
        done = 0
        while done < len(part):
            got = os.preadv(self.fd, [view[done:]], offset + done)
            if got == 0:
                raise StoreError(
                    f"cannot {self.doing}: the file became shorter while it was sent. Write files before sending them"
                )
            done += got

        def try_once() -> dict[str, Any]:
            if self.given_up:
                raise StoreError(f"cannot {self.doing}: another part failed")
            sent = self._call("upload_part", upload, PartNumber=number, Body=part)
            try:
                return {"PartNumber": number, "ETag": sent["ETag"]}
            except KeyError:
                raise Unsure("the server's answer names no version of a part") from None

        return self.store.repeatedly(self.doing, try_once)

    def _complete(self, upload: str, parts: Sequence[dict[str, Any]]) -> None:
        """Makes the parts an object. An answer of 200 may still hold an error, which botocore sees."""
        unsure = False
        tries = Tries(self.store.patience, self.doing)
        while True:
            try:
                but = (404,) if unsure else ()  # done by a try whose answer was lost, or by nobody: the object tells
                self._call("complete_multipart_upload", upload, but=but, MultipartUpload={"Parts": parts})
                return
            except Unsure as failure:
                unsure = True
                tries.failed(failure)

    def _abort(self, upload: str) -> None:
        """Takes the parts away; what cannot be reached now, the bucket's own rule for unfinished uploads removes."""
        try:
            self.store.repeatedly(self.doing, partial(self._call, "abort_multipart_upload", upload, but=(404,)))
        except StoreError:
            pass

    def _call(self, operation: str, upload: str, **arguments: Any) -> dict[str, Any]:
        return self.store.call(operation, self.doing, key=self.key, UploadId=upload, **arguments)
