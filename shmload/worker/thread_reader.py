"""Read several samples at once in the threads of one worker, for datasets that wait for a disk or network or release the GIL.

Rows are submitted in order and their results are taken in order, so the worker always waits for the oldest row, which is blamed for
a timeout. A death may be any row's fault, and so may a timeout in a dataset that itself reads several samples. The worker that
takes over the rows reads them one by one, so the next death or timeout is blamed on the right row. No read may outlast its chunk,
because it could write into a row that belongs to another batch by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def read_by_threads(
    threads: ThreadPoolExecutor, read: Callable[[int], T], rows: Sequence[int], begin: Callable[[int], object]
) -> Iterator[T]:
    """Yield `read(row)` for each row, in order. No read is running any more once the iterator has ended or was closed.

    Args:
        threads: the threads that read.
        read: reads a row.
        rows: the rows.
        begin: called with each row before waiting for it.
    Raises:
        Exception: the error of `read` for the first row that cannot be read.
    """
    reads: list[Future[T]] = [threads.submit(read, row) for row in rows]
    try:
        for row, one in zip(rows, reads, strict=True):
            begin(row)
            yield one.result()
    finally:
        for one in reads:
            one.cancel()
        wait(reads)
