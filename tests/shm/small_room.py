"""Loaders whose rings change their memory repeatedly, for tests with little or no room in /dev/shm.
    python -m tests.shm.small_room METHOD KILOBYTES     workers by that start method, samples that grow by KILOBYTES each
Prints what was wrong, or "right".
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np

from shmload import ShmLoader

BATCH = 4


class Growing:
    """Sample i is text and numbers, both longer than those of the sample before."""

    def __init__(self, num_samples: int, step_nbytes: int) -> None:
        self.num_samples, self.step_nbytes = num_samples, step_nbytes

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        nbytes = self.step_nbytes * (index + 1)
        return {"text": chr(97 + index % 26) * (nbytes // 8), "x": np.full(nbytes // 8, index, np.int64)}


def what_is_wrong(dataset: Growing, **options: Any) -> list[str]:
    """Reads an epoch of batches in order, holding each for one step longer than usual; returns the differences."""
    found, number, last = [], 0, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about more workers than cores
        with ShmLoader(dataset, BATCH, ragged="list", **options) as loader:
            for batch in loader:
                for each in (last, batch):
                    first = number - BATCH if each is last else number
                    if each is not None and not _is_right(dataset, each, first):
                        found.append(f"the batch of {first} is not right")
                last, number = batch, number + len(batch["x"])
    return found if number == len(dataset) else [*found, f"{number} samples"]


def _is_right(dataset: Growing, batch: dict[str, Any], first: int) -> bool:
    for row, (text, x) in enumerate(zip(batch["text"], batch["x"], strict=True)):
        expected = dataset[first + row]
        if text != expected["text"] or not np.array_equal(x.numpy(), expected["x"]):
            return False
    return True


if __name__ == "__main__":
    method, kilobytes = sys.argv[1:]
    found = what_is_wrong(Growing(80, int(kilobytes) << 10), num_workers=3, multiprocessing_context=method, seed=1, shuffle=False)
    print("\n".join(found) or "right")
