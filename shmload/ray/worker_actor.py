"""The Ray actor: it runs a worker's loop over a private ring of one slot (actor_ring.py), once for each task.

The agent sends a `Task` to an actor, which returns a `Reply`.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmload._core.filler import DONE, ERROR
from shmload._core.mapping import Mapping
from shmload._core.trainer import FAILED
from shmload.batch.layout import Layout
from shmload.batch.row_placer import RowPlacer
from shmload.ray import life_lock
from shmload.ray.actor_ring import ActorRing, Borrowed, private_memory
from shmload.ray.messages import ActorSetting, ActorStarted, Reply, Task
from shmload.ray.sample_timer import SampleTimer, store_failure
from shmload.ray.version_check import versions
from shmload.shm import pickling
from shmload.shm.segment import open_segment
from shmload.worker.failure import Failure
from shmload.worker.job import Job
from shmload.worker.loop import WorkerLoop
from shmload.worker.note import ENDED, load_note
from shmload.worker.process import set_up

READ_ONLY = (
    "If this array is the dataset's: an array of 1 MiB or more is stored in Ray's object store, once for all actors of a node, and "
    "is read-only there. Copy an array before writing to it (array = array.copy()) in worker_init_fn or at its first use"
)


def same_layout(one: bytes, other: bytes) -> bool:
    """Return whether two dumped layouts are equal. Their bytes can differ, because pickle records identities of strings."""
    try:
        ours, theirs = Layout.loads(one), Layout.loads(other)
    except Exception:  # raised, for example, for a class that only the trainer's program has
        return False
    return (ours.fields, ours.tree, ours.zero_fill) == (theirs.fields, theirs.tree, theirs.zero_fill)


class WorkerActor:
    """One worker of a loader, as a Ray actor on any node.

    It is constructed without the dataset, which is put into the object store at the same time; `start` loads it.

    Args:
        setting: the actor's settings.
    """

    def __init__(self, setting: ActorSetting) -> None:
        link = setting.link
        self._setting = setting
        self._equal: dict[bytes, bool] = {}  # text of a layout -> whether it equals this actor's layout
        self._segments: dict[str, Mapping] = {}  # segments of the trainer's ring, by path
        self._used: dict[int, str] = {}  # slot of the trainer's ring -> its last known segment
        self._actor_ring = ActorRing(link.worker_id, text_capacity=setting.text_capacity, layout_capacity=setting.layout_capacity)
        sys.path += [path for path in setting.paths if path not in sys.path and os.path.isdir(path)]

    def start(self, parcel: Sequence[Any]) -> ActorStarted:
        """Load the dataset, take the lock for writing into the ring if possible, and report that the actor has started.

        The dataset's large arrays stay in Ray's memory, shared by all actors of the node.

        Args:
            parcel: a list with Ray's reference to the pickled job. If the reference were the argument itself, Ray would transfer
                the bytes before the call, and if the actor ended first, leave them on the node until their memory is needed.
        """
        link = self._setting.link
        job, source, snapshots, failure = Job(None, None, None, True, None, False), None, None, None
        self._may_write = life_lock.hold(link.control_path, self._setting.byte)
        pickled_job = _fetched(parcel[0])
        try:
            job = pickling.loads(pickled_job)
            _name_classes_of_main()
            job, source, snapshots = set_up(job, link)
        except Exception as error:
            failure = Failure.of(error, f"in DataLoader worker process {link.worker_id}", "")
        self._loop = WorkerLoop(
            self._actor_ring.ring,
            job,
            ready=self._actor_ring,
            orders=self._actor_ring,
            grants=self._actor_ring,
            open_memory=self._actor_ring.open,
            source=source,
            snapshots=snapshots,
            init_failure=failure,
        )
        self._place = (_node_id(), os.getpid())
        if (rows := job.plan.rows) is not None:  # the dataset declares its rows, and the trainer has settled the same layout
            self._actor_ring.accept_layout(rows.dumps())
        self._sample_timer: SampleTimer | None = None
        if (limit_s := self._setting.sample_timeout_s) is not None:
            self._sample_timer = SampleTimer(self._actor_ring.trainer, link.worker_id, limit_s, store_failure)
            threading.Thread(target=self._sample_timer.watch, daemon=True).start()
        return ActorStarted(self._place, socket.gethostname(), versions())

    def work(self, task: Task) -> Reply:
        """Fill the task's rows with the worker's loop, and return them, or the error.

        The payload of the reply aliases the slot of the local ring, and is valid until the next task.
        """
        actor_ring, ring = self._actor_ring, self._actor_ring.trainer
        worker_id = actor_ring.ring.worker_id
        raw, is_pickled = _part(task)
        before = ring.worker(worker_id)
        if self._sample_timer is not None:
            self._sample_timer.begin(task)
        options: dict[str, Any] = {"is_pickled": is_pickled, "is_packed": task.is_packed, "is_suspect": task.is_suspect}
        actor_ring.order(raw, self._borrowed(task), epoch=task.epoch, step=task.step, nrows=task.end - task.first, **options)
        self._loop.work()
        after = ring.worker(worker_id)
        counted = {name: int(after[name]) - int(before[name]) for name in ("num_foreign", "num_irregular")}
        if ring.look(0) == FAILED and (text := ring.failure(0)[1]):
            said = Failure.loads(text).worker  # the worker's note, which the agent dumps again for the trainer's ring
            error = _shifted(text, task.first, actor_ring.ring.text_capacity // (2 if said else 1) - 64)
            return self._outcome(ERROR, error=error, note=(_snapshot(said, actor_ring), False) if said else None)
        dumped = ring.note(0)
        if dumped[:1] == ENDED:
            return self._outcome(DONE, note=(_snapshot(dumped, actor_ring), True))
        note = (_snapshot(dumped, actor_ring), False) if dumped else None
        if used := actor_ring.lease():
            return self._outcome(DONE, payload=actor_ring.payload(used), note=note, **counted)
        layout = actor_ring.layout
        assert layout is not None
        row_nbytes = tuple(field.row_nbytes for field in layout.fields)
        payload = actor_ring.payload(layout.nbytes(actor_ring.nrows))
        if actor_ring.is_borrowed:
            return self._outcome(DONE, row_nbytes=row_nbytes, note=note, num_written=payload.nbytes, **counted)
        return self._outcome(DONE, payload=payload, row_nbytes=row_nbytes, note=note, **counted)

    def _borrowed(self, task: Task) -> Borrowed | None:
        """Return the slot of the task's batch if its rows may be written there and this process can reach it.

        Raises:
            OSError: the slot cannot be mapped.
        """
        slot = task.slot
        if slot is None or not self._may_write or task.end - task.first != task.nrows or not self._has_our_layout(slot.layout):
            return None
        self._used[slot.number] = slot.path
        if slot.path not in self._segments:
            try:
                fd = open_segment(slot.path)
            except OSError:  # a memfd of another PID namespace
                return None
            try:
                self._segments[slot.path] = Mapping(fd, os.fstat(fd).st_size, inherit=False)
            finally:
                os.close(fd)
            for stale in self._segments.keys() - set(self._used.values()):  # its slot now has another segment
                del self._segments[stale]
        return self._segments[slot.path], slot

    def _has_our_layout(self, text: bytes) -> bool:
        if text not in self._equal:
            if self._actor_ring.layout is None:  # it is not known yet
                return False
            self._equal[text] = same_layout(self._actor_ring.ring.layout_text, text)
        return self._equal[text]

    def pack_rows(self, made: Reply, nrows: int) -> Reply:
        """Return the rows of another reply as a packed batch, because the trainer's ring has another layout.

        Args:
            made: a reply with rows.
            nrows: number of rows.
        """
        assert made.layout is not None
        memory = private_memory(made.payload.nbytes)
        memoryview(memory)[:] = memoryview(made.payload)  # type: ignore[arg-type]  # a buffer
        placer = RowPlacer(Layout.loads(made.layout), memory, 0, nrows)
        packed = self._loop.packed([placer.get(row) for row in range(nrows)])
        payload = np.empty(packed.nbytes, np.uint8)
        packed.write(payload)
        return self._outcome(DONE, payload=payload, num_foreign=packed.num_foreign)

    def _outcome(self, own: int, **made: Any) -> Reply:
        text = self._actor_ring.ring.layout_text if self._actor_ring.trainer.has_layout else None
        return Reply(own, layout=text, place=self._place, **made)


def _part(task: Task) -> tuple[bytes, bool]:
    """Return the part of the order for the task's own rows, and whether it is pickled."""
    if task.first == 0 and task.end == task.nrows:
        return task.order, task.is_pickled
    if not task.is_pickled:
        return task.order[8 * task.first : 8 * task.end], False
    return pickling.dumps(list(pickle.loads(task.order))[task.first : task.end]), True  # pickled by the trainer


