"""The cells of the fault matrix: every fault at every point, with every start method, in both modes.

The cells are the product of all these, without those that a rule in `IMPOSSIBLE` excludes. `Cell.promise` derives the promise of a
cell by rules, so that a new point or harm gets its cells and promises as soon as it is named.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from tests.faults.points import TRAINER_POINTS, WORKER_POINTS

HARMS = {  # name -> content of the armed fault
    "SIGKILL": str(int(signal.SIGKILL)),
    "SIGSEGV": str(int(signal.SIGSEGV)),
    "SIGTERM": str(int(signal.SIGTERM)),
    "STOP+CONT": str(int(signal.SIGSTOP)),
    "os._exit": "exit",
    "MemoryError": "MemoryError",
    "Exception": "LookupError",
}
RAISING = ("MemoryError", "Exception")
METHODS = ("fork", "spawn", "forkserver")
MODES = ("seed", "torch")

# points of a worker where an exception belongs to a sample or batch: the worker reports it and lives on
REPORTED = ("opening_memory", "mid_decode", "before_layout", "while_asking_layout", "waiting_layout", "waiting_grant")


class Cell(NamedTuple):
    """A fault at a point, with the start method and mode of the loader."""

    point: str
    harm: str
    method: str
    mode: str

    def __str__(self) -> str:
        return "/".join(self)

    @property
    def is_trainers(self) -> bool:
        """Returns whether the fault is in the trainer, not in a worker."""
        return self.point in TRAINER_POINTS

    @property
    def is_raised(self) -> bool:
        """Returns whether the harm is an exception."""
        return self.harm in RAISING

    @property
    def promise(self) -> str:
        """Returns the expected outcome.

        identical: the stream is unchanged. error: one exception, of the raised kind or WorkerDied, and the rest of the stream is
        unchanged.
        gone: the trainer dies and leaves nothing.
        """
        if self.harm == "STOP+CONT":
            return "identical"
        if self.is_trainers:
            return "error" if self.is_raised else "gone"
        if self.point == "leaving" or (self.mode == "seed" and not (self.is_raised and self.point in REPORTED)):
            return "identical"
        return "error"


IMPOSSIBLE: dict[str, Callable[[Cell], bool]] = {
    "C code raises nothing and runs no Python": lambda cell: cell.point == "releasing" and not cell.harm.startswith("S"),
    "torch mode abandons no orders": lambda cell: cell.point == "abandoning" and cell.mode == "torch",
    "torch mode replaces no worker by default": lambda cell: cell.point == "replacing" and cell.mode == "torch",
}


def all_cells() -> list[Cell]:
    """Returns the complete matrix."""
    cells = (Cell(*parts) for parts in product((*WORKER_POINTS, *TRAINER_POINTS), HARMS, METHODS, MODES))
    return [cell for cell in cells if not any(is_so(cell) for is_so in IMPOSSIBLE.values())]


def chosen(only: list[str], sample: int, seed: int) -> list[Cell]:
    """Returns the cells whose names contain all words, or a random sample of them, grouped by start method and mode."""
    cells = [cell for cell in all_cells() if all(word in cell for word in only)]
    if sample and sample < len(cells):
        cells = random.Random(seed).sample(cells, sample)
    order = all_cells()
    return sorted(cells, key=lambda cell: (METHODS.index(cell.method), cell.mode, order.index(cell)))
