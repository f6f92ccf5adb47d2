"""A training program for the environments that containers create. Prints one line of JSON about itself.

Arguments: JSON of `num_workers`, `seed`, `method`, `sample_nbytes` and `action`: "" reads two epochs; "kill" kills a worker in the
first; "term" sends SIGTERM to the trainer, which has a handler.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.faults_kit import digest

NUM_SAMPLES = 24


class Samples:
    """Rows of `sample_nbytes` bytes."""

    def __init__(self, sample_nbytes: int) -> None:
        self.sample_nbytes = sample_nbytes

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(self.sample_nbytes, index, np.uint8), "i": index}


class Terminated(Exception):
    """Raised by the handler of SIGTERM."""


def stop(*_: object) -> None:
    raise Terminated


def zombies() -> int:
    """Returns 1 if a child of this process has ended and was not waited for, else 0. /proc may show other processes by our ids."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is no child
        return 0
    return ended is not None


def main(num_workers: int, seed: int | None, method: str, sample_nbytes: int, action: str) -> dict[str, Any]:
    from shmload import ShmLoader
    from shmload.shm import segment

    kinds: list[str] = []
    made = segment.Segment.__init__

    def init(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        kinds.append(self.kind)

    segment.Segment.__init__ = init  # type: ignore[method-assign]  # to see what was made
    loader = ShmLoader(Samples(sample_nbytes), batch_size=4, seed=seed, num_workers=num_workers, multiprocessing_context=method)
    signal.signal(signal.SIGTERM, stop)
    digests: list[str] = []
    stopped = False
    try:
        with loader:
            for _ in range(2):
                for number, batch in enumerate(loader):
                    digests.append(digest(batch))
                    if number == 1 and len(digests) == 2 and action == "kill":
                        os.kill(max(worker["pid"] for worker in loader.stats()["workers"]), signal.SIGKILL)
                    if number == 1 and action == "term":
                        os.kill(os.getpid(), signal.SIGTERM)
    except Terminated:
        stopped = True
    shm = Path("/dev/shm")
    names = [name for name in os.listdir(shm) if "shmload" in name] if shm.is_dir() else []
    return {
        "pid": os.getpid(),
        "digests": digests,
        "kinds": sorted(set(kinds)),
        "names": names,
        "zombies": zombies(),
        "stopped": stopped,
    }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
