"""A worker's way through an IterableDataset: one iterator for each pass, made when the pass's first order is taken.

The dataset itself sees to it that workers read different samples (get_worker_info); an order only says how many are wanted.
"""

from __future__ import annotations

from typing import Any


class IterablePass:
    """The iterator of the pass under way.

    Args:
        has_ended: the first pass is at its end already, its iterator is not begun.
        iterator_state: what the first pass's iterator is told by its `load_state_dict`; None: nothing.
    """

    def __init__(self, dataset: Any, iterator_state: Any = None, *, has_ended: bool = False) -> None:
        self.dataset = dataset
        self._iterator_state = iterator_state
        self._epoch: int | None = None
        self.iterator: Any = None
        self.has_ended = has_ended

    def enter(self, epoch: int, shared_seed: int) -> None:
        """Begins the pass of this number, if it is not the one under way.

        Args:
            shared_seed: what the shufflers of a DataPipe are seeded with, in all workers and ranks.
        """
        if epoch == self._epoch:
            return
        if self._epoch is None and self.has_ended:
            self._epoch, self._iterator_state = epoch, None
            return
        if self._epoch is not None:
            self.dataset = with_shared_seed(self.dataset, shared_seed)
        self.iterator = iter(self.dataset)
        if self._iterator_state is not None:
            self.iterator.load_state_dict(self._iterator_state)
            self._iterator_state = None
        self._epoch = epoch
        self.has_ended = False

    def next(self) -> Any:
        """The next sample; StopIteration at the end, for good."""
        if self.has_ended:
            raise StopIteration
        try:
            return next(self.iterator)
        except StopIteration:
            self.has_ended = True
            raise


def with_shared_seed(dataset: Any, shared_seed: int) -> Any:
    """A DataPipe with its shufflers seeded; any other dataset as it is."""
    import torch
    from torch.utils.data import IterDataPipe
    from torch.utils.data.graph_settings import apply_random_seed

    if not isinstance(dataset, IterDataPipe):
        return dataset
    generator = torch.Generator()
    generator.manual_seed(shared_seed)
    return apply_random_seed(dataset, generator)
