"""The index that was to be written beside a file: whether it is there, and why not."""

from __future__ import annotations

import os
import tempfile

from shmload.observe.inspect.indexed import Indexed


def outcome(source: str, path: str, num_samples: int, before: tuple[int, int] | None) -> Indexed:
    """What became of an index.

    Args:
        path: where it should be.
        before: what `stamp` gave before it was made.
    """
    after = stamp(path)
    if after is None or (before is not None and after == before and not _is_newer(path, source)):
        return Indexed(source, None, num_samples=num_samples, why=refusal(os.path.dirname(path)), is_refused=True)
    why = "it was there, and fits" if after == before else ""
    return Indexed(source, path, os.path.getsize(path), num_samples, why)


def stamp(path: str) -> tuple[int, int] | None:
    """What tells one file at a path from the next; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def refusal(folder: str) -> str:
    """Why nothing can be written in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder or "."):
            return f"{folder or '.'} did not take it; is the disk full?"
    except OSError as error:
        return f"{folder or '.'} cannot be written to: {error.strerror or error}"


def _is_newer(path: str, source: str) -> bool:
    return os.stat(path).st_mtime_ns >= os.stat(source).st_mtime_ns
