"""The state of a worker that travels with its batches, so that a resumed run continues as if it had not stopped (torch mode).

A snapshot contains the dataset's `state_dict()`, the iterator's, and the states of the global generators, directly after the
batch that it travels with, however far the worker has read ahead. It reaches the trainer as bytes, which are only unpickled
when a state is asked for. In torch mode the note that travels with a batch also says whether the worker's iterable dataset has
ended:

    one byte of flags | the snapshot, or its place in the payload if it is longer than a note may be

A worker whose snapshot has not changed sends the flags alone.

A worker reads an IterableDataset through one iterator for each pass, made when the pass's first order is taken. The dataset itself
gives workers different samples (get_worker_info); an order only says how many are wanted.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from shmload.shm import travel
from shmload.worker.job import Job
from shmload.worker.sample_rng import Streams
from shmload.world import is_stateful


class IterablePass:
    """The present pass through an iterable dataset.

    Args:
        has_ended: the first pass has already ended, and no iterator is made for it.
        iterator_state: loaded into the first pass's iterator, unless None.
        is_over: the dataset's state was saved at the end of a pass, and the first pass is the one after it.
    """

    def __init__(self, dataset: Any, iterator_state: Any = None, *, has_ended: bool = False, is_over: bool = False) -> None:
        self.dataset, self._iterator_state, self.has_ended = dataset, iterator_state, has_ended
        self._begins_again = is_over or has_ended
        self._epoch: int | None = None
        self.iterator: Any = None

    def enter(self, epoch: int, shared_seed: int) -> None:
        """Begin the pass of this number, unless it is the present one.

        Args:
            shared_seed: seeds the shufflers of a DataPipe, in all workers and ranks.
        """
        if epoch == self._epoch:
            return
        if self._epoch is None and self.has_ended:
            if self._iterator_state is not None:  # it may have changed more than itself
                iter(self.dataset).load_state_dict(self._iterator_state)
            self._epoch, self._iterator_state = epoch, None
            return
        if self._epoch is not None:
            self.dataset = with_shared_seed(self.dataset, shared_seed)
        self.iterator = BeginsAgain(self.dataset) if self._begins_again else iter(self.dataset)
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


class BeginsAgain:
    """An iterator over a dataset, which begins again if it turns out to be at its end at once.

    A dataset whose state was saved at the end of a pass may make of that state an iterator with nothing left, though its next pass
    is whole. Another dataset begins its next pass by itself; then this is an ordinary iterator.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset: Any = dataset
        self.iterator = iter(dataset)

    def __iter__(self) -> BeginsAgain:
        return self

    def __next__(self) -> Any:
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            with suppress(StopIteration):
                return next(self.iterator)
            self.iterator = iter(dataset)
        return next(self.iterator)


def load_own_states(dataset: Any, snapshot: Snapshot) -> None:
    """Load a dataset's state, and before it that of the last pass's iterator, which may have changed more than itself."""
    if "dataset" in snapshot:
        dataset.load_state_dict(snapshot["dataset"])
    if "last_iterator" in snapshot:
        last = iter(dataset)
        if is_stateful(last):
            last.load_state_dict(snapshot["last_iterator"])
        if "dataset" in snapshot:
            dataset.load_state_dict(snapshot["dataset"])


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


SAME = b""  # the worker's snapshot equals its last one

# "dataset", "iterator": the user's own states, if they have any
# "streams": see Streams.positions
# "has_ended": the last batch has used up the iterator
# between passes: "last_iterator": the state of the last pass's iterator; "is_over": see IterablePass
Snapshot = dict[str, Any]

OWN_STATES = ("dataset", "iterator", "last_iterator")  # the parts of a snapshot that the user's objects have made


def own_states(dataset: Any, iterator: Any, *, has_ended: bool) -> Snapshot:
    """Return the states of a dataset and of the iterator over it."""
    parts = {"iterator": iterator} if iterator is dataset else {"dataset": dataset, "iterator": iterator}
    snapshot = {name: part.state_dict() for name, part in parts.items() if is_stateful(part)}
    return {**snapshot, "has_ended": True} if has_ended else snapshot


