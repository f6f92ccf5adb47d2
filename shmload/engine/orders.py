"""What the loader asks of the engine, and what it gets.

One caller at a time: of several threads that ask one iterator for batches each gets its own, and waits for its turn.

A call in a thread that is inside already (a signal handler's, a sampler's, a callback's) would wait for itself, so it is refused.
Waiting does not hold up ^C. In a forked child nobody is inside but the thread that has forked.

What is done about a sample that cannot be read: `on_error`.

A worker reports which rows of its batch it cannot read. "raise" raises its error; "skip" orders the batch again without them,
"substitute" with another index in their place. So the batch is made anew of what is then ordered, by the same code on the same
path, and the outcome depends on the bad samples alone, not on workers or timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias
from weakref import WeakSet

import numpy as np

from shmload._core.trainer import Order
from shmload.errors import SampleError
from shmload.worker.pool import STOP_GRACE_S
from shmload.worker.snapshot import Note

if TYPE_CHECKING:
    from shmload._core.mapping import Mapping
    from shmload.batch.layout import Layout
    from shmload.device.pins import Releases
    from shmload.engine.builder import LoaderConfig
    from shmload.engine.watching import Holders

LEAVE_S = 1.0  # for who is inside to come out


class Turns:
    """Whose turn it is: `with turns: ...`. Loaders do it in these lines, as calls would cost as much again as the lock:

    with turns.lock:
        if turns.is_taken:
            raise turns.refusal()
        turns.is_taken = True
        try:
            ...
        finally:
            turns.is_taken = False
    """

    __slots__ = ("__weakref__", "is_taken", "lock")

    def __init__(self) -> None:
        self.lock: Any = RLock()
        self.is_taken = False  # by the thread that has the lock
        _all.add(self)

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.is_taken:
            self.lock.release()
            raise self.refusal()
        self.is_taken = True

    def __exit__(self, *exc: object) -> None:
        self.is_taken = False
        self.lock.release()

    def __reduce__(self) -> Any:
        return Turns, ()  # a copy has its own

    @contextmanager
    def others_out(self) -> Iterator[None]:
        """Waits until no other thread is inside, where those hear that they must go; not for ever: they may be in a user's code."""
        is_mine = self.lock.acquire(timeout=LEAVE_S)
        try:
            yield
        finally:
            if is_mine:
                self.lock.release()

    @staticmethod
    def refusal() -> RuntimeError:
        """The error of a call within a call."""
        return RuntimeError(
            "this iterator is being asked for a batch already, further up in this thread: a sampler, a dataset, a callback or a "
            "signal handler that is called meanwhile cannot take the next one. Take it when the first call has returned"
        )


_all: WeakSet[Turns] = WeakSet()


def _in_child() -> None:
    for turns in list(_all):
        if not turns.lock._is_owned():  # whoever had it is not in this process
            turns.lock._at_fork_reinit()
            turns.is_taken = False


os.register_at_fork(after_in_child=_in_child)


# An order, its batch (NOTHING if none came of it), and in torch mode what its worker said of itself.
Delivery: TypeAlias = tuple[Order, Any, Note | None]

# The iterator of an iterable dataset was at its end, or every sample of the batch was bad and is skipped.
NOTHING = object()


