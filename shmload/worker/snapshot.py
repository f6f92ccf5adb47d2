"""Snapshots of a worker, sent with its batches, from which a resumed run continues as if it had not stopped (torch mode).

A snapshot contains the `state_dict()` of the dataset and of the iterator, and the states of the global generators, as they are
directly after its batch, however many batches the worker reads ahead. It reaches the trainer as bytes, which are unpickled only
when the program requests a state.
"""

from __future__ import annotations

from typing import Any

from shmload.introspect.abilities import is_stateful
from shmload.shm import pickling
from shmload.worker.generator_states import GeneratorStreams
from shmload.worker.iterable_pass import IterablePass, RestartingIterator
from shmload.worker.job import Job
from shmload.worker.note import SAME


def load_own_states(dataset: Any, snapshot: Snapshot) -> None:
    """Load the states of a dataset and of its last pass's iterator.

    The dataset's own state is loaded twice: the iterator may need it, and loading the iterator's state may change the dataset.
    """
    if "dataset" in snapshot:
        dataset.load_state_dict(snapshot["dataset"])
    if "last_iterator" in snapshot:
        last = iter(dataset)
        if is_stateful(last):
            last.load_state_dict(snapshot["last_iterator"])
        if "dataset" in snapshot:
            dataset.load_state_dict(snapshot["dataset"])


# "dataset", "iterator": the user's own states, if they have any
# "streams": see GeneratorStreams.positions
# "generators": see PassProgress.began_at
# "has_ended": the last batch has exhausted the iterator
# between passes: "last_iterator": the state of the last pass's iterator; "is_over": see IterablePass
Snapshot = dict[str, Any]

OWN_STATES = ("dataset", "iterator", "last_iterator")  # the parts of a snapshot that the user's objects return


def own_states(dataset: Any, iterator: Any, *, has_ended: bool) -> Snapshot:
    """Return the states of a dataset and of the iterator over it."""
    parts = {"iterator": iterator} if iterator is dataset else {"dataset": dataset, "iterator": iterator}
    snapshot = {name: part.state_dict() for name, part in parts.items() if is_stateful(part)}
    return {**snapshot, "has_ended": True} if has_ended else snapshot


class Snapshots:
    """The maker of one worker's snapshots, constructed when the worker is ready for orders.

    Args:
        job: the work.
        source: the pass through the dataset, if it is iterable.
        num_workers: number of workers, which divide the steps among them.
        streams: the global generators of this process, restored to their positions in the saved run.
    """

    def __init__(self, job: Job, source: IterablePass | None, num_workers: int, streams: GeneratorStreams) -> None:
        self._every, self._num_steps, self._dataset = job.snapshot_every, job.num_steps, job.dataset
        self._source, self._num_workers = source, num_workers
        self._streams = streams
        self._last_streams = self._streams.positions()
        self._last: bytes | None = None  # the last snapshot that was sent; if None, the next one is sent even if it is equal
        self._last_iterator: Any = None
        # otherwise only the streams can change; determined once, not for every batch
        self._has_own = source is not None or is_stateful(job.dataset)

    def is_due(self, step: int) -> bool:
        """Return whether the loader's next snapshot or the end of the pass needs this worker's snapshot after this step."""
        is_last = 0 < self._num_steps <= step + self._num_workers
        return self._every > 0 and (is_last or step % self._every + self._num_workers >= self._every)

    def forget(self) -> None:
        """Forget the last snapshot, which could not be sent."""
        self._last = None

    def take(self) -> bytes:
        """Return the present snapshot, pickled; `note.SAME` if it equals the last one. The first is never SAME."""
        streams = self._streams.positions()
        if not self._has_own and streams is self._last_streams and self._last is not None:
            return SAME
        self._last_streams = streams
        iterator = None if self._source is None else self._source.iterator
        if isinstance(iterator, RestartingIterator):
            iterator = iterator.iterator
        dataset = self._dataset if self._source is None else self._source.dataset
        snapshot = own_states(dataset, iterator, has_ended=self._source is not None and self._source.has_ended)
        if streams:
            snapshot["streams"] = streams
        taken = pickling.dumps(snapshot)
        if taken == self._last and iterator is self._last_iterator:  # another iterator's state counts as different, even if equal
            return SAME
        self._last, self._last_iterator = taken, iterator
        return taken
