"""Walk a folder and the folders that its links lead to, without endless loops."""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ["FolderIdentity", "identity_of", "walk_following_links"]

FolderIdentity = tuple[int, int]
"""Device and inode of a folder, which are the same whatever path leads to it."""


def identity_of(folder: str | os.PathLike[str]) -> FolderIdentity:
    """Return a folder's identity. Links are followed."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def walk_following_links(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (folder, names of its folders, names of its files) like `os.walk(root, followlinks=True)`.

    A link to a folder through which it was reached is omitted: its files would be found up to 40 times, until the kernel gives up.
    Two links to one folder elsewhere are both followed. A folder that is removed during the walk is omitted.

    Raises:
        OSError: a folder cannot be listed; `os.walk` would silently leave out everything below it.
    """
    above: dict[str, tuple[FolderIdentity, ...]] = {}  # for each folder to come, the folders through which it was reached
    if os.path.isdir(root):
        above[root] = (identity_of(root),)
    for place, folders, names in os.walk(root, followlinks=True, onerror=_raise_unless_removed):
        reached = above.pop(place, ())
        kept = []
        for name in folders:
            path = os.path.join(place, name)
            try:
                identity = identity_of(path)
            except FileNotFoundError:  # it was removed, or its links lead nowhere
                continue
            if identity not in reached:
                above[path] = (*reached, identity)
                kept.append(name)
        folders[:] = kept
        yield place, folders, names


def _raise_unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
