"""A trainer to be killed: a program that brings a loader into a state, says so on its standard output, and stays there.

Arguments: state, start method, and what it does when a line comes on its standard input: "hang" (nothing), "close" (the loader),
"go on" (reads the epoch's rest, then closes). Prints "ready" once it is in the state, "done" after that.
"""

from __future__ import annotations

import ctypes
import select
import sys
from collections.abc import Callable
from typing import Any

from tests.faults.faults_kit import Rows

STATES = ("idle", "full ring", "python sample", "c sample", "start")
LONG_S = 30


FIRST_LONG = 8


class Long(Rows):
    """From the third batch on a sample takes half a minute."""

    def __init__(self, n: int, kind: str) -> None:
        super().__init__(n)
        self.kind = kind

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= FIRST_LONG:
            work_long(self.kind)
        return super().__getitem__(index)


def work_long(kind: str) -> None:
    """Half a minute in the interpreter, or in one call of C code that keeps the GIL."""
    if kind == "python sample":
        from time import monotonic

        end = monotonic() + LONG_S
        while monotonic() < end:
            pass
    else:
        ctypes.PyDLL(None).sleep(LONG_S)


def say(text: str) -> None:
    print(text, flush=True)


def hang() -> None:
    """Until killed."""
    select.poll().poll()


def follow(then: str, loader: Any, stream: Any) -> None:
    """Does what the third argument says when the line comes, and hangs."""
    if then == "hang":
        hang()
    sys.stdin.readline()
    if then == "go on":
        assert sum(1 for _ in stream) == 18
    loader.close()
    say("done")
    hang()


def await_workers(loader: Any, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Looks at the workers' records until all are so."""
    while not all(condition(worker) for worker in loader.stats()["workers"]):
        select.select([], [], [], 0.001)


def main(state: str, method: str, then: str = "hang") -> None:
    from shmload import ShmLoader

    dataset: Any = Rows(80) if state in ("idle", "full ring", "start") else Long(80, state)
    loader = ShmLoader(dataset, batch_size=4, seed=1, num_workers=2, multiprocessing_context=method)
    if state == "start":
        from shmload.worker import pool

        started = pool.ProcessPool._start

        def start(self: Any, post: Any) -> None:
            started(self, post)
            say("ready")  # in the middle: the worker has been started and knows nothing yet, the next does not exist

        pool.ProcessPool._start = start
        stream = iter(loader)
        next(stream)
        next(stream)
        follow(then, loader, stream)
    stream = iter(loader)
    kept = [next(stream), next(stream)]
    if state == "full ring":
        await_workers(loader, lambda worker: worker["is_waiting"])
        assert loader.stats()["slots"]["ordered"] == 4
    if state in ("python sample", "c sample"):
        await_workers(loader, lambda worker: worker["index"] >= FIRST_LONG and not worker["is_waiting"])
    say("ready")
    del kept
    follow(then, loader, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
