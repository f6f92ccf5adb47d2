"""Check keys of objects, by the same rules in every store.

A key is parts joined by "/", relative to the store's root, and cannot name anything outside it.
"""

from __future__ import annotations

import posixpath

from shmload.errors import StoreError

__all__ = ["checked_key", "checked_prefix", "is_key"]


def is_key(key: str) -> bool:
    """Return whether the text can name an object: relative, printable, without empty parts, "." and ".."."""
    return all(part not in ("", ".", "..") for part in key.split("/")) and key.isprintable() and len(key.encode()) <= 1024


def checked_key(key: str, url: str) -> str:
    """Return the key if it is valid.

    Args:
        key: the key.
        url: URL of the store, for the error.
    Raises:
        StoreError: the key is invalid.
    """
    if not is_key(key):
        raise StoreError(
            f'{key!r} is not a valid key of {url}: a key is relative to it, has no empty part and no "." or "..", only printable '
            f"characters, and at most 1,024 bytes. Try {posixpath.normpath('/' + key).strip('/')!r}"
        )
    return key


def checked_prefix(prefix: str, url: str) -> str:
    """Return a folder's key followed by "/"; empty for the root.

    Raises:
        StoreError: the key is invalid.
    """
    trimmed = prefix.removesuffix("/")
    return checked_key(trimmed, url) + "/" if trimmed else ""
