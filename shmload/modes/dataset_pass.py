"""The number of a pass over an iterable dataset that numbers its passes, such as RemoteDataset, for the loader's state.

Such a dataset orders each pass by its number. It has `next_pass`, `pass_of(base_seed, since)` and `set_epoch(number)`. A state
without the number would continue in the order of the first pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from shmload.introspect.abilities import package_ability

if TYPE_CHECKING:
    from shmload.engine.config import LoaderConfig
    from shmload.modes.torch_state import TorchState


@dataclass(frozen=True)
class DatasetPass:
    """A pass that a loader has begun.

    Attributes:
        dataset: the dataset.
        base_seed: seed of the pass's workers; None without workers.
        since: the dataset's `next_pass` when the pass began.
    """

    dataset: Any
    base_seed: int | None
    since: int

    @classmethod
    def begun(cls, config: LoaderConfig, base_seed: int) -> Self | None:
        """Return the pass that begins now; None if the dataset does not number its passes.

        With workers, none of them has begun its iterator yet. Without, the iterator exists.
        """
        number = next_pass(config.dataset)
        if number is None:
            return None
        return cls(config.dataset, base_seed, number) if config.total_workers else cls(config.dataset, None, number - 1)

    @property
    def number(self) -> int:
        """Return the number of the pass."""
        return int(self.dataset.pass_of(self.base_seed, self.since))


def next_pass(dataset: Any) -> int | None:
    """Return the number of a dataset's next pass; None if the dataset does not number its passes."""
    return None if package_ability(dataset, "pass_of") is None else int(dataset.next_pass)


def continue_pass(dataset: Any, state: TorchState) -> None:
    """Make the pass of a state the dataset's next one, or the pass after it if it has ended."""
    if (number := state.get("dataset_pass")) is not None and next_pass(dataset) is not None:
        dataset.set_epoch(number)
