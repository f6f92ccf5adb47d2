"""A bucket of an S3-compatible store, or a folder in it.

What is read is signed by botocore and comes over connections of our own (transport.py) straight into the caller's memory, for which
boto3 takes 1.6 to 2 times the CPU. All else is botocore's: writing (s3_write.py), listing, deleting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from typing_extensions import Buffer

from shmload.errors import StoreError
from shmload.storage import s3_list, s3_write
from shmload.storage.credentials import library
from shmload.storage.keys import checked_key, checked_prefix
from shmload.storage.retry import Unsure
from shmload.storage.s3_errors import failure_of_answer, failure_of_call
from shmload.storage.store import StoredObject
from shmload.storage.transport import Answer, Transport
from shmload.storage.web import WebReader

if TYPE_CHECKING:
    from shmload.storage.client import Client

__all__ = ["S3Store"]


class S3Store(WebReader):
    """Objects of a bucket. Made by `Client.store` or `open_store`.

    Args:
        client: how to reach it.
        bucket: its name.
        folder: that keys are relative to.
    """

    def __init__(self, client: Client, bucket: str, folder: str = "") -> None:
        if not bucket or "/" in bucket or not bucket.isprintable():
            raise StoreError(
                f"{bucket!r} is no bucket's name: give the bucket alone, and what is behind it as the folder"
            )
        library("botocore")  # whoever lacks it learns so here
        self.client = client
        self.bucket = bucket
        self.patience = client.patience
        self.parallel = client.parallel
        scheme, host = client.endpoint.split("://")
        in_path = client.path_style or "." in bucket  # a certificate for *.host is for one part only
        self._base = f"/{quote(bucket, safe='-_.~')}" if in_path else ""
        base_url = client.endpoint if in_path else f"{scheme}://{bucket}.{host}"
        self._transport = Transport(base_url, stall_s=client.patience.stall_s, ca_file=client.ca_file)
        self.prefix = ""
        self.prefix = checked_prefix(folder.strip("/"), self.url)

    @property
    def url(self) -> str:
        """s3://bucket/folder."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def put(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> StoredObject:
        return s3_write.put(self, key, bytes(data), only_if_absent=only_if_absent)

    def put_file(self, key: str, path: Path) -> StoredObject:
        return s3_write.put_file(self, key, path)

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        return s3_list.list_objects(self, checked_prefix(prefix, self.url))

    def delete(self, keys: Iterable[str]) -> None:
        s3_write.delete(self, [checked_key(key, self.url) for key in keys])

    def url_of(self, key: str) -> str:
        return f"{self.url}/{checked_key(key, self.url)}"

    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        target = f"{self._base}/{quote(self.prefix + checked_key(key, self.url), safe='/-_.~')}"
        full = {"Host": self._transport.netloc, "Accept-Encoding": "identity", "User-Agent": "shmload", **headers}
        request = library("botocore.awsrequest").AWSRequest(method, self._transport.base_url + target, full)
        if not self.client.credentials.anonymous:
            signer = library("botocore.auth").S3SigV4Auth
            signer(self.client.credentials.frozen(), "s3", self.client.region).add_auth(request)
        return self._transport.request(method, target, request.headers)  # whose repr shows none: a token is among them

    def call(
        self,
        operation: str,
        doing: str,
        *,
        key: str | None = None,
        but: Collection[int] = (),
        wait_s: float | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """What botocore answers to one request.

        Args:
            operation: botocore's method.
            doing: the same in words, for the error.
            key: of an object; None asks about the bucket.
            but: statuses that are no failure here; their answers have ResponseMetadata only.
            wait_s: how long the answer may take; None: as what is written may.
        """
        if key is not None:
            arguments["Key"] = self.prefix + key
        exceptions = library("botocore.exceptions")
        passing = (exceptions.BotoCoreError, exceptions.ClientError, library("botocore.parsers").ResponseParserError)
        try:
            client = self.client.boto.client(self.client, wait_s or self.patience.timeout_s)
            answer: dict[str, Any] = getattr(client, operation)(Bucket=self.bucket, **arguments)
            if answer["ResponseMetadata"]["HTTPHeaders"]:
                return answer
            failure: StoreError | Unsure = Unsure(
                "the server hung up before its answer had begun"
            )  # after a first line
        except passing as error:
            response = getattr(error, "response", None) or {}
            metadata = response.get("ResponseMetadata", {})
            if metadata.get("HTTPStatusCode") in but:
                return {"ResponseMetadata": metadata}
            failure = failure_of_call(error, self.url if key is None else self.url_of(key), doing, self.client)
            del response, metadata  # what prints the locals of this frame would print them
        raise failure

    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | Unsure:
        return failure_of_answer(answer, url, doing, self.client)

    def close(self) -> None:
        """Closes idle connections; the store opens others when it is used again."""
        self._transport.close()
        self.client.boto.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3Store) and (self.client, self.url) == (other.client, other.url)

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r}, endpoint={self.client.endpoint!r})"
