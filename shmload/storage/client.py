"""A client: the endpoint of an object store, who asks, and how patiently. Frozen, small, picklable; it opens nothing by itself.

Names of stores and of what is in them: paths, file://, http(s)://, s3://bucket/folder, and what fsspec knows.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from shmload.errors import StoreError
from shmload.storage.filesystem import FilesystemStore
from shmload.storage.http import HttpStore
from shmload.storage.local import LocalStore, Store, checked_key
from shmload.storage.s3 import Credentials, S3Store, find_credentials
from shmload.storage.transport import RetryPolicy

__all__ = ["Client", "client_of", "is_url", "make_client", "open_store", "split_url"]

_AWS_HOST = re.compile(r"s3[.-]([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com(?:\.cn)?")


@dataclass(frozen=True)
class Client:
    """How to reach an S3-compatible store; of `make_client`.

    It holds no connection, so it can be pickled, forked and kept. A pickle has the credentials in it: send it to processes of your
    own only. Its repr and its errors have none.

    Attributes:
        endpoint: scheme, host and port.
        region: that requests are signed for.
        credentials: who asks.
        retry_policy: how often and how long is tried again.
        parallel: ranges of one large object that are read at once.
        path_style: whether the bucket is named in the path, or in the host.
        ca_file: certificates to trust.
    """

    endpoint: str
    region: str
    credentials: Credentials = field(repr=False)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    parallel: int = 4
    path_style: bool = True
    ca_file: str | None = None

    def store(self, bucket: str, folder: str = "") -> S3Store:
        """The store of a bucket, or of a folder in it.

        Args:
            bucket: its name.
            folder: that keys are relative to.
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
    """A client of any S3-compatible object store.

    Credentials left out are looked for by botocore, where all of AWS's tools look: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and
    AWS_SESSION_TOKEN), the shared files with AWS_PROFILE, single sign-on, roles of machines. Those that run out it renews.

    Args:
        url: the endpoint, such as "https://s3.example.org" or "http://127.0.0.1:9000"; None is AWS_ENDPOINT_URL_S3,
            AWS_ENDPOINT_URL or Amazon's own. Only a URL that says http:// is spoken to without encryption.
        access_key: of whom asks.
        secret_key: that signs.
        session_token: of temporary credentials.
        profile: of the shared credentials file.
        anonymous: sign nothing, for public buckets.
        region: the store's own name for it, whatever it is; None is AWS_REGION, AWS_DEFAULT_REGION, what the URL says,
            or "us-east-1".
        retries: how often a request is repeated after resets, stalls, broken bodies and answers of 5xx or 429.
        timeout_s: after so long without progress nothing is repeated any more.
        stall_s: a server that says nothing for so long has failed; to answer what was written it has `timeout_s`.
        parallel: ranges of one large object that are read, or parts that are written, at once.
        path_style: True: the bucket stands in the path; False: in the host; None: in the host for Amazon's, else in the path.
        ca_file: certificates to trust; None is AWS_CA_BUNDLE, or the system's.
    Returns:
        the client; nothing has been asked yet.
    Raises:
        StoreError: no credentials are found, or the URL is none.
        ValueError: a number is out of its range.
    """
    given = Credentials(access_key or None, secret_key or None, session_token or None)
    half = bool(access_key) != bool(secret_key)
    access_key = secret_key = session_token = None  # what prints the locals of this frame shall print no secret
    if half:
        raise StoreError("access_key and secret_key belong together: give both, or neither and let the environment say them")
    if retries < 0 or timeout_s <= 0 or stall_s <= 0 or parallel < 1:
        raise ValueError(
            f"retries={retries}, timeout_s={timeout_s}, stall_s={stall_s}, parallel={parallel}: retries must be at least 0, "
            "parallel at least 1, times greater than 0"
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
    """A client as it is; of boto3's S3 client one with the same endpoint, region and credentials.

    Raises:
        TypeError: it is neither.
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
        raise TypeError(f"a client of shmload.remote.make_client, or boto3's S3 client, is needed, not {type(given).__name__}")
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
    """Scheme, host and port of an endpoint.

    Raises:
        StoreError: it is no such URL, or says more than that.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise StoreError("the URL of an endpoint has a user or password in it: give access_key and secret_key instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise StoreError(
            f"{url!r} is no endpoint: it needs http:// or https://, a host and perhaps a port, and nothing behind; "
            "bucket and folder are given apart"
        )
    return f"{parts.scheme}://{parts.netloc}"


def is_url(text: str) -> bool:
    """Whether it names a store by a scheme, not by a path of this machine."""
    scheme, found, _ = text.partition("://")
    return bool(found) and scheme.isalnum()


def open_store(url: str | os.PathLike[str], client: Any = None) -> Store:
    """The store that a path or URL names.

    Args:
        url: a folder's path; file:///folder; http:// or https://, to be read only; s3://bucket or s3://bucket/folder; or of
            another scheme that fsspec knows: gs://, az://, abfs://, hf://, oci://, sftp:// and others, each with its own library.
        client: for s3://, of `make_client`, or boto3's S3 client; None: one made of the environment. Of http:// and https:// it
            says how patiently. For other schemes a dict of what their library takes, which fsspec calls storage options.
    Raises:
        StoreError: the URL is none, or the environment has no credentials.
    """
    text = os.fspath(url)
    if not is_url(text):
        if not text:
            raise StoreError("an empty path names no store: give a folder, file://, http://, https:// or s3://bucket/folder")
        return LocalStore(Path(text))
    scheme, rest = text.split("://", 1)
    if scheme == "s3":
        bucket, _, folder = rest.partition("/")
        if "?" in bucket or "@" in bucket:
            raise StoreError("the URL of a bucket has credentials or options in it: give them to make_client")
        return client_of(make_client() if client is None else client).store(bucket, folder)
    if scheme in ("http", "https"):
        if client is None:
            return HttpStore(text)
        found = client_of(client)
        return HttpStore(text, retry_policy=found.retry_policy, parallel=found.parallel, ca_file=found.ca_file)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StoreError(f"{text} is on another host: a file:// URL has three slashes before the path")
        return LocalStore(Path(unquote(parts.path)))
    return FilesystemStore(text, client)


def split_query(url: str | os.PathLike[str]) -> tuple[str, str]:
    """An http(s) URL without its query, and the query: a signature or an option of the server. Other names have none."""
    text = os.fspath(url)
    if not text.startswith(("http://", "https://")):
        return text, ""
    path, _, query = text.partition("#")[0].partition("?")
    return path, query


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder's URL and the key of an object's URL: "s3://b/a/x.tar" is "s3://b/a" and "x.tar".

    Raises:
        StoreError: no object is named.
    """
    text = os.fspath(url)
    root, slash, key = text.rpartition("/")
    if is_url(text) and (root.endswith((":/", ":")) or not slash):
        raise StoreError(f"{text} names no object: a URL of one ends in /key")
    scheme = text.split("://")[0] if is_url(text) else ""
    checked_key(unquote(key) if scheme in ("http", "https", "file") else key, text)
    if scheme in ("http", "https", "file"):
        key = unquote(key)
    return (root or "/") if slash else ".", key
