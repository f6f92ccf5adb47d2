"""A bucket of an S3-compatible store, or a folder in it.

Requests are signed in Python (sigv4.py) and sent over connections of this process (transport.py). Checksums that servers do not
know are never sent: a body is covered by the signature's SHA-256, which all of them check. Reading is in web.py, writing in
s3_write.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from typing_extensions import Buffer

from shmload.errors import StoreError
from shmload.storage import s3_list, s3_write
from shmload.storage.credentials import Keys
from shmload.storage.keys import checked_key, checked_prefix
from shmload.storage.retry import Unsure
from shmload.storage.s3_errors import failure_of
from shmload.storage.sigv4 import EMPTY_SHA256, canonical_query, signed
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
        return s3_write.put(self, key, memoryview(data).cast("B"), only_if_absent=only_if_absent)

    def put_file(self, key: str, path: Path) -> StoredObject:
        return s3_write.put_file(self, key, path)

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        return s3_list.list_objects(self, checked_prefix(prefix, self.url))

    def delete(self, keys: Iterable[str]) -> None:
        s3_write.delete(self, [checked_key(key, self.url) for key in keys])

    def url_of(self, key: str) -> str:
        return f"{self.url}/{checked_key(key, self.url)}"

    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        return self.request(method, checked_key(key, self.url), headers=headers)

    def request(
        self,
        method: str,
        key: str | None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: memoryview | None = None,
    ) -> Answer:
        """Signs and sends one request about an object; with key None about the bucket. What is written may take its time."""
        wait_s = self.patience.stall_s if body is None else self.patience.timeout_s
        path = self._base + "/" + ("" if key is None else quote(self.prefix + key, safe="/-_.~"))
        text = canonical_query(query or {})
        full = {
            "Host": self._transport.netloc,
            "Accept-Encoding": "identity",
            "User-Agent": "shmload",
            **(headers or {}),
        }
        if body is not None:
            full["Content-Length"] = str(len(body))
        signed_headers = signed(
            method,
            path,
            text,
            full,
            keys=self._keys(),
            region=self.client.region,
            payload_sha256=EMPTY_SHA256 if body is None else hashlib.sha256(body).hexdigest(),
        )
        return self._transport.request(method, f"{path}?{text}" if text else path, signed_headers, body, wait_s)

    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | Unsure:
        found = failure_of(answer, url, doing, self.client)
        text = str(found)
        keys = self._keys()
        if keys is not None and keys.redacted(text) != text:
            found.args = (keys.redacted(text),)
        return found

    def close(self) -> None:
        """Closes idle connections; the store opens others when it is used again."""
        self._transport.close()

    def _keys(self) -> Keys | None:
        return self.client.credentials.now()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, S3Store) and (self.client, self.url) == (other.client, other.url)

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r}, endpoint={self.client.endpoint!r})"
