"""Samples that take too long on an actor: a thread beside its body sees them, leaves word in the cluster, and ends the actor.

The word goes through Ray's own key-value store, because an actor that is ended can return nothing: the agent looks there when the
actor of an errand has died. The thread needs the GIL, so a sample that stands still in C and holds it is not noticed.
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
from shmload.worker.actors.errand import Errand
from shmload.worker.failure import Failure
from shmload.worker.late import REMEDY, late_text, sample_at

LOOKS = 8  # within the time that a sample may take
NAMESPACE = b"shmload"


class Lateness:
    """Watches one body.

    Args:
        ring: the body's, which says since when it has read which row.
        limit_s: how long a sample may take.
        leave_word: (bytes) -> None, before the actor is ended.
    """

    def __init__(self, ring: Any, worker: int, limit_s: float, leave_word: Any) -> None:
        self._ring, self._worker, self._limit_s, self._leave_word = ring, worker, limit_s, leave_word
        self._errand: Errand | None = None
        self._thread = threading.main_thread().ident

    def begin(self, errand: Errand) -> None:
        """From here on the body works on this."""
        self._errand = errand

    def look(self) -> bool:
        """Whether the sample under way is too late; then word has been left of it."""
        held, since_ns = self._ring.held_by(self._worker), self._ring.worker(self._worker)["since_ns"]
        errand = self._errand
        if errand is None or held is None or held[3] < 0 or not since_ns:
            return False
        if (monotonic_ns() - since_ns) / 1e9 <= self._limit_s:
            return False
        row = errand.first + held[3]
        stack = "".join(traceback.format_stack(sys._current_frames().get(self._thread or 0)))
        what = f"{sample_at(errand.key(row), errand.epoch, row, errand.step)} took longer than"
        text = late_text(what, self._limit_s, self._worker, os.getpid(), stack) + REMEDY
        self._leave_word(dumped_word(errand, Failure(SampleTimeout, text, "", "", (row,))))
        return True

    def watch(self) -> None:
        """Looks until a sample is too late, and ends the process then."""
        pause = threading.Event()
        while not self.look():
            pause.wait(self._limit_s / LOOKS)
        os._exit(1)


def dumped_word(errand: Errand, failure: Failure) -> bytes:
    """What is left behind: which errand it was, and its failure."""
    return pickle.dumps((errand.epoch, errand.step, errand.first, tuple(failure)))


def failure_in(word: bytes | None, errand: Errand) -> Failure | None:
    """The failure of this errand; None: no word was left, or it is of another errand."""
    if word is None:
        return None
    *place, failure = pickle.loads(word)
    return Failure(*failure) if place == [errand.epoch, errand.step, errand.first] else None


def leave_word(word: bytes) -> None:
    """Leaves the last word of the actor that this process is."""
    import ray
    from ray.experimental import internal_kv

    name = f"late-{ray.get_runtime_context().get_actor_id()}".encode()
    internal_kv._internal_kv_put(name, word, namespace=NAMESPACE)


def take_word(actor: Any) -> bytes | None:
    """The last word of an actor that has died."""
    from ray.experimental import internal_kv

    name = f"late-{actor._actor_id.hex()}".encode()
    word: bytes | None = internal_kv._internal_kv_get(name, namespace=NAMESPACE)
    return word


def forget_word(actor: Any) -> None:
    """Nobody will ask for it again."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(f"late-{actor._actor_id.hex()}".encode(), namespace=NAMESPACE)
