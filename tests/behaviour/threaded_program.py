"""Iterate a separate loader in each of several threads at the same time, repeatedly.

The argument is "torch" or "shmload". Prints the errors of the first failing round as JSON. A program, because a thread that blocks
forever would remain in the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from torch.utils.data import DataLoader

from shmload import ShmLoader
from tests.behaviour.behaviour_kit import Numbers, batches

NUM_ROUNDS = 25
NUM_THREADS = 3
DEADLINE_S = 60  # per round, which takes about 0.1 s


def run_round(name: str) -> list[str]:
    """Returns the errors of one round."""
    kind = {"torch": DataLoader, "shmload": ShmLoader}[name]
    together = threading.Barrier(NUM_THREADS)
    wrong: list[str] = []

    def epoch() -> None:
        together.wait(DEADLINE_S)
        try:
            found = batches(kind(Numbers(8), batch_size=3, num_workers=1))
            if found != [[0, 1, 2], [3, 4, 5], [6, 7]]:
                wrong.append(f"batches {found}")
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=epoch, daemon=True) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return wrong + ["a thread does not end" for thread in threads if thread.is_alive()]


if __name__ == "__main__":
    wrong: list[str] = []
    for _ in range(NUM_ROUNDS):
        wrong = wrong or run_round(sys.argv[1])
    print(json.dumps(wrong), flush=True)
    os._exit(0)
