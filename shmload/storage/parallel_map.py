"""`parallel_map`: call a function in threads that end with the call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

__all__ = ["T", "parallel_map"]

T = TypeVar("T")
U = TypeVar("U")


def parallel_map(do: Callable[[T], U], things: Iterable[T], num_threads: int, given_up: threading.Event) -> list[U]:
    """Call `do` with each of `things` in threads that end with this call. Return the results in order.

    The first failure, or Ctrl-C, sets `given_up`, cancels the calls that have not started, and is raised.

    Args:
        do: function to call.
        things: its arguments.
        num_threads: maximum number of threads.
        given_up: event by which running calls can notice the failure.
    """
    with ThreadPoolExecutor(num_threads, "shmload-store") as threads:
        try:
            futures = [threads.submit(do, each) for each in things]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            given_up.set()
            threads.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]
