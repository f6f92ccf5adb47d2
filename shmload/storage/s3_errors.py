"""What an S3-compatible server's refusals mean, and what to do about them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from shmload.errors import ObjectMissing, StoreError
from shmload.storage.retry import Unsure
from shmload.storage.transport import Answer

if TYPE_CHECKING:
    from shmload.storage.client import Client

__all__ = ["code_and_message", "failure_of", "local_name"]

_PASSING = {
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "XAmzContentSHA256Mismatch",  # the body was damaged on its way
}
_REMEDIES = {
    "AccessDenied": "the credentials are known but may not do this: let the bucket's owner allow it",
    "AuthorizationHeaderMalformed": "requests are signed for another region than the server's: give its name as region",
    "ExpiredToken": "the temporary credentials have run out: make a client with new ones",
    "InvalidAccessKeyId": "the server does not know the access key: look at access_key and at the endpoint",
    "InvalidToken": "the session token is none of this server's: look at session_token",
    "NoSuchBucket": "look at the bucket's name and at the endpoint, or create the bucket",
    "PermanentRedirect": "the bucket is in another region: give its name as region",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "SignatureDoesNotMatch": "the secret key is not the access key's: look at secret_key",
}


def failure_of(answer: Answer, url: str, doing: str, client: Client) -> StoreError | Unsure:
    """The error to raise for an answer that is no success."""
    status = answer.status
    try:
        code, message = code_and_message(answer.text())
    except Unsure:
        code, message = "", ""
    said = " ".join(part for part in (str(status), code or answer.reason) if part)
    if message:
        said += f" ({message})"
    if status in (301, 302, 307, 308) or code == "AuthorizationHeaderMalformed":
        region = answer.headers.get("x-amz-bucket-region")
        region = region or (match[1] if (match := re.search(r"expecting '([\w-]+)'", message)) else None)
        where = f"region={region!r}" if region else f"another endpoint than {client.endpoint}, or another region"
        return StoreError(
            f"cannot {doing}: the server says {said} to region {client.region!r}; the client needs {where}"
        )
    if code in _PASSING or (status >= 500 and status != 501) or status in (408, 429):
        return Unsure(f"the server says {said}", pause_s=_seconds(answer.headers.get("Retry-After")))
    if code == "NoSuchKey" or (status == 404 and not code):
        return ObjectMissing(f"no such object: {url} at {client.endpoint}")
    remedy = _REMEDIES.get(code) or (
        "the server refuses these credentials: look at access_key, secret_key and the bucket's permissions"
        if status in (401, 403)
        else "look at the endpoint, the bucket's name and what the server can do"
    )
    return StoreError(f"cannot {doing} at {client.endpoint}: the server says {said}; {remedy}")


def code_and_message(body: bytes) -> tuple[str, str]:
    """What an error's body says; nothing of the many other things that servers put there, such as what was signed."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return "", ""
    found = {local_name(element): (element.text or "").strip() for element in root.iter()}
    return found.get("Code", "")[:80], found.get("Message", "")[:200]


def local_name(element: ElementTree.Element) -> str:
    """An element's name without the namespace, which servers disagree about."""
    return element.tag.rpartition("}")[2]


def _seconds(text: str | None) -> float:
    """Of a Retry-After header: seconds, or a date, which is not worth its reading."""
    return min(60.0, float(text)) if text is not None and text.isascii() and text.isdigit() else 0.0