class BatchSource(Protocol):
    """What a mode orders batches from: an engine, or a ring of another rank's.

    Attributes:
        turns: of those who ask for batches; it is their iterator's.
        num_slots, control: of the ring, and its control block.
        shared_by: ranks that read the ring.
        on_delivery: called after each batch; None: nobody looks.
    """

    turns: Turns
    num_slots: int
    control: Mapping
    shared_by: int
    on_delivery: Callable[[], None] | None

    @property
    def num_queued(self) -> int:
        """Orders submitted and not delivered."""

    @property
    def front(self) -> Order | None:
        """The order that `next` will deliver."""

    @property
    def layout(self) -> Layout | None:
        """Where fields lie, once it is known."""

    @property
    def wants_pinned(self) -> bool:
        """Whether a batch that is not pinned is to be copied to pinned memory."""

    @property
    def releases(self) -> Releases | None:
        """What ends of leases leave behind; None where nothing is pinned."""

    @property
    def holders(self) -> Holders | None:
        """Who has taken its batches, where that is noted."""

    def submit(self, order: Order) -> None:
        """Queues an order behind those submitted before."""

    def next(self, *, in_order: bool = True) -> Delivery:
        """Waits for the oldest order and delivers it."""

    def abandon(self) -> None:
        """Forgets every order."""

    def begin_pass(self, num_steps: int, *, step_stride: int = 1, epoch_base: int = 0) -> None:
        """Hears how long the pass is that begins."""

    def leave_pass(self) -> None:
        """Hears that a pass is left before its end."""

    def counters(self) -> dict[str, Any]:
        """What `shmload top` shows of the ring."""

    def totals(self) -> dict[str, float]:
        """What the ring has counted since it began, and `busy_s` of all workers."""

    def close(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the workers; live batches stay valid."""


class DeliveryLog(Protocol):
    """Who is told of each pass and each batch, in the order in which they reach the user.

    Attributes:
        last: the order of the batch just yielded.
        num_passes: begun in this run, in torch mode: its passes have no other number.
    """

    last: Order | None
    num_passes: int

    def resumed(self, epoch: int, step: int, *, by: str = "state") -> None:
        """The next pass begins there."""

    def begins(self, config: LoaderConfig, epoch: int, step: int, *, schedule: Any = None, rank: int = 0) -> None:
        """A pass begins at that step; `schedule`, and whose part of it, where it can be computed."""

    def delivered(
        self, order: Order, batch: Any, *, valid: int | None = None, epoch: int | None = None, step: int | None = None
    ) -> None:
        """A batch is about to be yielded, or NOTHING came of its order."""

    def ended(self, epoch: int, step: int) -> None:
        """The pass has come to its end."""


LISTED_MAX = 1000  # bad samples that stats() tells of singly
SUBSTITUTES_MAX = 100  # indices tried in place of one bad sample

OnError = Literal["raise", "skip", "substitute"]


NextIndex: TypeAlias = Callable[[Order, int, int], Any]


class BadSamples:
    """Counts and replaces them, over the life of one loader.

    Args:
        max_bad: more bad samples than this raise SampleError; None: any number may be bad.
        next_index: (order, row, tries) -> the index that takes a row's place at that try, from 1; who reads must have given one.
    """

    def __init__(self, on_error: OnError, max_bad: int | None, next_index: NextIndex | None = None) -> None:
        self._on_error = on_error
        self._max_bad = max_bad
        self.next_index = next_index
        self.count = 0
        self.listed: list[dict[str, Any]] = []

    @property
    def are_tolerated(self) -> bool:
        """Whether a bad sample may be anything but an error."""
        return self._on_error != "raise"

    def replaced(
        self, order: Order, bad: Sequence[int], error: Callable[[], BaseException]
    ) -> Sequence[Any] | np.ndarray[Any, Any]:
        """The order's indices without its bad rows, or with others in their place.

        Raises:
            the worker's error, if on_error is "raise".
            SampleError: there are more bad samples than `max_bad`, or too many substitutes were bad, too.
        """
        if not self.are_tolerated:
            raise error()
        if order.ordered is None:
            order.ordered = order.indices
        origins = order.origins or [(row, 0) for row in range(order.nrows)]
        indices = list(order.indices)
        cause = error()
        for row in bad:
            self._count(order, row, indices[row], cause)
            first_row, tries = origins[row]
            if self._on_error == "substitute":
                if tries == SUBSTITUTES_MAX:
                    raise SampleError(
                        f"{SUBSTITUTES_MAX} samples tried in place of one bad sample of epoch {order.epoch} are bad, too: "
                        "look at the dataset"
                    ) from cause
                origins[row] = (first_row, tries + 1)
                assert self.next_index is not None
                indices[row] = self.next_index(order, first_row, tries + 1)
        if self._on_error == "skip":
            good = sorted(set(range(order.nrows)).difference(bad))
            indices, origins = [indices[row] for row in good], [origins[row] for row in good]
        order.origins = origins
        return np.array(indices, np.int64) if isinstance(order.indices, np.ndarray) else indices

    def _count(self, order: Order, row: int, index: Any, error: BaseException) -> None:
        self.count += 1
        if len(self.listed) < LISTED_MAX:
            lines = str(error).strip().splitlines() or [""]
            kind = type(error).__name__
            self.listed.append(
                {
                    "epoch": order.epoch,
                    "step": order.step,
                    "index": int(index) if isinstance(index, np.integer) else index,
                    # the last line of a worker's traceback, or the first of what was raised here, without the type's module
                    "error": f"{kind}: {lines[-1 if lines[0].startswith('Caught ') else 0].partition(f'{kind}: ')[2] or lines[0]}",
                }
            )
        if self._max_bad is not None and self.count > self._max_bad:
            raise SampleError(
                f"{self.count} bad samples are more than max_bad={self._max_bad} allows; the last was sample {index} of epoch "
                f"{order.epoch}. stats()['bad_samples'] lists them; mend the data, or raise max_bad"
            ) from error
