"""Parse URLs of stores and objects."""

from __future__ import annotations

import os
from urllib.parse import unquote

from shmload.errors import StoreError
from shmload.storage.keys import checked_key

__all__ = ["is_url", "split_query", "split_url"]


def is_url(text: str) -> bool:
    """Return whether the text names a store by a scheme instead of a local path."""
    scheme, found, _ = text.partition("://")
    return bool(found) and scheme.isalnum()


def split_query(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Split an http(s) URL into the part before its query and the query, such as a signature. Other names have no query."""
    text = os.fspath(url)
    if not text.startswith(("http://", "https://")):
        return text, ""
    path, _, query = text.partition("#")[0].partition("?")
    return path, query


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Split an object's URL into its folder's URL and its key: "s3://b/a/x.tar" gives "s3://b/a" and "x.tar".

    Args:
        url: URL or path of an object.
    Raises:
        StoreError: the URL does not name an object.
    """
    text = os.fspath(url)
    root, slash, key = text.rpartition("/")
    if is_url(text) and (root.endswith((":/", ":")) or not slash):
        raise StoreError(f"{text} does not name an object: the URL of an object ends in /key")
    scheme = text.split("://")[0] if is_url(text) else ""
    key = checked_key(unquote(key) if scheme in ("http", "https", "file") else key, text)
    return (root or "/") if slash else ".", key
