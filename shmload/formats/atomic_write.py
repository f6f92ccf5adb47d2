"""Write files atomically: a file appears complete, or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from typing import Self


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise unless an atomic write may replace an existing file at `path`.

    Raises:
        ValueError: `path` is a folder, a device or a pipe, which root could overwrite.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{os.fspath(path)} is not a file, so it is not replaced: give the path of a file")


def make_half(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Create a temporary file in the folder of `path`, which the caller renames to `path`. Return (descriptor, name)."""
    half = os.path.join(os.path.dirname(path), f".shmload-{secrets.token_hex(8)}")
    return os.open(half, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), half


class AtomicWriter(ABC):
    """A writer whose file appears atomically: complete after the `with` block, or not at all if the block raised."""

    @abstractmethod
    def close(self) -> None: ...  # completes the file and gives it its name

    @abstractmethod
    def abandon(self) -> None: ...  # discards the file; an older one stays

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self.abandon)
            if kind is None:
                self.close()
                stack.pop_all()


def write_whole(path: str | os.PathLike[str], data: bytes, *, is_new: bool = False) -> bool:
    """Write a file atomically, replacing an older one. Return whether it was written.

    Args:
        path: path of the file.
        data: its contents.
        is_new: do not replace an existing file; return False instead.
    Raises:
        OSError: it cannot be written.
    """
    fd, half = make_half(path)  # no file object, which would warn about an open file when a signal ends the process here
    try:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        (os.link if is_new else os.replace)(half, path)
    except FileExistsError:
        return False
    finally:
        with suppress(FileNotFoundError):
            os.unlink(half)
    return True


def write_if_possible(path: str | os.PathLike[str], data: bytes) -> None:
    """Write an optional file, such as an index, atomically. Errors, such as a full disk, are ignored."""
    with suppress(OSError):
        write_whole(path, data)
