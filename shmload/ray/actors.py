"""The Ray actor: a worker's loop over a private ring of one slot, called once for each task.

A `WorkerLoop` needs a ring and a trainer. `LocalRing` is both, in private memory: when the loop rings a bell to settle a layout or
to get more memory, the local ring grants the request before the bell's `post` returns. The agent sends a `Task` to an actor, which
returns a `Reply`.

A sample that takes too long ends its actor: `SampleTimer`, a second thread, stores the failure in Ray's key-value store, because a
dead actor cannot return it, and the agent reads it there. The thread needs the GIL, so a sample that blocks in C code and holds the
GIL is not detected.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.filler import DONE, ERROR, WorkerRing
from shmload._core.mapping import Mapping
from shmload._core.trainer import FAILED, ORDERED, Lease, TrainerRing, control_nbytes
from shmload.batch.layout import Layout
from shmload.batch.row_placer import RowPlacer
from shmload.errors import SampleTimeout
from shmload.ray import life_lock
from shmload.shm import travel
from shmload.shm.segment import open_segment
from shmload.worker.failure import REMEDY, Failure, sample_at, timeout_text
from shmload.worker.job import Job, Post
from shmload.worker.loop import WorkerLoop
from shmload.worker.note import END, load_note
from shmload.worker.process import prepare

GROWTH = 1.25  # the same as in ring_memory
ORDER_CAPACITY = 4096  # bytes; larger orders get their own memory
_ORDER = "order"


class LocalRing:
    """The ring, its memory, and all of its bells in one object.

    Attributes:
        ring: the worker's end.
        trainer: the trainer's end.
        layout: the settled layout; None before it is settled, or if samples have no fixed rows.
        nrows: the rows of the order.
    Args:
        worker_id: the worker's number in the real ring, which its messages to users contain.
        text_capacity, layout_capacity: capacities of the real ring.
    """

    def __init__(self, worker_id: int, *, text_capacity: int, layout_capacity: int) -> None:
        sizes: dict[str, Any] = {
            "order_capacity": ORDER_CAPACITY,
            "text_capacity": text_capacity,
            "layout_capacity": layout_capacity,
        }
        self._control = private(control_nbytes(1, worker_id + 1, **sizes))
        self.trainer = TrainerRing(self._control, num_slots=1, num_workers=worker_id + 1, **sizes)
        self.ring = WorkerRing(self._control, worker_id)
        self._memory: dict[str, Mapping] = {}
        self._payload = ""
        self._num_made = self._offset = 0
        self.is_borrowed = False  # whether the payload is the batch's own slot in the trainer's ring
        self.layout: Layout | None = None
        self.nrows = 1
        self._lease: Lease | None = None  # the lease of the latest batch

    # ------------------------------------------------------------ the worker loop's interface

    def open(self, path: str) -> Mapping:
        """Return the memory with this name."""
        return self._memory[path]

    def post(self) -> None:
        """Grant the worker loop's request."""
        ring = self.trainer
        text = ring.proposal
        if text is not None:
            self.settle(text)
        if ring.needy() >= 0:
            self._make_room(int(ring.need_nbytes(0) * GROWTH))
            ring.grant(0)

    def wait(self, timeout_s: float) -> bool:
        """Return True at once, because `post` has already granted the request."""
        return True

    # ------------------------------------------------------------ the trainer's half

    def settle(self, text: bytes) -> None:
        """Accept a layout; an empty text means that samples have no fixed rows."""
        self.layout = Layout.loads(text) if text else None
        if self.layout is not None:
            self._make_room(self.layout.nbytes(self.nrows))
        self.trainer.accept_layout(text, is_packed=not text)

    def order(
        self,
        raw: bytes,
        borrowed: Borrowed | None,
        *,
        epoch: int,
        step: int,
        nrows: int,
        is_pickled: bool,
        is_packed: bool,
        is_suspect: bool = False,
    ) -> None:
        """Publish an order in the slot, whose previous batch is no longer needed, and claim it.

        Args:
            borrowed: memory for the batch, used if it is large enough; None for this process's own memory.
            is_suspect: whether an actor died while reading this order; its samples are then read one by one.
        """
        ring = self.trainer
        self._lease = None
        if ring.state(0) == ORDERED:
            ring.free(0)
        if borrowed is not None:
            memory, (_, path, offset, nbytes, _) = borrowed
            self._memory = {path: memory}
            self._payload, self._offset, self.is_borrowed = path, offset, True
            ring.set_payload(0, memory, path.encode(), offset, nbytes)
        elif self.is_borrowed:  # the slot belongs to another batch now
            self._renew(1 << 16)
        self.nrows = nrows
        if self.layout is not None and not is_packed:
            self._make_room(self.layout.nbytes(nrows))
        self._memory.pop(_ORDER, None)
        if len(raw) > ORDER_CAPACITY:
            self._memory[_ORDER] = private(len(raw))
            memoryview(self._memory[_ORDER])[:] = raw
        ring.publish(
            ring.hold(),
            epoch=epoch,
            step=step,
            seq=step,
            indices=raw,
            nrows=nrows,
            is_packed=is_packed,
            is_pickled=is_pickled,
            order_path=_ORDER.encode() if _ORDER in self._memory else b"",
        )
        if is_suspect:  # a worker loop recognizes a suspect order by an earlier claim that was lost
            WorkerRing(self._control, self.ring.worker_id).claim()
            ring.recover(self.ring.worker_id)
        self.ring.claim()

    def lease(self) -> int:
        """Keep the finished batch until the next order. Return its size in bytes if it is packed, 0 if it consists of rows."""
        self._lease = self.trainer.lease(0)
        return self._lease.used_nbytes

    def payload(self, nbytes: int, at: int = 0) -> NDArray[np.uint8]:
        """Return bytes of the slot, valid until the next order."""
        if not nbytes:
            return NOTHING
        return np.ndarray(nbytes, np.uint8, self._memory[self._payload], self._offset + at)  # type: ignore[arg-type]  # a buffer

    def _make_room(self, nbytes: int) -> None:
        if self.trainer.payload_nbytes(0) < nbytes:
            self._renew(nbytes)

    def _renew(self, nbytes: int) -> None:
        memory = private(nbytes)
        self._memory.pop(self._payload, None)
        self._num_made += 1
        self._payload, self._offset, self.is_borrowed = f"payload-{self._num_made}", 0, False
        self._memory[self._payload] = memory
        self.trainer.set_payload(0, memory, self._payload.encode(), 0, nbytes)


