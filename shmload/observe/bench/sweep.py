"""Which settings are measured: one point, or the cross product of what the lists name."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Point:
    """One setting of every loader; None is what the workload, the user's DataLoader or torch says."""

    num_workers: int | None = None
    prefetch_factor: int | None = None
    batch_size: int | None = None

    def label(self) -> str:
        """The parts that were asked for, as a reader of the table knows them."""
        parts = [
            f"{number} {word}"
            for number, word in (
                (self.num_workers, "worker" if self.num_workers == 1 else "workers"),
                (self.prefetch_factor, "ahead"),
            )
            if number is not None
        ]
        return ", ".join([*parts, *([f"batch {self.batch_size}"] if self.batch_size else [])])


def points(
    num_workers: Sequence[int | None], prefetch_factors: Sequence[int | None], batch_sizes: Sequence[int | None]
) -> list[Point]:
    """The cross product, the batch size outermost. Without workers nothing is prefetched, so there those are one point."""
    found = [
        Point(workers, None if workers == 0 else prefetch, batch_size)
        for batch_size, workers, prefetch in product(
            batch_sizes or [None], num_workers or [None], prefetch_factors or [None]
        )
    ]
    return list(dict.fromkeys(found))
