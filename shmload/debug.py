"""Who holds which slot, since when, and where the batch was taken; and slots that are overwritten the moment they come back.

A slot is its batch's for as long as any alias of the batch lives (docs/memory.md). Where batches pile up, or numbers change that
nobody touched, this says why:

* `loader.holders()`, the warning about batches still in use and `loader.stats()` name the line that called `next()` for each
  batch that still has its slot, its age and its size;
* `watch_copies` names the copies to a device that nobody waits for;
* a slot whose last alias has died is filled with 0xA5 at once. What looks at it then through a bare address (`data_ptr()`, ctypes,
  a copy to a device that was never waited for) reads the same everywhere, instead of what the next batch left there: 165 as
  uint8, -1515870811 as int32, -6510615555426900571 as int64, -2.87e-16 as float32, -2.5e-127 as float64. `is_poisoned` asks for it.

These are switched on by `enable()`, or SHMLOAD_DEBUG_BATCHES=1, for workers started from then on. Otherwise they cost nothing: a
loader asks once, when it starts its workers, which kind of engine to make. On, they cost the overwriting and about 3 us a batch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from shmload.callers import users_place
from shmload.device.watching import CopyWatch, Watched
from shmload.engine import Engine
from shmload.orders import Delivery

POISON = 0xA5  # src/lease.h writes it
LEASED = 3  # of TrainerRing.state
_is_enabled = os.environ.get("SHMLOAD_DEBUG_BATCHES", "") not in ("", "0")


def enable(on: bool = True) -> None:
    """Notes holders and poisons slots, for loaders that start their workers from now on.

    Args:
        on: False: no longer.
    """
    global _is_enabled
    _is_enabled = on


def is_enabled() -> bool:
    """Whether the next engine will be a watched one."""
    return _is_enabled


def is_poisoned(values: Any) -> bool:
    """Whether every byte is what a slot is overwritten with: then this was read after its batch had died.

    Args:
        values: a tensor or array; an empty one is not poisoned. Tensors of a device are copied.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return len(raw) > 0 and bool((raw == POISON).all())


@contextlib.contextmanager
def watch_copies(loader: Any) -> Iterator[None]:
    """Warns of copies from a pinned ring that may read too late: on a stream that nobody waits for, or captured in a graph.

    Around a training loop, or any part of it; it switches `enable()` on as well, for workers started in the block. It sees what
    torch is asked to copy in this thread. A copy is late if its slot is about to be used again and the copy is not done: what a
    stream waited for, in whatever way, is not. One that was done in time by luck is not found, so let the watch run for a while.

    Args:
        loader: a ShmLoader with `pin_memory=True`, and no pass begun before the block.
    Raises:
        RuntimeError: a pass began before, unwatched.
    Cost: an event a copy, and a Python call for everything that torch is asked for: for finding faults, not for every day.
    Example:
        >>> from shmload import ShmLoader, debug
        >>> with ShmLoader([1, 2, 3]) as loader, debug.watch_copies(loader):
        ...     [int(batch) for batch in loader]
        [1, 2, 3]
    """
    if any(not isinstance(engine, WatchedEngine) and not engine._is_closed for engine in loader._engines):
        raise RuntimeError(
            "watch_copies needs a loader whose workers start in its block, and these run already: make the loader, or "
            "begin its first pass, in the block, or set SHMLOAD_DEBUG_BATCHES=1"
        )

    def watched() -> Iterator[Watched]:
        for engine in loader._engines:
            if engine._cooling is not None:
                yield Watched(engine._options.calls, engine._cooling, engine.batch_in)

    was_enabled = _is_enabled
    enable()
    try:
        with CopyWatch(watched):
            yield
    finally:
        enable(was_enabled)


class Holder(NamedTuple):
    """A batch that still has its slot.

    Attributes:
        slot: its number in the ring.
        epoch, step: which batch it is; the step counts from the epoch's start.
        nbytes: the slot's.
        age_s: seconds since it was yielded.
        where: the line that took it, "file:line in function".
    """

    slot: int
    epoch: int
    step: int
    nbytes: int
    age_s: float
    where: str

    def __str__(self) -> str:
        return (
            f"slot {self.slot} ({self.nbytes} bytes): batch {self.step} of epoch {self.epoch}, taken {self.age_s:.1f} s ago at "
            f"{self.where}"
        )


class WatchedEngine(Engine):
    """An engine that notes where each batch is taken, over a ring whose slots are poisoned."""

    def __init__(self, *args: Any) -> None:
        self._taken: dict[int, tuple[int, int, float, str]] = {}  # slot -> epoch, step, when, where
        super().__init__(*args)
        self._ring.poison = True

    def next(self, *, in_order: bool = True) -> Delivery:
        """As of any engine; notes who asked."""
        delivery = super().next(in_order=in_order)
        order = delivery[0]
        self._taken[order.slot] = (order.epoch, order.step, monotonic(), users_place())
        return delivery

    def holders(self) -> list[Holder]:
        """The batches that still have their slots, the oldest first."""
        now, ring = monotonic(), self._ring
        found = [
            Holder(slot, epoch, step, ring.payload_nbytes(slot), now - taken, where)
            for slot, (epoch, step, taken, where) in self._taken.items()
            if ring.state(slot) == LEASED
        ]
        return sorted(found, key=lambda holder: -holder.age_s)

    def batch_in(self, slot: int) -> str:
        """Which batch lies in a leased slot."""
        epoch, step, _, where = self._taken[slot]
        return f"batch {step} of epoch {epoch}, taken at {where},"

    def counters(self) -> dict[str, Any]:
        """As of any engine; and the holders."""
        return {**super().counters(), "holders": [holder._asdict() for holder in self.holders()]}

    def _who_holds(self) -> str:
        return "".join(f"\n{holder}" for holder in self.holders())