def private(nbytes: int) -> Mapping:
    """Return memory that no other process sees."""
    fd = os.memfd_create("shmload-local_ring")
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class ActorSetting:
    """The settings of a new actor: its post, and the real ring's capacities, which the local ring must not exceed."""

    post: Post
    paths: Sequence[str]  # the trainer's sys.path
    text_capacity: int
    layout_capacity: int
    sample_timeout_s: float | None = None
    byte: int = 0  # the byte of the control segment that the actor locks (`life_lock.py`)


class Slot(NamedTuple):
    """A batch's place in the trainer's ring. An actor that reaches it decodes there."""

    number: int
    path: str  # the path of its segment
    offset: int
    nbytes: int
    layout: bytes  # the text of the ring's layout


Borrowed = tuple[Mapping, Slot]  # a segment of the trainer's ring, and a slot in it


class Task(NamedTuple):
    """One claim: rows `first` to `end` of an order."""

    epoch: int
    step: int
    first: int
    end: int
    nrows: int  # number of rows of the whole order
    order: bytes  # the whole order, encoded as in the ring
    is_pickled: bool
    is_packed: bool
    slot: Slot | None = None  # slot for direct writes; if None, the actor sends its rows back
    is_suspect: bool = False  # an actor died while reading it, so its samples are read one by one to find the cause

    def key(self, row: int) -> Any:
        """Return the order's key for a row of the whole batch."""
        if self.is_pickled:
            return list(pickle.loads(self.order))[row]  # pickled by the trainer
        return int.from_bytes(self.order[8 * row : 8 * row + 8], sys.byteorder, signed=True)


NOTHING = np.empty(0, np.uint8)


