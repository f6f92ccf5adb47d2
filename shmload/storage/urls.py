"""Names of stores and of what is in them: paths, file://, http(s)://, s3://bucket/folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from shmload.errors import StoreError
from shmload.storage.client import client_of, make_client
from shmload.storage.http import HttpStore
from shmload.storage.local import LocalStore
from shmload.storage.store import Store, checked_key

__all__ = ["is_url", "join_url", "open_store", "split_url"]


def is_url(text: str) -> bool:
    """Whether it names a store by a scheme, not by a path of this machine."""
    scheme, found, _ = text.partition("://")
    return bool(found) and scheme.isalnum()


def open_store(url: str | os.PathLike[str], client: Any = None) -> Store:
    """The store that a path or URL names.

    Args:
        url: a folder's path; file:///folder; http:// or https://, to be read only; s3://bucket or s3://bucket/folder.
        client: for s3://, of `make_client`, or boto3's S3 client; None: one made of the environment. Of http:// and https:// it
            says how patiently.
    Raises:
        StoreError: the URL is none, or the environment has no credentials.
    """
    text = os.fspath(url)
    if not is_url(text):
        if not text:
            raise StoreError(
                "an empty path names no store: give a folder, file://, http://, https:// or s3://bucket/folder"
            )
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
    raise StoreError(
        f"{scheme}:// names no store that is known: give a folder, file://, http://, https:// or s3://bucket/folder"
    )


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


def join_url(root: str | os.PathLike[str], key: str) -> str:
    """The URL of an object, as `split_url` takes it apart."""
    text = os.fspath(root)
    quoted = quote(key, safe="/-_.~") if is_url(text) and not text.startswith("s3://") else key
    return f"{text.rstrip('/')}/{quoted}"