class Snapshots:
    """Takes a worker's snapshots, from the time when it is ready for orders.

    Args:
        source: the pass through the dataset, if that is iterable.
        streams: of this process's generators, at their places in the saved run.
    """

    def __init__(self, job: Job, source: IterablePass | None, num_workers: int, streams: Streams) -> None:
        self._every, self._num_steps, self._dataset = job.snapshot_every, job.num_steps, job.dataset
        self._source, self._num_workers = source, num_workers
        self._streams = streams
        self._last_streams = self._streams.positions()
        self._last: bytes | None = None  # the last one that was sent; None: send the next one in any case
        self._last_iterator: Any = None
        # otherwise only the streams can change; found out once, not for every batch
        self._has_own = source is not None or is_stateful(job.dataset)

    def is_due(self, step: int) -> bool:
        """Return whether the loader's next snapshot, or the end of the pass, needs this worker's snapshot of this step."""
        is_last = 0 < self._num_steps <= step + self._num_workers
        return self._every > 0 and (is_last or step % self._every + self._num_workers >= self._every)

    def forget(self) -> None:
        """Forget the last snapshot, which could not be sent."""
        self._last = None

    def take(self) -> bytes:
        """Return the present snapshot, pickled; SAME if it equals the last one. The first is never SAME."""
        streams = self._streams.positions()
        if not self._has_own and streams is self._last_streams and self._last is not None:
            return SAME
        self._last_streams = streams
        iterator = None if self._source is None else self._source.iterator
        if isinstance(iterator, BeginsAgain):
            iterator = iterator.iterator
        dataset = self._dataset if self._source is None else self._source.dataset
        snapshot = own_states(dataset, iterator, has_ended=self._source is not None and self._source.has_ended)
        if streams:
            snapshot["streams"] = streams
        taken = travel.dumps(snapshot)
        if taken == self._last and iterator is self._last_iterator:  # another iterator's state counts as different, even if equal
            return SAME
        self._last, self._last_iterator = taken, iterator
        return taken


_ENDED, _IN_PAYLOAD = 1, 2
_PLACE = struct.Struct("<QQ")


class Note(NamedTuple):
    """What a worker sent with a batch.

    Attributes:
        snapshot: the worker's, pickled; SAME: it equals its last one.
        has_ended: no batch came, because the worker's iterator has ended.
    """

    snapshot: bytes
    has_ended: bool


END = bytes([_ENDED])  # the beginning of a note that comes without a batch and without a payload
NO_NEWS = Note(SAME, has_ended=False)
AFRESH = Note(pickle.dumps({}), has_ended=False)  # of a worker that has just replaced another
_NO_NEWS = bytes([0])  # NO_NEWS as bytes


def dump_note(snapshot: bytes | tuple[int, int], *, has_ended: bool) -> bytes:
    """Return a note as bytes.

    Args:
        snapshot: itself, or (offset, nbytes) of its place in the payload.
        has_ended: the worker's iterator has ended.
    """
    flags = _ENDED * has_ended
    if isinstance(snapshot, tuple):
        return bytes([flags | _IN_PAYLOAD]) + _PLACE.pack(*snapshot)
    return bytes([flags]) + snapshot


def load_note(dumped: bytes, payload_bytes: Callable[[int, int], bytes] | None) -> Note | None:
    """Return the note that `dump_note` made; None if the bytes are empty.

    Args:
        dumped: what `dump_note` returned.
        payload_bytes: (offset, nbytes) -> that part of the payload; may be None if the note begins with END.
    """
    if dumped == _NO_NEWS:
        return NO_NEWS
    if not dumped:
        return None
    flags, snapshot = dumped[0], dumped[1:]
    if flags & _IN_PAYLOAD:
        assert payload_bytes is not None
        snapshot = payload_bytes(*_PLACE.unpack(snapshot))
    return Note(snapshot or SAME, bool(flags & _ENDED))
