"""AWS Signature Version 4: what an S3-compatible server wants to see of a request.

Source: AWS, "Signature Version 4 signing process", docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from urllib.parse import quote

from shmload.storage.credentials import Keys

__all__ = ["EMPTY_SHA256", "SignedHeaders", "canonical_query", "signed"]

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class SignedHeaders(Mapping[str, str]):
    """Headers of a request. What prints the locals of a frame prints their names only: a token is among them."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"SignedHeaders({', '.join(self)})"


def canonical_query(query: Mapping[str, str]) -> str:
    """A query as it is signed, and sent likewise: sorted, everything but letters, digits and -_.~ in percent form."""
    return "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))


def signed(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    keys: Keys | None,
    region: str,
    payload_sha256: str,
    now: datetime | None = None,
) -> SignedHeaders:
    """The headers with those that sign them.

    Args:
        path: as it is sent, in percent form.
        query: of `canonical_query`.
        headers: `Host` among them.
        keys: None leaves the request unsigned, as public buckets take it.
        payload_sha256: of the body, in hex.
        now: the time to sign for.
    """
    if keys is None:
        return SignedHeaders(headers)
    time = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    full = {**headers, "x-amz-date": time, "x-amz-content-sha256": payload_sha256}
    if keys.session_token:
        full["x-amz-security-token"] = keys.session_token
    lower = sorted((name.lower(), " ".join(value.split())) for name, value in full.items())
    names = ";".join(name for name, _ in lower)
    request = "\n".join([method, path, query, *(f"{name}:{value}" for name, value in lower), "", names, payload_sha256])
    scope = f"{time[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{time}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = hmac.new(_signing_key(keys, time[:8], region), text.encode(), hashlib.sha256).hexdigest()
    full["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return SignedHeaders(full)


@functools.lru_cache(maxsize=64)
def _signing_key(keys: Keys, day: str, region: str) -> bytes:
    """The key of one day, region and service."""
    made = ("AWS4" + keys.secret_key).encode()
    for part in (day, region, "s3", "aws4_request"):
        made = hmac.new(made, part.encode(), hashlib.sha256).digest()
    return made
