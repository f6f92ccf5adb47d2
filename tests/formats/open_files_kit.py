"""A limit of open files for tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited_open_files(num_more: int | None = None) -> Iterator[int]:
    """Limit the files that this process may open, and yield a number of files that exceeds the limit.

    Args:
        num_more: how many more may be open than are open now. The default is about twice as many, because a quarter of the limit
            may stay open.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))  # the limit is a number of a descriptor, and lower ones may be free
    limit = 2 * num_open + 40 if num_more is None else lowest + num_more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit + 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