class Reply(NamedTuple):
    """The result of a task.

    `own` is DONE or ERROR. `row_nbytes` contains the size of one row of each field if the payload contains rows, and is None if the
    payload contains a packed batch or is empty. `layout` is the text of the actor's own layout: b"" if its samples have no fixed
    rows, None if it is not known yet. `note` is a worker's snapshot and whether its iterator has ended. `place` is the actor's
    node, by Ray's id, and its pid there; None if no actor has answered.
    """

    own: int
    payload: NDArray[np.uint8] = NOTHING
    row_nbytes: tuple[int, ...] | None = None
    layout: bytes | None = None
    note: tuple[bytes, bool] | None = None
    error: bytes = b""
    num_foreign: int = 0
    num_irregular: int = 0
    place: tuple[str, int] | None = None
    num_written: int = 0  # bytes of rows that are already in the slot


class Introduction(NamedTuple):
    """An actor's message that it has started and loaded the dataset."""

    place: tuple[str, int]
    host: str
    versions: dict[str, str]  # by name; "" if not installed


def versions() -> dict[str, str]:
    """Return the package versions that trainer and actor must share, because code and pickles depend on them."""
    found = {"Python": "{}.{}".format(*sys.version_info)}
    for name in ("shmload", "torch"):
        try:
            found[name] = version(name).partition("+")[0]  # a build for CPUs has the same code
        except PackageNotFoundError:  # a source tree, or an actor without torch
            found[name] = str(getattr(sys.modules.get(name), "__version__", ""))
    return found


LOOKS = 8  # number of checks within the time limit of a sample
NAMESPACE = b"shmload"


class SampleTimer:
    """A thread that limits the time of the worker loop for a sample.

    Args:
        ring: the loop's ring, which records the current row and the time of its start.
        worker: the worker's number.
        limit_s: the longest time that a sample may take.
        leave_word: (bytes) -> None, stores the failure; called before the actor is ended.
    """

    def __init__(self, ring: Any, worker: int, limit_s: float, leave_word: Any) -> None:
        self._ring, self._worker, self._limit_s, self._leave_word = ring, worker, limit_s, leave_word
        self._task: Task | None = None
        self._began_ns = 0
        self._thread = threading.main_thread().ident

    def begin(self, task: Task) -> None:
        """Record that the worker loop starts this task."""
        self._task, self._began_ns = task, monotonic_ns()

    def look(self) -> bool:
        """Check the current sample. If it has timed out, store its failure and return True."""
        held, since_ns = self._ring.held_by(self._worker), self._ring.worker(self._worker)["since_ns"]
        task = self._task
        if task is None or held is None or not since_ns:
            return False
        is_several = held[3] < 0  # several samples are being read at once, or none has been started
        if is_several and (task.is_suspect or since_ns < self._began_ns):
            return False
        if (monotonic_ns() - since_ns) / 1e9 <= self._limit_s:
            return False
        row = task.first + held[3]
        stack = "".join(traceback.format_stack(sys._current_frames().get(self._thread or 0)))
        what = "several samples" if is_several else sample_at(task.key(row), task.epoch, row, task.step)
        text = timeout_text(f"{what} took longer than", self._limit_s, self._worker, os.getpid(), stack) + REMEDY
        failure = Failure(SampleTimeout, text, "", "", () if is_several else (row,))
        self._leave_word(pickle.dumps((task.epoch, task.step, task.first, tuple(failure))))
        return True

    def watch(self) -> None:
        """Check regularly until a sample has timed out, then end the process."""
        pause = threading.Event()
        while not self.look():
            pause.wait(self._limit_s / LOOKS)
        os._exit(1)


def failure_in(word: bytes | None, task: Task) -> Failure | None:
    """Return the failure of this task, or None if `word` is absent or belongs to another task.

    The failure has no rows if any of several samples may be the cause.
    """
    if word is None:
        return None
    *place, failure = pickle.loads(word)
    return Failure(*failure) if place == [task.epoch, task.step, task.first] else None


