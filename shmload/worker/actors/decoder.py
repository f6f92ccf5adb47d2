"""What an actor is: a worker's body over a ring of one slot, called once for every errand."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from typing import Any

import numpy as np

from shmload._core.filler import DONE, ERROR
from shmload.batch.layout import Layout
from shmload.batch.place import RowPlacer
from shmload.shm import travel
from shmload.worker.actors.desk import Desk, private
from shmload.worker.actors.errand import Errand, Outcome, Setting
from shmload.worker.actors.lateness import Lateness, leave_word
from shmload.worker.body import Body
from shmload.worker.failure import Failure
from shmload.worker.notes import END, load_note
from shmload.worker.process import prepare
from shmload.worker.spec import Job


class Decoder:
    """One worker of a loader, wherever it runs.

    Args:
        parcel: the pickled job, as bytes that this node fetched once for all of its actors.
    """

    def __init__(self, setting: Setting, parcel: Any) -> None:
        post = setting.post
        self._desk = Desk(post.worker_id, text_capacity=setting.text_capacity, layout_capacity=setting.layout_capacity)
        sys.path += [path for path in setting.paths if path not in sys.path and os.path.isdir(path)]
        job, source, snapshots, failure = Job(None, None, None, True, None, False), None, None, None
        try:
            job = travel.loads(parcel)
            _name_classes_of_main()
            job, source, snapshots = prepare(job, post)
        except Exception as error:
            failure = Failure.of(error, f"in DataLoader worker process {post.worker_id}", "")
        self._body = Body(
            self._desk.ring,
            job,
            ready=self._desk,
            orders=self._desk,
            grants=self._desk,
            open_memory=self._desk.open,
            source=source,
            snapshots=snapshots,
            init_failure=failure,
        )
        self._job = job
        self._place = (_node_id(), os.getpid())
        self._settle_schema()
        self._lateness: Lateness | None = None
        if setting.sample_timeout_s is not None:
            self._lateness = Lateness(self._desk.trainer, post.worker_id, setting.sample_timeout_s, leave_word)
            threading.Thread(target=self._lateness.watch, daemon=True).start()

    def _settle_schema(self) -> None:
        """The layout that the dataset declares: the trainer has settled the same."""
        if (rows := self._job.plan.rows) is not None:
            self._desk.settle(rows.dumps())

    def work(self, errand: Errand) -> Outcome:
        """Fills the errand's rows."""
        desk = self._desk
        raw, is_pickled = _part(errand)
        num_foreign = desk.num_foreign
        if self._lateness is not None:
            self._lateness.begin(errand)
        desk.order(
            raw,
            epoch=errand.epoch,
            step=errand.step,
            nrows=errand.end - errand.first,
            is_pickled=is_pickled,
            is_packed=errand.is_packed,
        )
        self._body.work()
        num_foreign = desk.num_foreign - num_foreign
        if text := desk.error:
            return self._outcome(ERROR, error=_shifted(text, errand.first, desk.ring.text_capacity))
        dumped = desk.note
        if dumped[:1] == END:
            return self._outcome(DONE, note=(_snapshot(dumped, desk), True))
        used = desk.lease()
        note = (_snapshot(dumped, desk), False) if dumped else None
        if used:
            return self._outcome(DONE, nbytes=used, note=note, num_foreign=num_foreign)
        return self._outcome(DONE, nbytes=desk.rows_nbytes(), is_rows=True, note=note)

    def pack_rows(self, made: Outcome, nrows: int) -> Outcome:
        """The rows of an outcome, an actor's of this worker, as a packed batch: the trainer's ring has no places for such rows."""
        assert made.layout is not None
        memory = private(made.payload.nbytes)
        memoryview(memory)[:] = memoryview(made.payload)  # type: ignore[arg-type]  # a buffer
        placer = RowPlacer(Layout.loads(made.layout), memory, 0, nrows)
        packed = self._body.packed([placer.get(row) for row in range(nrows)])
        payload = np.empty(packed.nbytes, np.uint8)
        packed.write(payload)
        return self._outcome(DONE)._replace(payload=payload, num_foreign=packed.num_foreign)

    def _outcome(
        self,
        own: int,
        *,
        nbytes: int = 0,
        is_rows: bool = False,
        note: tuple[bytes, bool] | None = None,
        error: bytes = b"",
        num_foreign: int = 0,
    ) -> Outcome:
        desk = self._desk
        row_nbytes = desk.row_nbytes() if is_rows else None
        return Outcome(own, desk.payload(nbytes), row_nbytes, desk.layout_text, note, error, num_foreign, self._place)


def _part(errand: Errand) -> tuple[bytes, bool]:
    """The order of the errand's rows alone."""
    if errand.first == 0 and errand.end == errand.nrows:
        return errand.order, errand.is_pickled
    if not errand.is_pickled:
        return errand.order[8 * errand.first : 8 * errand.end], False
    return pickle.dumps(list(pickle.loads(errand.order))[errand.first : errand.end]), True  # the trainer's own


def _snapshot(dumped: bytes, desk: Desk) -> bytes:
    note = load_note(dumped, lambda at, nbytes: desk.payload(nbytes, at).tobytes())
    assert note is not None
    return note.snapshot


def _shifted(text: bytes, first: int, capacity: int) -> bytes:
    """A failure's text whose rows are those of the whole batch."""
    failure = Failure.loads(text)
    if not first or not failure.rows:
        return text
    return failure._replace(rows=tuple(first + row for row in failure.rows)).dumps(capacity)


def _node_id() -> str:
    ray: Any = sys.modules.get("ray")  # an actor has it
    return str(ray.get_runtime_context().get_node_id()) if ray is not None and ray.is_initialized() else ""


def _name_classes_of_main() -> None:
    """Makes classes of the trainer's program, which came by value, findable by name, so that what is sent back may name them."""
    from ray.cloudpickle import cloudpickle

    main = sys.modules["__main__"]
    for kind in list(getattr(cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())):
        if kind.__module__ == "__main__" and not hasattr(main, kind.__qualname__):
            setattr(main, kind.__qualname__, kind)
