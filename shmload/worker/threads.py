"""Several threads of one worker reading samples at once: for datasets that wait, for a disk or a network, or give up the GIL.

Rows are given out in order and their results taken in order, so the worker always waits for the oldest row, and that one gets the
blame for a delay. A death may be any row's: whoever takes the rows over reads them one by one, so that the next death names the
right one. No read may outlive its chunk: it could write into a row that is another batch's by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class ReadingThreads:
    """`num_threads` threads that live as long as the worker."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="shmload-read")

    def results(self, read: Callable[[int], T], rows: Sequence[int], begin: Callable[[int], None]) -> Iterator[T]:
        """What `read` gives for each row, in order. When the iterator is closed, nothing is being read any more.

        Args:
            begin: told of each row before it is waited for.
        Raises:
            what the first row that cannot be read raised.
        """
        reads: list[Future[T]] = [self._pool.submit(read, row) for row in rows]
        try:
            for row, one in zip(rows, reads, strict=True):
                begin(row)
                yield one.result()
        finally:
            for one in reads:
                one.cancel()
            wait(reads)
