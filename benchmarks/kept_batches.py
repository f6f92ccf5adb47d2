"""What does a batch cost a program that keeps its newest batches, in a process with many objects?

Method: a fresh process for each loader. It first makes `NUM_OBJECTS` small lists, which every full collection of garbage visits.
Then it keeps the newest 1 to 12 batches of 8 rows of 1,000 float32 in a deque. The ring of two workers has 6 slots. The time for
each batch is the mean over a pass, best of `rounds`.

How to read: torch's batches own their memory, so its time does not depend on how many are kept. A loader whose batches share a
ring must not become slower than that, whatever is kept.
"""

import json
import subprocess
import sys
import warnings
from collections import deque
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import Result, Row, Settings, main
from shmload import ShmLoader

NUM_OBJECTS = 500_000
KEPT = (1, 3, 4, 5, 6, 12)
LOADERS: dict[str, Any] = {"torch": (DataLoader, {}), "shmload": (ShmLoader, {}), "shmload, seed": (ShmLoader, {"seed": 7})}


class Rows(Dataset[torch.Tensor]):
    """Rows of 1,000 float32."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), float(index))


def us_per_batch(name: str, num_kept: int, num_batches: int) -> float:
    """Reads a pass with one loader. Returns the mean wall time per batch after the first ten, in microseconds."""
    kind, options = LOADERS[name]
    kept: deque[torch.Tensor] = deque(maxlen=num_kept)
    began = 0.0
    for number, batch in enumerate(kind(Rows(8 * num_batches), batch_size=8, num_workers=2, **options)):
        if number == 10:
            began = perf_counter()
        kept.append(batch)
        del batch
    return (perf_counter() - began) / (num_batches - 10) * 1e6


def measured_here(name: str, rounds: int, num_batches: int) -> dict[int, float]:
    """Measures one loader in this process, with every number of kept batches."""
    warnings.simplefilter("ignore", UserWarning)  # the warning that batches are copied out is expected
    heap = [[number] for number in range(NUM_OBJECTS)]
    found = {count: min(us_per_batch(name, count, num_batches) for _ in range(rounds)) for count in KEPT}
    assert len(heap) == NUM_OBJECTS
    return found


def measure(settings: Settings) -> Result:
    """Measures every loader in a process of its own."""
    num_batches = max(int(400 * settings.seconds), 50)
    found: dict[str, dict[int, float]] = {}
    for name in LOADERS:
        call = f"measured_here({name!r}, {settings.rounds}, {num_batches})"
        code = f"from benchmarks.kept_batches import measured_here, json; print(json.dumps({call}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found[name] = {int(count): value for count, value in json.loads(done.stdout).items()}
    rows = []
    for name in ("shmload", "shmload, seed"):
        ratios = {count: found["torch"][count] / found[name][count] for count in KEPT}
        worst = min(ratios, key=lambda count: ratios[count])
        beside = f"{found[name][worst]:.0f} us with {worst} kept, torch {found['torch'][worst]:.0f}"
        rows.append(
            Row(
                f"keeping batches, {name}: torch's time over its own, worst case",
                ratios[worst],
                "x",
                beside,
                ">= 1x",
                ratios[worst] >= 1,
            )
        )
    return Result(rows, {"us_per_batch": found})


if __name__ == "__main__":
    main("kept_batches", __doc__, measure)
