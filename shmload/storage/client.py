"""The client of an S3-compatible store, made from arguments and the environment, or from boto3's client."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shmload.errors import StoreError
from shmload.storage.credentials import Credentials, find_credentials
from shmload.storage.retry import RetryPolicy
from shmload.storage.s3_endpoint import S3Endpoint
from shmload.storage.s3_store import S3Store

__all__ = ["Client", "client_of", "make_client"]

_AWS_HOST = re.compile(r"s3[.-]([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com(?:\.cn)?")


@dataclass(frozen=True)
class Client(S3Endpoint):
    """The address, credentials and policies of an S3-compatible store. Made by `make_client`.

    It holds no connection, so it can be pickled, forked and stored. A pickle contains the credentials, so send it only to processes
    of your own. Its repr and its errors do not contain them.

    Attributes:
        endpoint: scheme, host and port.
        region: the region for which requests are signed.
        credentials: the credentials that sign requests.
        retry_policy: how often and for how long an operation is retried.
        parallel: number of ranges of one large object that are read, or of parts that are written, at once.
        path_style: whether the bucket is named in the path instead of the host.
        ca_file: file of certificates to trust in place of the system's; None is the system's.
    """

    def store(self, bucket: str, folder: str = "") -> S3Store:
        """Return the store of a bucket, or of a folder in it.

        Args:
            bucket: name of the bucket.
            folder: folder to which keys are relative.
        """
        return S3Store(self, bucket, folder)


def make_client(
    url: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    *,
    session_token: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    region: str | None = None,
    retries: int = 5,
    timeout_s: float = 60.0,
    stall_s: float = 10.0,
    parallel: int = 4,
    path_style: bool | None = None,
    ca_file: str | None = None,
) -> Client:
    """Make a client of an S3-compatible object store.

    botocore finds credentials that are not given where all AWS tools look: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and
    AWS_SESSION_TOKEN), the shared files with AWS_PROFILE, single sign-on, instance roles. It renews those that expire.

    Args:
        url: the endpoint, such as "https://s3.example.org" or "http://127.0.0.1:9000"; None is AWS_ENDPOINT_URL_S3,
            AWS_ENDPOINT_URL or Amazon's own. Requests are unencrypted only if the URL begins with http://.
        access_key: ID of the access key.
        secret_key: the secret key that signs requests.
        session_token: token of temporary credentials.
        profile: profile of the shared credentials file.
        anonymous: whether not to sign requests, for public buckets.
        region: the store's name for its region; None is AWS_REGION, AWS_DEFAULT_REGION, the region in the URL,
            or "us-east-1".
        retries: how often a request is repeated after resets, stalls, broken bodies and answers of 5xx or 429.
        timeout_s: seconds without progress after which requests are no longer repeated.
        stall_s: seconds without an answer after which a read fails; a write may take `timeout_s`.
        parallel: number of ranges of one large object that are read, or of parts that are written, at once.
        path_style: whether the bucket is named in the path (True) or the host (False); None is the host at Amazon, else the path.
        ca_file: file of certificates to trust in place of the system's; None is AWS_CA_BUNDLE, or the system's.
    Returns:
        the client; no request has been sent yet.
    Raises:
        StoreError: no credentials were found, only one of the two keys is given, or the URL is invalid.
        ValueError: a number is out of its range.
    """
    given = Credentials(access_key or None, secret_key or None, session_token or None)
    half = bool(access_key) != bool(secret_key)
    access_key = secret_key = session_token = None  # so that tools which print this frame's variables show no secret
    if half:
        raise StoreError("access_key and secret_key belong together: give both, or neither to take them from the environment")
    if retries < 0 or timeout_s <= 0 or stall_s <= 0 or parallel < 1:
        raise ValueError(
            f"retries={retries}, timeout_s={timeout_s}, stall_s={stall_s}, parallel={parallel}: retries must be at least 0, "
            "parallel at least 1, and times positive"
        )
    if anonymous:
        given = Credentials()
    elif given.anonymous:
        given = find_credentials(profile)
    url = url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    at_amazon = _AWS_HOST.fullmatch(urlsplit(url).hostname or "") if url else None
    region = (
        region
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or (at_amazon[1] if at_amazon else "us-east-1")
    )
    if path_style is None:
        path_style = bool(url) and at_amazon is None
    return Client(
        endpoint_of(url or f"https://s3.{region}.amazonaws.com"),
        region,
        given,
        RetryPolicy(retries, timeout_s, min(stall_s, timeout_s)),
        parallel,
        path_style,
        ca_file or os.environ.get("AWS_CA_BUNDLE") or None,
    )


def client_of(given: Any) -> Client:
    """Return a client unchanged, or make one with the endpoint, region and credentials of boto3's S3 client.

    Args:
        given: a `Client` or boto3's S3 client.
    Raises:
        TypeError: `given` is neither of these.
    """
    if isinstance(given, Client):
        return given
    try:
        meta, signer = given.meta, given._request_signer
        endpoint, region, config = meta.endpoint_url, meta.region_name, meta.config
        service = meta.service_model.service_name
    except AttributeError:
        service = None
    if service != "s3":
        raise TypeError(f"client must come from shmload.remote.make_client or be boto3's S3 client, got {type(given).__name__}")
    found = signer._credentials
    if found is None or config.signature_version.__class__.__name__ == "UNSIGNED":
        credentials = Credentials()
    else:
        credentials = Credentials(renewed=found)
    at_amazon = _AWS_HOST.fullmatch(urlsplit(endpoint).hostname or "")
    style = (config.s3 or {}).get("addressing_style", "auto")
    return Client(
        endpoint_of(endpoint),
        region or "us-east-1",
        credentials,
        path_style=style == "path" or (style != "virtual" and at_amazon is None),
    )


def endpoint_of(url: str) -> str:
    """Return scheme, host and port of an endpoint.

    Args:
        url: URL of the endpoint.
    Raises:
        StoreError: the URL is invalid, or contains more than that.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise StoreError("the URL of an endpoint contains a user or password: give access_key and secret_key instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise StoreError(
            f"{url!r} is not an endpoint: it needs http:// or https://, a host and optionally a port, and nothing else; "
            "give bucket and folder separately"
        )
    return f"{parts.scheme}://{parts.netloc}"
