"""A plain web server as a read-only store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urljoin, urlsplit

from shmload.errors import ObjectMissing, StoreError
from shmload.storage.keys import checked_key
from shmload.storage.retry import RetryPolicy, TransientError
from shmload.storage.transport import Answer, Transport
from shmload.storage.web_reader import WebReader

__all__ = ["HttpStore"]

_MOST_REDIRECTS = 5


def _escaped(path: str) -> str:
    """Return the path of a URL in its usual form: letters are not escaped, spaces are, and %2F stays."""
    return "%2F".join(quote(unquote(part), safe="/-_.~") for part in re.split("%2F", path, flags=re.IGNORECASE))


class HttpStore(WebReader):
    """The objects below a URL. They can be read, but not listed or written.

    Args:
        url: http:// or https://.
        retry_policy: how often and for how long to retry.
        parallel: number of ranges of one large object that are read at once.
        ca_file: file of certificates to trust in place of the system's.
    """

    def __init__(self, url: str, *, retry_policy: RetryPolicy | None = None, parallel: int = 4, ca_file: str | None = None) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise StoreError(f"{parts.scheme}://{parts.hostname}: the URL of a store must not contain a user, a password, ? or #")
        self.retry_policy = retry_policy or RetryPolicy()
        self.parallel = parallel
        self.ca_file = ca_file
        self.url = f"{parts.scheme}://{parts.netloc}{_escaped(parts.path)}".rstrip("/")
        self._given: dict[str, tuple[str, str]] = {}  # key -> its path below the URL, escaped, and its query
        self._transports: dict[str, Transport] = {}

    def add_object(self, key: str, name: str, query: str) -> None:
        """Request an object by the name and the query of its URL.

        A slash that the name writes as %2F stays one, because servers such as Firebase's and Google Cloud's JSON API distinguish
        them. The query, such as the signature of a presigned URL, appears in no error, and is not part of the object's key.

        Args:
            key: key of the object.
            name: the last part of its URL.
            query: the query, without "?"; empty if the URL has none.

        Raises:
            StoreError: the object has another name or query already, so it may be another object.
        """
        given = _escaped(name), query
        if self._given.setdefault(key, given) != given:
            raise StoreError(
                f"{self.url_of(key)} was given twice with different queries: an object is identified by its path, "
                "so give each path once"
            )

    def put(self, *_: Any) -> NoReturn:
        """Raise StoreError, because a web server is read-only."""
        raise StoreError(f"{self.url} is read-only: write to a folder or to s3://")

    put_file = delete = put

    def list_objects(self, prefix: str = "") -> NoReturn:
        raise StoreError(
            f"{self.url} cannot be listed, because web servers have no standard listing. Name the shards, for example as "
            f"{self.url}/name-{{000000..000099}}.tar, or write a manifest next to them"
        )

    def url_of(self, key: str) -> str:
        name, _ = self._given.get(key, (None, ""))
        return f"{self.url}/{name or quote(checked_key(key, self.url), safe='/-_.~')}"

    def ask(self, method: str, key: str, headers: Mapping[str, str]) -> Answer:
        url = first = self.url_of(key)
        for _ in range(_MOST_REDIRECTS + 1):
            parts = urlsplit(url)
            transport = self._transport(f"{parts.scheme}://{parts.netloc}")
            query = parts.query or (self._given.get(key, ("", ""))[1] if url == first else "")
            target = (parts.path or "/") + (f"?{query}" if query else "")
            full = {"Host": parts.netloc, "Accept-Encoding": "identity", "User-Agent": "shmload", **headers}
            answer = transport.request(method, target, full)
            if answer.status not in (301, 302, 303, 307, 308):
                return answer
            answer.close()
            following = urljoin(url, answer.headers.get("Location", ""))
            scheme = urlsplit(following).scheme  # in lower case, however the server writes it
            if scheme not in ("http", "https") or (transport.secure and scheme == "http"):
                raise StoreError(f"{self.url_of(key)} redirects to a URL that is not https: give the final URL")
            url = following
        raise StoreError(f"{self.url_of(key)} redirects more than {_MOST_REDIRECTS} times: give the final URL")

    def failure(self, answer: Answer, url: str, doing: str) -> StoreError | TransientError:
        said = f"{answer.status} {answer.reason}"
        if answer.status in (404, 410):
            return ObjectMissing(f"no such object: {url}")
        if answer.status in (408, 429) or (answer.status >= 500 and answer.status != 501):
            return TransientError(f"the server says {said}", of_store=True)
        remedy = "it requires authentication: use s3:// with credentials" if answer.status in (401, 403) else "check the URL"
        if answer.status in (400, 401, 403) and any(query and url == self.url_of(key) for key, (_, query) in self._given.items()):
            remedy = "the signature in the URL's query may be wrong or expired: make a new URL"
        return StoreError(f"cannot {doing}: the server says {said}; {remedy}")

    def _transport(self, base_url: str) -> Transport:
        if base_url not in self._transports:
            self._transports[base_url] = Transport(base_url, stall_s=self.retry_policy.stall_s, ca_file=self.ca_file)
        return self._transports[base_url]

    def close(self) -> None:
        """Close idle connections. The store opens new ones when it is used again."""
        for transport in self._transports.values():
            transport.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HttpStore) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"HttpStore({self.url!r})"
