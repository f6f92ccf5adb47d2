"""Copy a batch out of its slot when the program holds so many others that workers would run out of slots.

The copy costs one memcpy and frees the slot at once, so a program may keep any number of batches. The ring decides how many slots
the workers need (`num_lendable`).

Garbage may hold slots, too: a batch in a reference cycle lives until Python's collector finds the cycle. A collection can free
such slots, but a full one takes 80 ns for each object in the process, 40 ms with 500,000 objects, and frees nothing if the program
does hold the batches. So collections are limited to `SHARE` of the time since slots first ran out. Each collection that frees no
slot halves this share, and the next one that does restores it. If the program has disabled the collector, nothing is collected.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from time import monotonic

from shmload._core.trainer import FollowerRing, TrainerRing
from shmload.introspect.users_frame import users_frame
from shmload.shm import fork_copies

SHARE = 0.005  # share of the time since slots first ran out, for collections of young generations and again for full ones
FIRST_S = 0.001  # the first collection may always take this long
OBJECT_S = 1e-7  # estimated cost of a collection for each object
YOUNG, FULL = 1, 2  # generations of gc.collect


class CollectionBudget:
    """The limit on the time that this process spends on collecting garbage to free slots.

    Args:
        clock: returns seconds; tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began_s = -1.0  # time when slots first ran out; -1 before that
        self._spent_s = {YOUNG: 0.0, FULL: 0.0}
        self._share = {YOUNG: SHARE, FULL: SHARE}
        self._full_s = 0.0  # duration of the newest full collection; an estimate before the first one

    def collect(self, has_freed: Callable[[], bool]) -> bool:
        """Collect garbage within the budget, the young generations first.

        Args:
            has_freed: returns whether a slot is free.
        Returns:
            whether a collection has freed a slot.
        """
        if self._began_s < 0:
            self._began_s = self._clock()
        if not gc.isenabled():
            return False
        num_new, num_collections, _ = gc.get_count()
        young_s = (num_new + num_collections * gc.get_threshold()[0]) * OBJECT_S
        if self._affords(YOUNG, young_s) and self._collected(YOUNG, has_freed):
            return True
        if not self._full_s:
            self._full_s = estimated_full_s()
        if not self._affords(FULL, self._full_s):
            return False
        if not self._spent_s[FULL]:  # the estimate may be old
            self._full_s = estimated_full_s()
            if not self._affords(FULL, self._full_s):
                return False
        return self._collected(FULL, has_freed)

    def _affords(self, generation: int, expected_s: float) -> bool:
        """Return whether the budget allows a collection of a generation that takes the expected time."""
        elapsed_s = self._clock() - self._began_s
        allowed_s = max(FIRST_S if not self._spent_s[generation] else 0, elapsed_s * self._share[generation])
        return self._spent_s[generation] + expected_s <= allowed_s

    def _collected(self, generation: int, has_freed: Callable[[], bool]) -> bool:
        """Collect a generation. Return whether this has freed a slot."""
        began_s = self._clock()
        gc.collect(generation)
        took_s = self._clock() - began_s
        self._spent_s[generation] += took_s
        if generation == FULL:
            self._full_s = took_s
        is_useful = has_freed()
        self._share[generation] = SHARE if is_useful else self._share[generation] / 2
        return is_useful


def estimated_full_s() -> float:
    """Return how long a full collection may take. With ten million objects this takes 1 to 2 ms, so do not call it per batch."""
    return sys.getallocatedblocks() * OBJECT_S


_budget = CollectionBudget()  # one for all rings, because a collection serves all


class CopyOut:
    """The decision, for each batch of one ring, whether it must be copied out of its slot.

    Args:
        ring: the ring.
        is_shared: other ranks read the ring, too.

    Attributes:
        pending_warning: a warning that the program turns into an error and that has not been raised yet; see `raise_warning`.
    """

    def __init__(self, ring: TrainerRing | FollowerRing, *, is_shared: bool = False) -> None:
        self._ring = ring
        self._whose = "slots that a rank may have of a shared ring" if is_shared else "slots of the ring"
        self._has_warned = False
        self.pending_warning: UserWarning | None = None

    def must_copy(self, holders_hint: Callable[[], str]) -> bool:
        """Return whether the newest batch must be copied now, because the program holds too many slots for the workers to go on.

        If so, count the copy, and warn the first time. The caller makes the copy.

        Args:
            holders_hint: returns text that is added to the warning.
        """
        ring = self._ring
        fork_copies.release_copied()
        if self._has_free_slot() or _budget.collect(self._has_free_slot):
            return False
        if not self._has_warned:
            self._has_warned = True
            text = (
                f"{ring.num_leased - 1} batches are still in use, and the workers need the other {self._whose}: while that is so, "
                "batches are copied to private memory. Drop batches you no longer need, or keep a copy (`y.clone()`) of the parts "
                f"that you need, because a part keeps its whole batch; or raise prefetch_factor or ring_bytes{holders_hint()}"
            )
            try:
                warnings.warn(text, stacklevel=users_frame()[1])
            except UserWarning as error:
                # The program turns warnings into errors. Raised here, this one would lose the batch, and its traceback would keep
                # the last slot. `raise_warning` raises it in the next call of `next`.
                self.pending_warning = error.with_traceback(None)
        ring.count_copied_out()
        return True

    def _has_free_slot(self) -> bool:
        return self._ring.num_leased < self._ring.num_lendable

    def raise_warning(self) -> None:
        """Raise `pending_warning`, if there is one, and forget it."""
        error, self.pending_warning = self.pending_warning, None
        if error is not None:
            raise error
