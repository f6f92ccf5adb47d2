"""What becomes of a batch that has got the ring's last slot, because the user holds all the others."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

from shmload._core.trainer import FollowerRing, TrainerRing
from shmload.callers import users_frame
from shmload.shm import forks


class Hoarding:
    """Whether batches must leave their slots, over one ring.

    Args:
        is_shared: other ranks read it, too.
    """

    def __init__(self, ring: TrainerRing | FollowerRing, *, is_shared: bool = False) -> None:
        self._ring = ring
        self._whose = "slots that a rank may have of a shared ring" if is_shared else "slots of the ring"
        self._has_warned = False
        self.has_collected = False
        self.refused: UserWarning | None = None

    def must_copy(self, who_holds: Callable[[], str]) -> bool:
        """Whether the batch that has the last slot must leave it at once, because the user does hold all others.

        Args:
            who_holds: what else the warning says.
        """
        ring = self._ring
        if not self.has_collected:  # a reference cycle holds its slots until the collector comes by
            self.has_collected = True
            forks.settle()
            gc.collect()
            if ring.num_leased < ring.num_lendable:
                return False
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{ring.num_leased - 1} batches are still in use, all but one of the {ring.num_lendable} {self._whose}: from now "
                "on batches are copied to private memory while that is so. Drop batches you no longer need, or raise "
                f"prefetch_factor or ring_bytes{who_holds()}"
            )
        ring.count_copied_out()
        return True

    def _warn(self, text: str) -> None:
        try:
            warnings.warn(text, stacklevel=users_frame()[1])
        except UserWarning as error:
            # a program that makes errors of warnings: raised here it would lose this batch, and its traceback hold the last slot
            self.refused = error.with_traceback(None)

    def raise_refused(self) -> None:
        """Raises the warning that has been made an error, if one has; once."""
        error, self.refused = self.refused, None
        if error is not None:
            raise error
