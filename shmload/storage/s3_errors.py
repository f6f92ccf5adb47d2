"""Turn error responses of S3-compatible servers into the errors to raise: transient ones, and others with their remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shmload.errors import ObjectMissing, StoreError
from shmload.storage.botocore_modules import library
from shmload.storage.retry import TransientError

if TYPE_CHECKING:
    from shmload.storage.s3_endpoint import S3Endpoint

__all__ = ["failure_of_call", "failure_of_response"]

_TRANSIENT = {
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
    "XAmzContentSHA256Mismatch",  # the body was damaged in transit
}

_REMEDIES = {
    "AccessDenied": "the credentials are valid but lack permission: ask the bucket's owner to grant it",
    "AuthorizationHeaderMalformed": "requests are signed for another region than the server's: pass that one as region",
    "ExpiredToken": "the temporary credentials have expired: make a client with new ones",
    "InvalidAccessKeyId": "the server does not know the access key: check access_key and the endpoint",
    "InvalidObjectState": "the object is archived (GLACIER, DEEP_ARCHIVE): restore it first, then read it",
    "InvalidToken": "the server does not know the session token: check session_token",
    "NoSuchBucket": "check the bucket's name and the endpoint, or create the bucket",
    "PermanentRedirect": "the bucket is in another region: pass its name as region",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: check secret_key",
}


def failure_of_call(error: Exception, url: str, doing: str, client: S3Endpoint) -> StoreError | TransientError:
    """Return the error to raise for an exception of botocore.

    Args:
        error: the exception.
        url: URL of the object or bucket.
        doing: the operation in words.
        client: the store's endpoint.
    """
    exceptions, text = library("botocore.exceptions"), client.credentials.redacted(str(error))
    if isinstance(error, exceptions.ClientError):
        found = failure_of_response(error.response, url, doing, client)
    elif isinstance(error, exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        found = StoreError(f"{client.endpoint} is not trusted: {text}. Give its certificates as ca_file")
    elif isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
        is_silent = isinstance(error, exceptions.ReadTimeoutError | exceptions.ConnectTimeoutError)
        found = TransientError(f"no answer from {client.endpoint} ({text})", of_store=True, is_silent=is_silent)
    elif isinstance(error, exceptions.BotoCoreError):
        found = StoreError(f"cannot {doing}: {text}. Check the bucket's name, the region and the credentials")
    else:
        found = TransientError(f"the server sent no readable answer ({text})")
    return found


def failure_of_response(response: Mapping[str, Any], url: str, doing: str, client: S3Endpoint) -> StoreError | TransientError:
    """Return the error to raise for an error response, as botocore parses it.

    Credentials in the server's message are masked; the object's own name is not.

    Args:
        response: the parsed response.
        url: URL of the object or bucket.
        doing: the operation in words.
        client: the store's endpoint.
    """
    status, headers = response["ResponseMetadata"]["HTTPStatusCode"], response["ResponseMetadata"]["HTTPHeaders"]
    redacted = client.credentials.redacted
    code, message = (redacted(str(response["Error"].get(name) or "").strip()) for name in ("Code", "Message"))
    code, message = "" if code == str(status) else code[:80], message[:200]
    said = f"{status} {code}".strip() + (f" ({message})" if message else "")
    if status in (301, 302, 307, 308) or code == "AuthorizationHeaderMalformed":
        region = headers.get("x-amz-bucket-region")
        region = region or (match[1] if (match := re.search(r"expecting '([\w-]+)'", message)) else None)
        where = f"region={region!r}" if region else f"another endpoint than {client.endpoint}, or another region"
        return StoreError(f"cannot {doing}: the server says {said} to region {client.region!r}; the client needs {where}")
    if code in _TRANSIENT or (status >= 500 and status != 501) or status in (408, 429):
        return TransientError(f"the server says {said}", pause_s=_seconds(headers.get("retry-after")), of_store=True)
    if code == "NoSuchKey" or (status == 404 and not code):
        return ObjectMissing(f"no such object: {url} at {client.endpoint}")
    remedy = _REMEDIES.get(code) or (
        "the server refuses these credentials: check access_key, secret_key and the bucket's permissions"
        if status in (401, 403)
        else "check the endpoint, the bucket's name and what the server supports"
    )
    return StoreError(f"cannot {doing} at {client.endpoint}: the server says {said}; {remedy}")


def _seconds(text: str | None) -> float:
    """Parse `Retry-After` in seconds, at most 60; HTTP dates are ignored."""
    return min(60.0, float(text)) if text is not None and text.isascii() and text.isdigit() else 0.0
