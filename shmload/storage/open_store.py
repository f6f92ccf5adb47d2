"""Open the store that a path or URL names: a folder, file://, http(s)://, s3://bucket/folder, or a scheme of fsspec."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from shmload.errors import StoreError
from shmload.storage.client import client_of, make_client
from shmload.storage.filesystem_store import FilesystemStore
from shmload.storage.http_store import HttpStore
from shmload.storage.local_store import LocalStore
from shmload.storage.store import Store
from shmload.storage.store_urls import is_url

__all__ = ["open_store"]


def open_store(url: str | os.PathLike[str], client: Any = None) -> Store:
    """Open the store that a path or URL names.

    Args:
        url: path of a folder; file:///folder; http:// or https://, which are read-only; s3://bucket or s3://bucket/folder; or
            another scheme that fsspec supports: gs://, az://, abfs://, hf://, oci://, sftp:// and others, each of which needs its
            own library.
        client: for s3://, a client from `make_client` or boto3's S3 client; None makes one from the environment. For http:// and
            https://, a client whose retry policy, `parallel` and `ca_file` are used. For other schemes, a dict of
            fsspec's storage options.
    Raises:
        StoreError: the URL is invalid, or the environment has no credentials.
    """
    text = os.fspath(url)
    if not is_url(text):
        if not text:
            raise StoreError("an empty path does not name a store: give a folder, file://, http://, https:// or s3://bucket/folder")
        return LocalStore(Path(text))
    scheme, rest = text.split("://", 1)
    if scheme == "s3":
        bucket, _, folder = rest.partition("/")
        if "?" in bucket or "@" in bucket:
            raise StoreError("the URL of a bucket contains credentials or options: give them to make_client")
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
