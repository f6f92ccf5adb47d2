"""The cells of the fault matrix: every point, hit with every harm, under every start method, in both modes.

They are a product, less what a stated rule (`IMPOSSIBLE`) says cannot be; and what each must come to is a rule as well
(`Cell.promise`), so that a new point or harm has its cells and their promise by being named.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from tests.faults.points import TRAINER_POINTS, WORKER_POINTS

HARMS = {  # name -> content of the charge
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

# of the worker's points: where an exception is a sample's, or its batch's, and the worker reports it and lives
REPORTED = ("opening_memory", "mid_decode", "before_layout", "while_asking_layout", "waiting_layout", "waiting_grant")


class Cell(NamedTuple):
    """One fault: where, what, and in what kind of loader."""

    point: str
    harm: str
    method: str
    mode: str

    def __str__(self) -> str:
        return "/".join(self)

    @property
    def is_trainers(self) -> bool:
        """Whether the trainer is harmed, and not a worker."""
        return self.point in TRAINER_POINTS

    @property
    def is_raised(self) -> bool:
        """Whether the harm is an exception."""
        return self.harm in RAISING

    @property
    def promise(self) -> str:
        """What must come of it.

        identical: nobody who reads the stream can tell. error: one exception, of the kind that was raised or WorkerDied, and the
        rest of the stream is identical. gone: the trainer is dead, and so is everything of its.
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
    "torch mode replaces no worker unless told to": lambda cell: cell.point == "replacing" and cell.mode == "torch",
}


def all_cells() -> list[Cell]:
    """The complete matrix."""
    cells = (Cell(*parts) for parts in product((*WORKER_POINTS, *TRAINER_POINTS), HARMS, METHODS, MODES))
    return [cell for cell in cells if not any(is_so(cell) for is_so in IMPOSSIBLE.values())]


def chosen(only: list[str], sample: int, seed: int) -> list[Cell]:
    """The cells with all of these words in their names; of these so many at random (0: all), grouped by start method and mode."""
    cells = [cell for cell in all_cells() if all(word in cell for word in only)]
    if sample and sample < len(cells):
        cells = random.Random(seed).sample(cells, sample)
    order = all_cells()
    return sorted(cells, key=lambda cell: (METHODS.index(cell.method), cell.mode, order.index(cell)))
