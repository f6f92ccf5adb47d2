"""A trainer for tests that kill it: a program that brings a loader into a state, prints "ready" and stays there.

Arguments: the state, the start method, and what to do after a line on standard input: "hang" (nothing), "close" (close the loader)
or "go on" (read the rest of the epoch, then close). Prints "done" afterwards.
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
    """A dataset whose samples take half a minute from the third batch on."""

    def __init__(self, n: int, kind: str) -> None:
        super().__init__(n)
        self.kind = kind

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= FIRST_LONG:
            work_long(self.kind)
        return super().__getitem__(index)


def work_long(kind: str) -> None:
    """Works for half a minute in the interpreter, or in one C call that holds the GIL."""
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
    """Blocks until killed."""
    select.poll().poll()


def follow(then: str, loader: Any, stream: Any) -> None:
    """Waits for the line, does what the third argument says, and hangs."""
    if then == "hang":
        hang()
    sys.stdin.readline()
    if then == "go on":
        assert sum(1 for _ in stream) == 18
    loader.close()
    say("done")
    hang()


def await_workers(loader: Any, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Polls the workers' records until the condition holds for all."""
    while not all(condition(worker) for worker in loader.stats()["workers"]):
        select.select([], [], [], 0.001)


def main(state: str, method: str, then: str = "hang") -> None:
    from shmload import ShmLoader

    dataset: Any = Rows(80) if state in ("idle", "full ring", "start") else Long(80, state)
    loader = ShmLoader(dataset, batch_size=4, seed=1, num_workers=2, multiprocessing_context=method)
    if state == "start":
        from shmload.worker import pool

        started = pool.ProcessPool._start

        def start(self: Any, link: Any) -> None:
            started(self, link)
            say("ready")  # the first worker has been started and knows nothing yet, and the second does not exist

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
