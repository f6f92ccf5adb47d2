"""What a worker says of itself along with a batch, so that a resumed run goes on as if it had not stopped (torch mode).

    the dataset's state_dict(), the iterator's, where the global generators stand

A snapshot describes the worker right behind the batch it travels with, however far the worker has read ahead. It reaches the
trainer as bytes, which are only opened when someone asks for the loader's state.

A worker's way through an IterableDataset: one iterator for each pass, made when the pass's first order is taken.

The dataset itself sees to it that workers read different samples (get_worker_info); an order only says how many are wanted.

The note that travels with a batch in torch mode: where its worker stands, and whether its iterable dataset has ended.

    one byte of flags | the snapshot, or where in the payload it lies if it is longer than a note may be

A worker that has nothing new to say sends the flags alone.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from shmload.shm import travel
from shmload.worker.reader import Job
from shmload.worker.sample_rng import Streams
from shmload.world import is_stateful


class IterablePass:
    """The iterator of the pass under way.

    Args:
        has_ended: the first pass is at its end already, its iterator is not begun.
        iterator_state: what the first pass's iterator gets by its `load_state_dict`; None: nothing.
        is_over: the dataset's state was saved at the end of a pass, and the first pass is the one after it.
    """

    def __init__(self, dataset: Any, iterator_state: Any = None, *, has_ended: bool = False, is_over: bool = False) -> None:
        self.dataset, self._iterator_state, self.has_ended = dataset, iterator_state, has_ended
        self._begins_again = is_over or has_ended
        self._epoch: int | None = None
        self.iterator: Any = None

    def enter(self, epoch: int, shared_seed: int) -> None:
        """Begins the pass of this number, if it is not the one under way.

        Args:
            shared_seed: what the shufflers of a DataPipe are seeded with, in all workers and ranks.
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
        """The next sample; StopIteration at the end, for good."""
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
    """A DataPipe with its shufflers seeded; any other dataset as it is."""
    import torch
    from torch.utils.data import IterDataPipe
    from torch.utils.data.graph_settings import apply_random_seed

    if not isinstance(dataset, IterDataPipe):
        return dataset
    generator = torch.Generator()
    generator.manual_seed(shared_seed)
    return apply_random_seed(dataset, generator)


SAME = b""  # nothing has changed since the worker's last snapshot

# "dataset", "iterator": the user's own states, if they have any
# "streams": see Streams.positions
# "has_ended": the last batch has used up the iterator
# between passes: "last_iterator": the state of the last pass's iterator; "is_over": see IterablePass
Snapshot = dict[str, Any]

OWN_STATES = ("dataset", "iterator", "last_iterator")  # the parts of a snapshot that the user's objects have made


def own_states(dataset: Any, iterator: Any, *, has_ended: bool) -> Snapshot:
    """What a dataset and the iterator over it say of themselves."""
    parts = {"iterator": iterator} if iterator is dataset else {"dataset": dataset, "iterator": iterator}
    snapshot = {name: part.state_dict() for name, part in parts.items() if is_stateful(part)}
    return {**snapshot, "has_ended": True} if has_ended else snapshot


class Snapshots:
    """Takes them in a worker, from where it stands once it is ready for orders.

    Args:
        source: the way through an iterable dataset, if it is one.
        streams: of this process's generators, at their places in the saved run.
    """

    def __init__(self, job: Job, source: IterablePass | None, num_workers: int, streams: Streams) -> None:
        self._every, self._num_steps, self._dataset = job.snapshot_every, job.num_steps, job.dataset
        self._source, self._num_workers = source, num_workers
        self._streams = streams
        self._last_streams = self._streams.positions()
        self._last: bytes | None = None  # of those that were sent; None: there is none that later ones may be the same as
        self._last_iterator: Any = None
        # nothing but the streams can change: asked once, not for every batch
        self._has_own = source is not None or is_stateful(job.dataset)

    def is_due(self, step: int) -> bool:
        """Whether the loader's next snapshot, or a pass's end, is near enough that it needs this worker's."""
        is_last = 0 < self._num_steps <= step + self._num_workers
        return self._every > 0 and (is_last or step % self._every + self._num_workers >= self._every)

    def forget(self) -> None:
        """The last one could not be sent."""
        self._last = None

    def take(self) -> bytes:
        """The snapshot of now, pickled; SAME if it is the last one; never at first, as that may be another worker's."""
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
        if taken == self._last and iterator is self._last_iterator:  # of the pass before it is another one's, however alike
            return SAME
        self._last, self._last_iterator = taken, iterator
        return taken


_ENDED, _IN_PAYLOAD = 1, 2
_PLACE = struct.Struct("<QQ")


class Note(NamedTuple):
    """What came with a batch.

    `snapshot` is the worker's, pickled (SAME: as its last one); `has_ended` says that no batch came: the iterator is at its end.
    """

    snapshot: bytes
    has_ended: bool


END = bytes([_ENDED])  # how a note begins that comes alone: no batch, and nothing in the payload
NO_NEWS = Note(SAME, has_ended=False)
AFRESH = Note(pickle.dumps({}), has_ended=False)  # of a worker that has just been started in another's place
_NO_NEWS = bytes([0])  # as NO_NEWS is dumped


def dump_note(snapshot: bytes | tuple[int, int], *, has_ended: bool) -> bytes:
    """A note.

    Args:
        snapshot: itself, or (offset, nbytes) in the payload.
    """
    flags = _ENDED * has_ended
    if isinstance(snapshot, tuple):
        return bytes([flags | _IN_PAYLOAD]) + _PLACE.pack(*snapshot)
    return bytes([flags]) + snapshot


def load_note(dumped: bytes, payload_bytes: Callable[[int, int], bytes] | None) -> Note | None:
    """Inverse of `dump_note`; None if nothing came along.

    Args:
        payload_bytes: (offset, nbytes) -> that part of the payload; may be None if it begins with END.
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
