"""Keys of objects: parts joined by "/", that name nothing outside the store's root and mean the same in every store."""

from __future__ import annotations

import posixpath

from shmload.errors import StoreError

__all__ = ["checked_key", "checked_prefix", "is_key"]


def is_key(key: str) -> bool:
    """Whether the text can name an object: relative, no empty part, no "." or "..", nothing unprintable."""
    return (
        all(part not in ("", ".", "..") for part in key.split("/")) and key.isprintable() and len(key.encode()) <= 1024
    )


def checked_key(key: str, url: str) -> str:
    """The key, if it is one.

    Raises:
        StoreError: it is none; `url` says of which store.
    """
    if not is_key(key):
        raise StoreError(
            f'{key!r} is no key of {url}: a key is relative to it, has no empty part and no "." or "..", nothing '
            f"unprintable, and at most 1,024 bytes. Try {posixpath.normpath('/' + key).strip('/')!r}"
        )
    return key


def checked_prefix(prefix: str, url: str) -> str:
    """A folder's key with a "/" behind it; empty for the root."""
    trimmed = prefix.removesuffix("/")
    return checked_key(trimmed, url) + "/" if trimmed else ""
