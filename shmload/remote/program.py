"""What is done with the samples, and what is known of the items before any is read.

As long as every stage makes one item of one, or batches, or slices, it is known without reading which samples make up which item
(units.py). `shuffle` keeps the number, not which is which. `select`, `unbatched` and `then` end that knowledge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shmload.remote.stages import Stage
from shmload.remote.units import Units

__all__ = ["Program", "run_stages"]

_NO_LEVELS = Units()
Known = Literal["units", "number", "nothing"]


@dataclass(frozen=True)
class Program:
    """What is done with the samples.

    Attributes:
        units: which samples make up the items, as far as that is known.
        known: "units": the k-th item is the k-th unit; "number": there are as many items as units; "nothing".
        unknown: the stage that ended the knowledge.
        repetitions: epochs in a pass; None: without end.
        limit: items of a pass; None: all.
        length: what len() is told to say.
    """

    stages: tuple[Stage, ...] = ()
    units: Units = _NO_LEVELS
    known: Known = "units"
    unknown: str = ""
    repetitions: int | None = 1
    limit: int | None = None
    length: int | None = None

    def then(self, stage: Stage) -> Program:
        return replace(self, stages=(*self.stages, stage))

    def ended_by(self, name: str) -> Program:
        return self if self.known == "nothing" else replace(self, known="nothing", unknown=name)

    def count(self, num_samples: int) -> int:
        """Items of a pass over so many samples.

        Raises:
            TypeError: nobody can know.
        """
        if self.length is not None:
            return self.length
        if self.limit is not None:
            return self.limit
        if self.repetitions is None:
            raise TypeError("a dataset with repeat() has no end, and no len(): give repeat a number, or with_epoch(n)")
        if self.known == "nothing":
            raise TypeError(
                f"the number of items behind {self.unknown} is not known before they are read: give it by with_length(n), or bound "
                "a pass by with_epoch(n)"
            )
        return self.repetitions * self.units.count(num_samples)


def run_stages(stages: Sequence[Stage], samples: Iterator[Any], seed: int) -> Iterator[Any]:
    """The items that come of samples."""
    items = samples
    for number, stage in enumerate(stages):
        items = stage.run(items, seed + number)
    return items
