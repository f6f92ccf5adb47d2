"""The page cache: files are dropped from it before a cold pass, and looked at whether that was so.

posix_fadvise(2) with POSIX_FADV_DONTNEED asks the kernel to forget a file's clean pages; nobody needs to be root for it. It
forgets no page that some process has mapped, none of tmpfs, and on some file systems none at all: so mincore(2) is asked
what is left. Dirty pages are written out first, for the kernel keeps those too.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

PAGE = mmap.PAGESIZE


def files_below(paths: Iterable[Path]) -> list[str]:
    """The files that are named, and those in named folders, sorted; absolute, so that a folder may change."""
    found: set[Path] = set()
    for path in paths:
        found.update([path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()])
    return sorted(str(path.absolute()) for path in found)


def drop(files: Sequence[str]) -> float:
    """Asks the kernel to forget the files' pages; returns the share of their bytes that is still in memory."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return resident_share(files)


def resident_share(files: Sequence[str]) -> float:
    """The share of the files' pages that are in memory."""
    pages = resident = 0
    for file in files:
        count, found = resident_pages(file)
        pages, resident = pages + count, resident + found
    return resident / pages if pages else 0.0


def resident_pages(file: str) -> tuple[int, int]:
    """Pages of a file, and how many of them are in memory."""
    length = os.stat(file).st_size
    if not length:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        # Private and writable, because ctypes only tells the address of a writable buffer; nothing is written or read.
        with mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            count = -(-length // PAGE)
            found = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(mapped)
            try:
                if libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(length), found):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), file)
            finally:
                del first  # a mapping with a pointer into it cannot be closed
            return count, sum(byte & 1 for byte in found)
    finally:
        os.close(descriptor)
