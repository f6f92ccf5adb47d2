"""Who holds the ring's slots, and which copies from them come too late: found while a program runs, where it has asked for that.

Each call in this thread that makes something on the device of what lies in a slot gets an event of its own, recorded behind it on
the stream that it runs on. When the slot has cooled, and so is about to be used again, that event must be done as well. If it is
not, nothing held the slot for that copy, and what the copy reads is a matter of luck.

So there is no false alarm: a stream that another one was made to wait for has done its copies when that one's event is done. A
copy that was in time by luck is not found. What C code does with an address is not seen; slots that are poisoned show that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from shmload._core.trainer import Order
from shmload.device.calls import Calls
from shmload.device.pins import PendingCopies
from shmload.engine.parts import Hook, Parts
from shmload.world import users_place

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


class Watched(NamedTuple):
    """An engine as far as its copies go: its slots, and which batch lies in one, in words."""

    calls: Calls
    pending_copies: PendingCopies
    batch_in: Callable[[int], str]


class _Copy(NamedTuple):
    event: Any
    where: str
    batch: str


class CopyWatch(TorchFunctionMode):
    """Watches this thread's copies from the slots of some engines.

    Args:
        engines: gives those there are, at each call.
    """

    def __init__(self, engines: Callable[[], Iterable[Watched]]) -> None:
        super().__init__()
        self._engines = engines

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            for source in (*args, *(kwargs or {}).values()):
                if isinstance(source, torch.Tensor) and source is not made and source.layout is torch.strided:
                    self._see(source, made)
        return made

    def _see(self, source: torch.Tensor, made: torch.Tensor) -> None:
        for engine in self._engines():
            stream = engine.calls.stream_for(made)
            slot = -1 if stream is None else engine.pending_copies.pins.slot_at(source.data_ptr())
            if slot < 0:
                continue
            if engine.pending_copies.late is None:
                engine.pending_copies.late = Late(engine.calls)
            where, batch = users_place(), engine.batch_in(slot)
            if engine.calls.is_capturing():
                engine.pending_copies.warn(
                    f"the copy at {where} of {batch} is captured in a graph, which will read that address at each replay, "
                    "whatever lies there then. Copy into a tensor of your own before, and capture what reads that"
                )
            else:
                engine.pending_copies.late.noted.setdefault(slot, []).append(
                    _Copy(engine.calls.record(stream), where, batch)
                )


class Late:
    """Which copies from a slot are not done although it has cooled."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.noted: dict[int, list[_Copy]] = {}

    def __call__(self, slot: int) -> list[str]:
        """What is to be said of a slot that is free now; its copies are forgotten."""
        return [
            f"the copy at {copy.where} of {copy.batch} is not done, and nothing waits for it: its slot is used again, and it may "
            "read another batch's bytes. Call loader.record_stream(batch, stream) before the batch is dropped, or drop it while "
            "that stream is current"
            for copy in self.noted.pop(slot, ())
            if not self._calls.is_done(copy.event)
        ]


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


class Holders(Hook):
    """Notes where each batch is taken, over a ring whose slots are poisoned."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[int, int, float, str]] = {}  # slot -> epoch, step, when, where

    def built(self, parts: Parts) -> None:
        self._ring = parts.ring
        self._ring.poison = True

    def delivered(self, order: Order) -> None:
        self._taken[order.slot] = (order.epoch, order.step, monotonic(), users_place())

    def held(self) -> list[Holder]:
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
        return {"holders": [holder._asdict() for holder in self.held()]}

    def who_holds(self) -> str:
        return "".join(f"\n{holder}" for holder in self.held())
