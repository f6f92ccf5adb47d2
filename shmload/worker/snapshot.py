"""What a worker says of itself along with a batch, so that a resumed run goes on as if it had not stopped (torch mode).

    the dataset's state_dict(), the iterator's, where the global generators stand

A snapshot describes the worker right behind the batch it travels with, however far the worker has read ahead. It reaches the
trainer as bytes, which are only opened when someone asks for the loader's state.
"""

from __future__ import annotations

import pickle
from typing import Any

from shmload.abilities import ability_of
from shmload.worker.iterable import IterablePass
from shmload.worker.spec import Job
from shmload.worker.streams import Streams

SAME = b""  # nothing has changed since the worker's last snapshot

Snapshot = dict[str, Any]  # "dataset", "iterator": the user's own states; "streams": see Streams.tell. Absent: none.
# "has_ended": the last batch has used up the iterator


def is_stateful(value: Any) -> bool:
    """Whether it keeps torch.distributed.checkpoint's and torchdata's contract."""
    return ability_of(value, "state_dict") is not None and ability_of(value, "load_state_dict") is not None


class Snapshots:
    """Takes them in a worker, from where it stands once it is ready for orders.

    Args:
        source: the way through an iterable dataset, if it is one.
    """

    def __init__(self, job: Job, source: IterablePass | None, num_workers: int) -> None:
        self._every = job.snapshot_every
        self._dataset = job.dataset
        self._source = source
        self._num_workers = num_workers
        self._streams = Streams()
        self._last_streams = self._streams.tell()
        self._last = b""
        self._last_iterator: Any = None
        # nothing but the streams can change: asked once, not for every batch
        self._has_own = source is not None or is_stateful(job.dataset)

    def is_due(self, step: int) -> bool:
        """Whether the loader's next snapshot is near enough that it needs this worker's."""
        return self._every > 0 and step % self._every + self._num_workers >= self._every

    def resume(self, snapshot: Snapshot) -> None:
        """Makes the process stand where a snapshot was taken; its dataset and iterator have been seen to."""
        self._streams.go_to(snapshot.get("streams", {}))

    def take(self) -> bytes:
        """The snapshot of now, pickled; SAME if it is the last one."""
        streams = self._streams.tell()
        if not self._has_own and streams is self._last_streams:
            return SAME
        self._last_streams = streams
        snapshot: Snapshot = {}
        iterator = None if self._source is None else self._source.iterator
        dataset = self._dataset if self._source is None else self._source.dataset
        if iterator is not dataset and is_stateful(dataset):
            snapshot["dataset"] = dataset.state_dict()
        if is_stateful(iterator):
            snapshot["iterator"] = iterator.state_dict()  # type: ignore[union-attr]  # None has none
        if self._source is not None and self._source.has_ended:
            snapshot["has_ended"] = True
        if streams:
            snapshot["streams"] = streams
        taken = pickle.dumps(snapshot) if snapshot or self._last else b""
        if (
            taken == self._last and iterator is self._last_iterator
        ):  # of the pass before it is another one's, however alike
            return SAME
        self._last, self._last_iterator = taken, iterator
        return taken
