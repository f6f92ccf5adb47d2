"""`S3Store`: a bucket of an S3-compatible store, or a folder in it.

Reads are signed by botocore and use our own connections (transport.py), which receive directly into the caller's memory; boto3
takes 1.6 to 2 times the CPU for this. Writing, listing and deleting go through botocore's client.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from typing_extensions import Buffer

from shmload.errors import StoreError
from shmload.storage.botocore_client import create_botocore_client
from shmload.storage.botocore_modules import library
from shmload.storage.keys import checked_key, checked_prefix, is_listed
from shmload.storage.parallel_map import parallel_map
from shmload.storage.retry import TransientError
from shmload.storage.s3_errors import failure_of_call, failure_of_response
from shmload.storage.store import StoredObject
from shmload.storage.transport import Answer, Transport
from shmload.storage.web_reader import WebReader, unquoted

if TYPE_CHECKING:
    from shmload.storage.s3_endpoint import S3Endpoint

__all__ = ["S3Store"]

_PAGE = 1000  # objects in one answer, the maximum of most servers
_PART_NBYTES = 16 << 20  # larger objects are written in parts
_MOST_PARTS = 10_000  # S3's own limit


class S3Store(WebReader):
    """The objects of a bucket, or of a folder in it. Made by `Client.store` or `open_store`.

    Args:
        client: the store's endpoint.
        bucket: name of the bucket.
        folder: folder to which keys are relative.
    """

    def __init__(self, client: S3Endpoint, bucket: str, folder: str = "") -> None:
        if not bucket or "/" in bucket or not bucket.isprintable():
            raise StoreError(f"{bucket!r} is not a bucket's name: give the bucket alone, and the rest of the path as folder")
        library("botocore")  # raises here if botocore is not installed
        self.client = client
        self.bucket = bucket
        self.retry_policy = client.retry_policy
        self.parallel = client.parallel
        scheme, host = client.endpoint.split("://")
        in_path = client.path_style or "." in bucket  # a certificate for *.host covers one label only
        self._base = f"/{quote(bucket, safe='-_.~')}" if in_path else ""
        base_url = client.endpoint if in_path else f"{scheme}://{bucket}.{host}"
        self._transport = Transport(base_url, stall_s=client.retry_policy.stall_s, ca_file=client.ca_file)
        self._botocore_clients: dict[tuple[int, float], Any] = {}  # by process and by seconds to wait for an answer
        self.prefix = checked_prefix(folder.strip("/"), f"s3://{bucket}")
        self.url = f"s3://{bucket}/{self.prefix}".rstrip("/")

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        return iter(sorted(self.as_listed(prefix), key=lambda each: each.key))

    def as_listed(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield the objects in the server's order, which may not be that of the keys. Pages are requested as they are needed."""
        prefix = self.prefix + checked_prefix(prefix, self.url)
        doing = f"list s3://{self.bucket}/{prefix}"
        token: str | None = None
        while True:
            page, following = self.repeatedly(doing, partial(self._page, doing, prefix, token))
            yield from page
            if following is None:
                return
            if following == token:
                raise StoreError(f"cannot {doing}: {self.client.endpoint} returns the same page repeatedly")
            token = following

    def _page(self, doing: str, prefix: str, token: str | None) -> tuple[list[StoredObject], str | None]:
        """Return the page of a listing after `token`, and the next token, without invalid keys, such as markers of folders."""
        after: dict[str, Any] = {} if token is None else {"ContinuationToken": token}
        stall_s = self.client.retry_policy.stall_s
        page = self.call("list_objects_v2", doing, wait_s=stall_s, Prefix=prefix, MaxKeys=_PAGE, **after)
        try:
            following = page["NextContinuationToken"] if page["IsTruncated"] else None  # botocore accepts any XML as a listing
            listed = [(each["Key"], each["Size"], unquoted(each["ETag"])) for each in page.get("Contents", ())]
        except KeyError as error:
            raise TransientError(f"the server's answer is not a listing: it lacks {error.args[0]}") from None
        if not all(name.startswith(self.prefix) for name, _, _ in listed):
            raise TransientError(f"the server sent another listing: some of its keys are not below {self.prefix!r}")
        keys = [name.removeprefix(self.prefix) for name, _, _ in listed]
        return [StoredObject(key, *each[1:]) for key, each in zip(keys, listed, strict=True) if is_listed(key, self.url)], following

    def delete(self, keys: Iterable[str]) -> None:
        given_up = threading.Event()

        def delete_one(key: str) -> None:
            self._call_again("delete_object", f"delete {self.url_of(key)}", key, is_over=given_up.is_set, but=(404,))

        parallel_map(delete_one, [checked_key(key, self.url) for key in keys], self.parallel, given_up)

    def put(self, key: str, data: Buffer) -> StoredObject:
        doing = f"write {self.url_of(key)}"
        etag = self._call_again("put_object", doing, key, "ETag", Body=bytes(data))
        return StoredObject(key, len(memoryview(data).cast("B")), unquoted(etag))

    def put_file(self, key: str, path: Path) -> StoredObject:
        with open(path, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes <= _PART_NBYTES:
                return self.put(key, file.read())
            return self._put_parts(key, file.fileno(), nbytes)

    def _put_parts(self, key: str, fd: int, nbytes: int) -> StoredObject:
        """Write an object in parts, several at once. Each part is read from the file when it is sent."""
        url = self.url_of(key)
        doing = f"write {url}"
        part_nbytes = max(_PART_NBYTES, -(-nbytes // _MOST_PARTS))

        upload = self._call_again("create_multipart_upload", doing, key, "UploadId")

        given_up = threading.Event()

        def send(offset: int) -> dict[str, Any]:
            part = os.pread(fd, min(part_nbytes, nbytes - offset), offset)
            if len(part) < min(part_nbytes, nbytes - offset):
                raise StoreError(f"cannot {doing}: the file became shorter while it was sent. Finish files before sending them")
            number = offset // part_nbytes + 1
            named = {"UploadId": upload, "PartNumber": number}
            etag = self._call_again("upload_part", doing, key, "ETag", is_over=given_up.is_set, Body=part, **named)
            return {"PartNumber": number, "ETag": etag}

        try:
            parts = parallel_map(send, range(0, nbytes, part_nbytes), self.parallel, given_up)
            num_tries = count()

            def complete() -> None:
                # 404 after a try whose answer was lost: that try succeeded, or none did, which the object's length will show
                but = (404,) if next(num_tries) else ()
                self.call("complete_multipart_upload", doing, key=key, but=but, UploadId=upload, MultipartUpload={"Parts": parts})

            self.repeatedly(doing, complete)
        except BaseException:
            with suppress(StoreError):  # the bucket's rule for unfinished uploads removes the parts later if this fails
                self._call_again("abort_multipart_upload", doing, key, UploadId=upload, but=(404,))
            raise
        found = self.head(key)
        if found.nbytes != nbytes:
            raise StoreError(
                f"{url} has {found.nbytes:,} bytes, not the {nbytes:,} that were sent: another program writes there too, or the "
                "server lost parts. Write each object from one place"
            )
        return found

    def _call_again(
        self, operation: str, doing: str, key: str, gives: str | None = None, is_over: Callable[[], bool] = bool, **arguments: Any
    ) -> Any:
        """Call an operation, with retries. Return the entry `gives` of its answer; an answer without it counts as failed."""

        def try_once() -> Any:
            answer = self.call(operation, doing, key=key, **arguments)
            if gives is not None and gives not in answer:
                raise TransientError(f"the server's answer has no {gives}")
            return answer[gives] if gives is not None else None

        return self.repeatedly(doing, try_once, is_over)

    def url_of(self, key: str) -> str:
        return f"{self.url}/{checked_key(key, self.url)}"

    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        target = f"{self._base}/{quote(self.prefix + checked_key(key, self.url), safe='/-_.~')}"
        full = {"Host": self._transport.netloc, "Accept-Encoding": "identity", "User-Agent": "shmload", **headers}
        request = library("botocore.awsrequest").AWSRequest(method, self._transport.base_url + target, full)
        if not self.client.credentials.anonymous:
            signer = library("botocore.auth").S3SigV4Auth
            signer(self.client.credentials.frozen(), "s3", self.client.region).add_auth(request)
        return self._transport.request(method, target, request.headers)  # their repr shows no headers, which include a token

    def call(
        self, operation: str, doing: str, *, key: str | None = None, but: Collection[int] = (), wait_s: float = 0, **arguments: Any
    ) -> dict[str, Any]:
        """Send one request by botocore and return its answer.

        Args:
            operation: name of botocore's method.
            doing: the operation in words, for the error.
            key: key of the object; None if the request is about the bucket.
            but: statuses that do not count as failures; the answer is then empty.
            wait_s: seconds to wait for the answer; 0 is the policy's timeout, as for writes.
            arguments: further arguments of the method.
        """
        if key is not None:
            arguments["Key"] = self.prefix + key
        exceptions = library("botocore.exceptions")
        failures = (exceptions.BotoCoreError, exceptions.ClientError, library("botocore.parsers").ResponseParserError)
        try:
            answer: dict[str, Any] = getattr(self._botocore_client(wait_s), operation)(Bucket=self.bucket, **arguments)
            if answer["ResponseMetadata"]["HTTPHeaders"]:
                return answer
            failure: StoreError | TransientError = TransientError("the server closed the connection after its first line")
        except failures as error:
            if (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode") in but:
                return {}
            failure = failure_of_call(error, self.url if key is None else self.url_of(key), doing, self.client)
        raise failure

    def _botocore_client(self, wait_s: float) -> Any:
        kind = os.getpid(), wait_s or self.client.retry_policy.timeout_s  # two processes cannot share a connection
        if kind not in self._botocore_clients:
            self._botocore_clients[kind] = create_botocore_client(self.client, kind[1])
        return self._botocore_clients[kind]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_botocore_clients": {}}

    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | TransientError:
        try:
            body = answer.text()
        except TransientError:
            body = b""
        parser = library("botocore.parsers").create_parser("rest-xml")
        status = max(answer.status, 301)  # botocore's parser treats lower statuses as successes
        response = parser.parse({"status_code": status, "headers": dict(answer.headers), "body": body}, None)
        response["ResponseMetadata"]["HTTPStatusCode"] = answer.status
        return failure_of_response(response, url, doing, self.client)

    def close(self) -> None:
        """Close idle connections. The store opens new ones when it is used again."""
        self._transport.close()
        for kind in [kind for kind in self._botocore_clients if kind[0] == os.getpid()]:
            self._botocore_clients.pop(kind).close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3Store) and (self.client, self.url) == (other.client, other.url)

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r}, endpoint={self.client.endpoint!r})"