def leave_word(word: bytes) -> None:
    """Store the failure for which this actor will be ended."""
    import ray
    from ray.experimental import internal_kv

    name = f"timeout-{ray.get_runtime_context().get_actor_id()}".encode()
    internal_kv._internal_kv_put(name, word, namespace=NAMESPACE)


def take_failure(actor: Any, task: Task) -> Failure | None:
    """Return and delete the failure of this task that an actor has stored; None without one."""
    from ray.experimental import internal_kv

    name = f"timeout-{actor._actor_id.hex()}".encode()
    failure = failure_in(internal_kv._internal_kv_get(name, namespace=NAMESPACE), task)
    if failure is not None:
        internal_kv._internal_kv_del(name, namespace=NAMESPACE)
    return failure


READ_ONLY = (
    "If this array is the dataset's: an array of 1 MiB or more is stored in Ray's object store, once for all actors of a node, and "
    "is read-only there. Copy an array before writing to it (array = array.copy()) in worker_init_fn or at its first use"
)


def same_layout(one: bytes, other: bytes) -> bool:
    """Return whether two texts describe the same layout. Texts can differ, because pickle records identities of strings."""
    try:
        ours, theirs = Layout.loads(one), Layout.loads(other)
    except Exception:  # a class that only the trainer's program has
        return False
    return (ours.fields, ours.tree, ours.zero_fill) == (theirs.fields, theirs.tree, theirs.zero_fill)


