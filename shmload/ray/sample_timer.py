"""End an actor whose sample takes too long, and report to the agent which sample it was.

A `SampleTimer`, in a second thread of the actor, stores the failure in Ray's key-value store, because a dead actor cannot return
it, and the agent reads it there. The thread needs the GIL, so a sample that blocks in C code and holds the GIL is not detected.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from time import monotonic_ns
from typing import Any

from shmload.errors import SampleTimeout
from shmload.ray.messages import Task
from shmload.worker.failure import REMEDY, Failure, sample_at, timeout_text

LOOKS = 8  # number of checks within the time limit of a sample
NAMESPACE = b"shmload"


class SampleTimer:
    """A limit on the time that the worker loop may take for a sample. A second thread runs `watch`.

    Args:
        ring: the trainer's end of the loop's ring, which records the current row and the time of its start.
        worker: the worker's number.
        limit_s: the longest time that a sample may take.
        store_failure: (bytes) -> None: stores the failure; called before the actor is ended.
    """

    def __init__(self, ring: Any, worker: int, limit_s: float, store_failure: Any) -> None:
        self._ring, self._worker, self._limit_s, self._store_failure = ring, worker, limit_s, store_failure
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
        self._store_failure(pickle.dumps((task.epoch, task.step, task.first, tuple(failure))))
        return True

    def watch(self) -> None:
        """Check regularly until a sample has timed out, then end the process. Does not return."""
        pause = threading.Event()
        while not self.look():
            pause.wait(self._limit_s / LOOKS)
        os._exit(1)


def failure_in(word: bytes | None, task: Task) -> Failure | None:
    """Return the failure of this task; None if nothing is stored or it belongs to another task.

    Args:
        word: the stored bytes, or None.
        task: the task.
    Returns:
        a failure with the bad row of the whole batch; without rows if any of several samples may be the cause.
    """
    if word is None:
        return None
    *place, failure = pickle.loads(word)
    return Failure(*failure) if place == [task.epoch, task.step, task.first] else None


def store_failure(word: bytes) -> None:
    """Store the failure because of which this actor will end, under a name that contains the actor's id."""
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
