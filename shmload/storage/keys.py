"""Check keys of objects, by the same rules in every store.

A key is parts joined by "/", relative to the store's root, and cannot name anything outside it.
"""

from __future__ import annotations

import functools
import logging
import posixpath
import re

from shmload.errors import StoreError

__all__ = ["checked_key", "checked_prefix", "is_key", "is_listed"]

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
log = logging.getLogger("shmload")


def is_key(key: str) -> bool:
    """Return whether the text can name an object: relative, without control characters, empty parts, "." and ".."."""
    if any(part in ("", ".", "..") for part in key.split("/")) or _CONTROL.search(key):
        return False
    try:
        return len(key.encode()) <= 1024
    except UnicodeEncodeError:  # the name of a local file that is not UTF-8
        return False


def is_listed(name: str, url: str) -> bool:
    """Return whether a listing contains an object or a folder: whether its name is a valid key.

    Log a warning for any other name, once in this process, because its data are left out; not for the marker of a folder.

    Args:
        name: its name, relative to the URL.
        url: URL of the store, or the folder.
    """
    if is_key(name):
        return True
    if name and not name.endswith("/"):
        _warn_of(name, url)
    return False


@functools.cache
def _warn_of(name: str, url: str) -> None:
    log.warning(
        "%s: %r is left out, because it is not a valid key (UTF-8 without control characters, at most 1,024 bytes): rename it",
        url,
        name,
    )


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
            f'{key!r} is not a valid key of {url}: a key is relative to it, has no empty part and no "." or "..", no control '
            f"characters, and at most 1,024 bytes of UTF-8. Try {posixpath.normpath('/' + key).strip('/')!r}"
        )
    return key


def checked_prefix(prefix: str, url: str) -> str:
    """Return a folder's key followed by "/"; empty for the root.

    Raises:
        StoreError: the key is invalid.
    """
    trimmed = prefix.removesuffix("/")
    return checked_key(trimmed, url) + "/" if trimmed else ""
