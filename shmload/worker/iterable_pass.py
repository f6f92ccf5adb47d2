"""Read an IterableDataset in a worker: one iterator for each pass, made with the first order of the pass.

The dataset itself gives each worker different samples (`get_worker_info`); an order contains only their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any


class IterablePass:
    """The current pass through an iterable dataset.

    Args:
        dataset: the dataset.
        iterator_state: saved state to load into the first pass's iterator; None for none.
        has_ended: the first pass had already ended when the state was saved, so no iterator is made for it.
        is_over: the dataset's state was saved at the end of a pass, and the first pass is the one after it.

    Attributes:
        dataset, has_ended: as above, kept up to date.
        iterator: the iterator of the current pass; None before the first.
    """

    def __init__(self, dataset: Any, iterator_state: Any = None, *, has_ended: bool = False, is_over: bool = False) -> None:
        self.dataset, self._iterator_state, self.has_ended = dataset, iterator_state, has_ended
        self._begins_again = is_over or has_ended
        self._epoch: int | None = None
        self.iterator: Any = None

    def enter(self, epoch: int, shared_seed: int) -> None:
        """Begin the pass of this number, unless it is the current one.

        Args:
            epoch: number of the pass.
            shared_seed: seeds the shufflers of a DataPipe, in all workers and ranks.
        """
        if epoch == self._epoch:
            return
        if self._epoch is None and self.has_ended:
            if self._iterator_state is not None:  # loaded although the pass has ended, because this may also change the dataset
                iter(self.dataset).load_state_dict(self._iterator_state)
            self._epoch, self._iterator_state = epoch, None
            return
        if self._epoch is not None:
            self.dataset = with_shared_seed(self.dataset, shared_seed)
        self.iterator = RestartingIterator(self.dataset, iter(self.dataset)) if self._begins_again else iter(self.dataset)
        self._begins_again = False
        if self._iterator_state is not None:
            self.iterator.load_state_dict(self._iterator_state)
            self._iterator_state = None
        self._epoch = epoch
        self.has_ended = False

    def next(self) -> Any:
        """Return the next sample.

        Raises:
            StopIteration: the pass has ended.
        """
        if self.has_ended:
            raise StopIteration
        try:
            return next(self.iterator)
        except StopIteration:
            self.has_ended = True
            raise


class RestartingIterator:
    """An iterator over a dataset that replaces its first iterator by a second one if the first is empty.

    A dataset whose state was saved at the end of a pass may first return an iterator that is already at its end, although the next
    pass is whole. Other datasets begin the next pass by themselves; for them, this is an ordinary iterator.

    Args:
        dataset: the dataset.
        first: its first iterator.
    """

    def __init__(self, dataset: Any, first: Iterator[Any]) -> None:
        self._dataset: Any = dataset
        self.iterator = first

    def __iter__(self) -> RestartingIterator:
        return self

    def __next__(self) -> Any:
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            with suppress(StopIteration):
                return next(self.iterator)
            self.iterator = iter(dataset)
        return next(self.iterator)


def with_shared_seed(dataset: Any, shared_seed: int) -> Any:
    """Seed the shufflers of a DataPipe and return it; return any other dataset unchanged."""
    import torch
    from torch.utils.data import IterDataPipe
    from torch.utils.data.graph_settings import apply_random_seed

    if not isinstance(dataset, IterDataPipe):
        return dataset
    generator = torch.Generator()
    generator.manual_seed(shared_seed)
    return apply_random_seed(dataset, generator)
