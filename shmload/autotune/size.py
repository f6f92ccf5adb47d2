"""How large a ring and its crew are, and making them another size while they run."""

from __future__ import annotations

from shmload.autotune.roster import Roster
from shmload.ring_memory import LEAST_SLOTS, RingMemory
from shmload.worker.crew import interrupts_held


class Size:
    """The size of one engine: its workers, its slots, the memory behind them.

    Args:
        num_cooling: slots beyond those for batches under way.
    """

    def __init__(self, memory: RingMemory, roster: Roster, num_cooling: int = 0) -> None:
        self._memory, self._roster = memory, roster
        self._num_spare = num_cooling + 2

    def resize(self, num_workers: int) -> bool:
        """Makes the crew that large, in seed mode; nobody is waited for. False: a process could not be started."""
        with interrupts_held():
            return self._roster.resize(num_workers)

    def make_room(self, num_ordered: int, budget: int) -> int:
        """Brings slots into use for so many batches under way, or parks what is free beyond.

        Args:
            budget: bytes that payloads may take in all for the sake of more slots.
        Returns:
            how many batches there is room for.
        """
        with interrupts_held():
            num_wanted = num_slots(num_ordered) + self._num_spare - 2
            return self._memory.use(num_wanted, budget) - self._num_spare

    def room(self, budget: int) -> int:
        """Batches under way that there are slots for, or can be within a budget."""
        return self._memory.room(budget) - self._num_spare

    @property
    def payload_nbytes(self) -> int:
        """Bytes reserved for batches now."""
        return self._memory.nbytes


def num_slots(num_ordered: int) -> int:
    """Slots for so many batches under way: one more is the user's, and one is free to be ordered when that comes back."""
    return max(num_ordered + 2, LEAST_SLOTS)
