"""A program with a loader to observe. Prints "ready" once its scenario is reached, and stays there until it is killed. slow
dataset    a sample takes 5 ms, and the program requests batch after batch slow program    a sample takes no time, and the program
takes 20 ms per batch stuck           sample 17 never finishes, and the program waits for it still           the workers wait for
the program, which waits forever and holds two batches memfd           like still, with a ring without a name worker's death  like
still, after a worker was killed and replaced, and a bad sample was skipped
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

SCENARIOS = ("slow dataset", "slow program", "stuck", "still", "memfd", "worker's death")
STUCK, BAD = 17, 9


def pause(milliseconds: int | None) -> None:
    """Waits for `milliseconds`, or forever."""
    select.poll().poll(milliseconds)


class Rows:
    """Sample i contains 256 times i."""

    schema = {"x": ("int64", (256,))}

    def __init__(self, n: int, before: Callable[[int], None] | None = None) -> None:
        self.n = n
        self.before = before

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(256, index)}

    def read_into(self, index: int, out: Any) -> None:
        if self.before is not None:
            self.before(index)
        out["x"] = index


def slow(index: int) -> None:
    pause(5)


def stick(index: int) -> None:
    if index == STUCK:
        pause(None)


def fail(index: int) -> None:
    if index == BAD:
        raise ValueError("a bad sample")


def report(text: str) -> None:
    print(text, flush=True)


def main(scenario: str) -> None:
    from shmload import ShmLoader
    from shmload.shm import segment

    if scenario == "memfd":
        segment.shm_free_bytes = lambda: 0
    before = {"slow dataset": slow, "stuck": stick, "worker's death": fail}.get(scenario)
    dataset = Rows(40 if scenario == "still" else 4000, before)
    loader: Any = ShmLoader(dataset, batch_size=4, num_workers=2, seed=1, on_error="skip")
    batches = iter(loader)
    kept = [next(batches), next(batches)]
    if scenario == "worker's death":
        os.kill(loader.stats()["workers"][1]["pid"], signal.SIGKILL)
        while loader.stats()["num_restarts"] == 0 or loader.stats()["num_bad_samples"] == 0:
            kept = [kept[1], next(batches)]
    if scenario in ("still", "memfd", "worker's death"):
        while not all(worker["is_waiting"] for worker in loader.stats()["workers"]):
            pause(1)
        report("ready")
        pause(None)
    report("ready")
    for batch in batches:
        kept = [kept[1], batch]
        if scenario == "slow program":
            pause(20)


if __name__ == "__main__":
    main(sys.argv[1])
