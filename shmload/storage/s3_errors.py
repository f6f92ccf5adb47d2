"""What an S3-compatible server's refusals mean, and what to do about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shmload.errors import ObjectMissing, StoreError
from shmload.storage.credentials import library
from shmload.storage.retry import Unsure
from shmload.storage.transport import Answer

if TYPE_CHECKING:
    from shmload.storage.client import Client

__all__ = ["failure_of_answer", "failure_of_call"]

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


def failure_of_call(error: Exception, url: str, doing: str, client: Client) -> StoreError | Unsure:
    """The error to raise for one of botocore's."""
    exceptions = library("botocore.exceptions")
    if isinstance(error, exceptions.ClientError):
        found = _failure_of(error.response, url, doing, client)
    elif isinstance(error, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        found = StoreError(f"{client.endpoint} is not trusted: {error}. Give its certificates as ca_file")
    elif isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
        found = Unsure(f"no answer from {client.endpoint} ({error})")
    elif isinstance(error, exceptions.BotoCoreError):
        found = StoreError(f"cannot {doing}: {error}. Look at the bucket's name, the region and the credentials")
    else:
        found = Unsure(f"the server sent no readable answer ({error})")
    return _redacted(found, client)


def failure_of_answer(answer: Answer, url: str, doing: str, client: Client) -> StoreError | Unsure:
    """The error to raise for an answer that is no success."""
    try:
        body = answer.text()
    except Unsure:
        body = b""
    parser = library("botocore.parsers").create_parser("rest-xml")
    status = max(answer.status, 301)  # what is below would be no failure to it
    response = parser.parse({"status_code": status, "headers": dict(answer.headers), "body": body}, None)
    response["ResponseMetadata"]["HTTPStatusCode"] = answer.status
    return _redacted(_failure_of(response, url, doing, client), client)


def _failure_of(response: Mapping[str, Any], url: str, doing: str, client: Client) -> StoreError | Unsure:
    """Of an error as botocore parses it."""
    status, headers = response["ResponseMetadata"]["HTTPStatusCode"], response["ResponseMetadata"]["HTTPHeaders"]
    code, message = (str(response["Error"].get(name) or "").strip() for name in ("Code", "Message"))
    code, message = "" if code == str(status) else code[:80], message[:200]
    said = f"{status} {code}".strip() + (f" ({message})" if message else "")
    if status in (301, 302, 307, 308) or code == "AuthorizationHeaderMalformed":
        region = headers.get("x-amz-bucket-region")
        region = region or (match[1] if (match := re.search(r"expecting '([\w-]+)'", message)) else None)
        where = f"region={region!r}" if region else f"another endpoint than {client.endpoint}, or another region"
        return StoreError(
            f"cannot {doing}: the server says {said} to region {client.region!r}; the client needs {where}"
        )
    if code in _PASSING or (status >= 500 and status != 501) or status in (408, 429):
        return Unsure(f"the server says {said}", pause_s=_seconds(headers.get("retry-after")))
    if code == "NoSuchKey" or (status == 404 and not code):
        return ObjectMissing(f"no such object: {url} at {client.endpoint}")
    remedy = _REMEDIES.get(code) or (
        "the server refuses these credentials: look at access_key, secret_key and the bucket's permissions"
        if status in (401, 403)
        else "look at the endpoint, the bucket's name and what the server can do"
    )
    return StoreError(f"cannot {doing} at {client.endpoint}: the server says {said}; {remedy}")


def _redacted(found: StoreError | Unsure, client: Client) -> StoreError | Unsure:
    """The error without what a server may have sent back of the credentials."""
    text = client.credentials.redacted(str(found))
    if text != str(found):
        found.args = (text,)
    return found


def _seconds(text: str | None) -> float:
    """Of a Retry-After header: seconds, or a date, which is not worth its reading."""
    return min(60.0, float(text)) if text is not None and text.isascii() and text.isdigit() else 0.0