def _snapshot(dumped: bytes, actor_ring: ActorRing) -> bytes:
    note = load_note(dumped, lambda at, nbytes: actor_ring.payload(nbytes, at).tobytes())
    assert note is not None
    return note.snapshot


def _shifted(text: bytes, first: int, capacity: int) -> bytes:
    """Return a failure's text with row numbers of the whole batch. Add the remedy if code wrote to a read-only shared array."""
    failure = Failure.loads(text)
    if failure.kind is ValueError and "read-only" in failure.text:
        failure = failure._replace(text=failure.text + READ_ONLY)
    return failure._replace(rows=tuple(first + row for row in failure.rows), worker=b"").dumps(capacity)


def _fetched(reference: Any) -> Any:
    """Return the bytes of an object, in memory that all actors of this node share."""
    import ray

    return ray.get(reference)


def _node_id() -> str:
    ray: Any = sys.modules.get("ray")  # imported in an actor
    return str(ray.get_runtime_context().get_node_id()) if ray is not None and ray.is_initialized() else ""


def _name_classes_of_main() -> None:
    """Add the classes of the trainer's program, which were pickled by value, to `__main__`, so that replies can name them."""
    from ray.cloudpickle import cloudpickle

    main = sys.modules["__main__"]
    for kind in list(getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())):
        if kind.__module__ in ("__main__", "__mp_main__") and not hasattr(main, kind.__qualname__):  # multiprocessing's name for it
            setattr(main, kind.__qualname__, kind)
