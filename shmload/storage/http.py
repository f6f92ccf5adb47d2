"""A plain web server as a store: objects to be read by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urljoin, urlsplit

from typing_extensions import Buffer

from shmload.errors import ObjectMissing, StoreError
from shmload.storage.keys import checked_key
from shmload.storage.retry import Patience, Unsure
from shmload.storage.store import StoredObject
from shmload.storage.transport import Answer, Transport
from shmload.storage.web import WebReader

__all__ = ["HttpStore"]

_MOST_REDIRECTS = 5


class HttpStore(WebReader):
    """What lies below a URL; it can be read, but neither listed nor written.

    Args:
        url: http:// or https://.
        patience: how often and how long is tried again.
        parallel: ranges of one large object that are read at once.
        ca_file: certificates to trust beside the system's.
    """

    def __init__(
        self, url: str, *, patience: Patience | None = None, parallel: int = 4, ca_file: str | None = None
    ) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise StoreError(
                f"{parts.scheme}://{parts.hostname}: a store's URL has neither user nor password, nor anything behind ? or #"
            )
        self.patience = patience or Patience()
        self.parallel = parallel
        self.ca_file = ca_file
        self._url = f"{parts.scheme}://{parts.netloc}{quote(unquote(parts.path), safe='/-_.~')}".rstrip("/")
        self._transports: dict[str, Transport] = {}

    @property
    def url(self) -> str:
        """The URL it was made with."""
        return self._url

    def put(self, key: str, data: Buffer, *, only_if_absent: bool = False) -> StoredObject:
        raise self._read_only()

    def put_file(self, key: str, path: Path) -> StoredObject:
        raise self._read_only()

    def delete(self, keys: Iterable[str]) -> None:
        raise self._read_only()

    def list_objects(self, prefix: str = "") -> Iterator[StoredObject]:
        raise StoreError(
            f"{self.url} cannot be listed: a web server has no one way to say what it holds. Name the shards, for example as "
            f"{self.url}/name-{{000000..000099}}.tar, or write a manifest beside them"
        )

    def url_of(self, key: str) -> str:
        return f"{self.url}/{quote(checked_key(key, self.url), safe='/-_.~')}"

    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        url = self.url_of(key)
        for _ in range(_MOST_REDIRECTS + 1):
            parts = urlsplit(url)
            transport = self._transport(f"{parts.scheme}://{parts.netloc}")
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            full = {"Host": parts.netloc, "Accept-Encoding": "identity", "User-Agent": "shmload", **headers}
            answer = transport.request(method, target, full)
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            answer.close()
            following = urljoin(url, answer.headers.get("Location", ""))
            if urlsplit(following).scheme not in ("http", "https") or (
                transport.secure and following.startswith("http:")
            ):
                raise StoreError(f"{self.url_of(key)} leads elsewhere, to what is no https: URL: give the right URL")
            url = following
        raise StoreError(
            f"{self.url_of(key)} leads elsewhere more than {_MOST_REDIRECTS} times: give the URL of its end"
        )

    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | Unsure:
        said = f"{answer.status} {answer.reason}"
        if answer.status in (404, 410):
            return ObjectMissing(f"no such object: {url}")
        if answer.status in (408, 429) or (answer.status >= 500 and answer.status != 501):
            return Unsure(f"the server says {said}")
        remedy = (
            "it wants to know who asks: use s3:// with credentials"
            if answer.status in (401, 403)
            else "look at the URL"
        )
        return StoreError(f"cannot {doing}: the server says {said}; {remedy}")

    def _read_only(self) -> StoreError:
        return StoreError(f"{self.url} can only be read: write to a folder or to s3://")

    def _transport(self, base_url: str) -> Transport:
        if base_url not in self._transports:
            self._transports[base_url] = Transport(base_url, stall_s=self.patience.stall_s, ca_file=self.ca_file)
        return self._transports[base_url]

    def close(self) -> None:
        """Closes idle connections; the store opens others when it is used again."""
        for transport in self._transports.values():
            transport.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HttpStore) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"