class Decoder:
    """One worker of a loader, on any node. It starts without the dataset, which is put into the object store at the same time."""

    def __init__(self, setting: ActorSetting) -> None:
        post = setting.post
        self._setting = setting
        self._equal: dict[bytes, bool] = {}  # text of a layout -> whether it equals this actor's layout
        self._segments: dict[str, Mapping] = {}  # segments of the trainer's ring, by path
        self._used: dict[int, str] = {}  # slot of the trainer's ring -> its last known segment
        self._local_ring = LocalRing(post.worker_id, text_capacity=setting.text_capacity, layout_capacity=setting.layout_capacity)
        sys.path += [path for path in setting.paths if path not in sys.path and os.path.isdir(path)]

    def introduce(self, parcel: Sequence[Any]) -> Introduction:
        """Load the dataset, take the lock for writing into the ring if possible, and report that the actor has started.

        The dataset's large arrays stay in Ray's memory, shared by all actors of the node.

        Args:
            parcel: a list with a reference to the pickled job. For a direct argument, Ray would transfer the bytes itself, and
                leave them on the node until their memory is needed if the actor ended during the transfer.
        """
        post = self._setting.post
        job, source, snapshots, failure = Job(None, None, None, True, None, False), None, None, None
        self._may_write = life_lock.hold(post.control_path, self._setting.byte)
        pickled_job = _fetched(parcel[0])
        try:
            job = travel.loads(pickled_job)
            _name_classes_of_main()
            job, source, snapshots = prepare(job, post)
        except Exception as error:
            failure = Failure.of(error, f"in DataLoader worker process {post.worker_id}", "")
        self._body = WorkerLoop(
            self._local_ring.ring,
            job,
            ready=self._local_ring,
            orders=self._local_ring,
            grants=self._local_ring,
            open_memory=self._local_ring.open,
            source=source,
            snapshots=snapshots,
            init_failure=failure,
        )
        self._place = (_node_id(), os.getpid())
        if (rows := job.plan.rows) is not None:  # the dataset declares its rows, and the trainer has settled the same layout
            self._local_ring.settle(rows.dumps())
        self._sample_timer: SampleTimer | None = None
        if (limit_s := self._setting.sample_timeout_s) is not None:
            self._sample_timer = SampleTimer(self._local_ring.trainer, post.worker_id, limit_s, leave_word)
            threading.Thread(target=self._sample_timer.watch, daemon=True).start()
        return Introduction(self._place, socket.gethostname(), versions())

    def work(self, task: Task) -> Reply:
        """Fill the task's rows."""
        local_ring, ring = self._local_ring, self._local_ring.trainer
        worker_id = local_ring.ring.worker_id
        raw, is_pickled = _part(task)
        before = ring.worker(worker_id)
        if self._sample_timer is not None:
            self._sample_timer.begin(task)
        options: dict[str, Any] = {"is_pickled": is_pickled, "is_packed": task.is_packed, "is_suspect": task.is_suspect}
        local_ring.order(raw, self._borrowed(task), epoch=task.epoch, step=task.step, nrows=task.end - task.first, **options)
        self._body.work()
        after = ring.worker(worker_id)
        counted = {name: int(after[name]) - int(before[name]) for name in ("num_foreign", "num_irregular")}
        if ring.look(0) == FAILED and (text := ring.failure(0)[1]):
            said = Failure.loads(text).worker  # the agent writes it again, into its own note
            error = _shifted(text, task.first, local_ring.ring.text_capacity // (2 if said else 1) - 64)
            return self._outcome(ERROR, error=error, note=(_snapshot(said, local_ring), False) if said else None)
        dumped = ring.note(0)
        if dumped[:1] == END:
            return self._outcome(DONE, note=(_snapshot(dumped, local_ring), True))
        note = (_snapshot(dumped, local_ring), False) if dumped else None
        if used := local_ring.lease():
            return self._outcome(DONE, payload=local_ring.payload(used), note=note, **counted)
        layout = local_ring.layout
        assert layout is not None
        row_nbytes = tuple(field.row_nbytes for field in layout.fields)
        payload = local_ring.payload(layout.nbytes(local_ring.nrows))
        if local_ring.is_borrowed:
            return self._outcome(DONE, row_nbytes=row_nbytes, note=note, num_written=payload.nbytes, **counted)
        return self._outcome(DONE, payload=payload, row_nbytes=row_nbytes, note=note, **counted)

    def _borrowed(self, task: Task) -> Borrowed | None:
        """Return the slot of the task's batch if its rows may be written there and this process can reach it.

        Raises:
            OSError: the slot cannot be mapped.
        """
        slot = task.slot
        if slot is None or not self._may_write or task.end - task.first != task.nrows or not self._is_ours(slot.layout):
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

    def _is_ours(self, text: bytes) -> bool:
        if text not in self._equal:
            if self._local_ring.layout is None:  # it is not known yet
                return False
            self._equal[text] = same_layout(self._local_ring.ring.layout_text, text)
        return self._equal[text]

    def pack_rows(self, made: Reply, nrows: int) -> Reply:
        """Return the rows of another reply as a packed batch, because the trainer's ring has another layout."""
        assert made.layout is not None
        memory = private(made.payload.nbytes)
        memoryview(memory)[:] = memoryview(made.payload)  # type: ignore[arg-type]  # a buffer
        placer = RowPlacer(Layout.loads(made.layout), memory, 0, nrows)
        packed = self._body.packed([placer.get(row) for row in range(nrows)])
        payload = np.empty(packed.nbytes, np.uint8)
        packed.write(payload)
        return self._outcome(DONE, payload=payload, num_foreign=packed.num_foreign)

    def _outcome(self, own: int, **made: Any) -> Reply:
        text = self._local_ring.ring.layout_text if self._local_ring.trainer.has_layout else None
        return Reply(own, layout=text, place=self._place, **made)


def _part(task: Task) -> tuple[bytes, bool]:
    """Return the part of the order for the task's own rows, and whether it is pickled."""
    if task.first == 0 and task.end == task.nrows:
        return task.order, task.is_pickled
    if not task.is_pickled:
        return task.order[8 * task.first : 8 * task.end], False
    return travel.dumps(list(pickle.loads(task.order))[task.first : task.end]), True  # pickled by the trainer


def _snapshot(dumped: bytes, local_ring: LocalRing) -> bytes:
    note = load_note(dumped, lambda at, nbytes: local_ring.payload(nbytes, at).tobytes())
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
    """Add classes of the trainer's program, which were pickled by value, to `__main__`, so that replies can refer to them."""
    from ray.cloudpickle import cloudpickle

    main = sys.modules["__main__"]
    for kind in list(getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())):
        if kind.__module__ in ("__main__", "__mp_main__") and not hasattr(main, kind.__qualname__):  # multiprocessing's name for it
            setattr(main, kind.__qualname__, kind)
