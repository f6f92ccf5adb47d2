"""A device made of host memory, whose work is done when the test says: late, in any order the streams allow, or with an error.

`StandIn` answers `shmload.device.cuda.CudaDevice`. What a stream is given waits in it until `step` (or a wait on the host) has it done,
so a copy reads its source at the last moment there is, by its bare address, as a device does. A copy from memory that is no longer
registered by then is noted in `violations`; one from memory that never was is read at once, as CUDA reads pageable memory.

Memory that a dead tensor leaves is given to the next one of its size on the stream where it was made, at once, as torch's caching
allocator does: other streams that still read it find the next one's bytes, unless `keep_for` has named them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shmload.device.cuda import CudaDevice

UNFILLED = 0xC3  # what a copy's target holds before the copy


class Event:
    """Done when its stream has come to it."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: str | None = None


class _Watched(np.ndarray[Any, Any]):
    """Memory of a tensor that lives: weak references can be had to it."""


@dataclass(eq=False)
class _Left:
    memory: Any
    events: list[Event]  # behind which it may be used again


class Stream:
    """What it was given and has not done, oldest first: pairs of what may hold it back and what is to be done."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        self.error: str | None = None  # of something it has done
        self.is_eager = False  # does what it can at once, as an idle stream does

    def give(self, work: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> None:
        """Adds something behind the rest."""
        self.waiting.append((is_ready, work))
        while self.is_eager and self.can_step:
            self.waiting.popleft()[1]()

    def wait_stream(self, other: Stream) -> None:
        """Begins nothing given from now on before what the other has been given is done, as torch's streams have it."""
        event = Event()
        other.give(lambda: setattr(event, "is_done", True))
        self.give(lambda: None, lambda: event.is_done)

    @property
    def can_step(self) -> bool:
        """Whether it has something to do that nothing holds back."""
        return bool(self.waiting) and self.waiting[0][0]()


class StandIn(CudaDevice):
    """A device whose streams stand still until they are told to go on.

    Args:
        choose: which of several streams goes on where the host waits for something; given how many can, gives a number below that.
    """

    name = "stand-in"

    def __init__(self, choose: Callable[[int], int] = lambda count: 0) -> None:
        self._choose = choose
        self._local = threading.local()
        self._failing: dict[str, int] = {}  # call -> how many more go well before one fails
        self._lock = threading.RLock()
        self.main = Stream()
        self.streams = [self.main]
        self.registered: dict[int, int] = {}  # address -> bytes
        self.violations: list[str] = []
        self.is_graph = False  # the current stream is being captured
        self._made: dict[int, StorageWeakRef] = {}  # address -> what the device made there
        self._kept_for: dict[int, list[Stream]] = {}  # address -> streams that may still read what lies there
        self._left: dict[tuple[Stream, int], list[_Left]] = {}  # stream, bytes -> memory of dead tensors

    # ------------------------------------------------------------ what a test does

    def fail(self, call: str, after: int = 0) -> None:
        """Has a call fail, once: register, record, is_done, copy (at once), work (a copy, while it runs), wait, synchronize."""
        self._failing[call] = after

    def step(self, number: int = 0) -> bool:
        """Has one of the streams that can go on do one thing; False: none can."""
        with self._lock:
            able = [stream for stream in self.streams if stream.can_step]
            if able:
                able[number % len(able)].waiting.popleft()[1]()
            return bool(able)

    def run(self) -> None:
        """Has everything done."""
        while self.step(self._choose(max(sum(stream.can_step for stream in self.streams), 1))):
            pass

    def read(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A list into which the current stream puts what it finds in a tensor, when it comes to it.

        It keeps an address, as a kernel does: the tensor may die before, and its memory be given to another.
        """
        found: list[torch.Tensor] = []
        address, like = tensor.data_ptr(), torch.empty_like(tensor)

        def look() -> None:
            ctypes.memmove(like.data_ptr(), address, like.nbytes)
            found.append(like)

        self.current_stream().give(look)
        return found

    # ------------------------------------------------------------ what a device does

    def register(self, address: int, nbytes: int) -> None:
        """As of any device."""
        self._may_fail("register")
        if any(address < begin + length and begin < address + nbytes for begin, length in self.registered.items()):
            raise RuntimeError(f"{nbytes} bytes at {address} are registered already")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        """As of any device."""
        if self.registered.pop(address, None) is None:
            raise RuntimeError(f"nothing is registered at {address}")

    def current_streams(self) -> Sequence[Stream]:
        """As of any device."""
        if self.is_graph:
            raise RuntimeError("the current stream is capturing a graph")
        return [self.current_stream()]

    def current_stream(self) -> Stream:
        """As of any device."""
        return getattr(self._local, "stream", self.main)

    def side_stream(self) -> Stream:
        """As of any device."""
        self.streams.append(Stream())
        return self.streams[-1]

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """As of any device."""
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def record(self, stream: Stream) -> Event:
        """As of any device."""
        self._may_fail("record")
        event = Event()

        def reach() -> None:
            event.is_done, event.error, stream.error = True, stream.error, None

        stream.give(reach)
        return event

    def is_done(self, event: Event) -> bool:
        """As of any device."""
        self._may_fail("is_done")
        self._raise_timeout(event)
        return event.is_done

    def wait_on_host(self, event: Event) -> None:
        """As of any device."""
        self._may_fail("wait")
        while not event.is_done:
            num_able = sum(stream.can_step for stream in self.streams)
            if not num_able:
                raise AssertionError("nothing can go on, and the event is not done: it would be waited for without an end")
            self.step(self._choose(num_able))
        self._raise_timeout(event)

    def wait_on_stream(self, stream: Stream, event: Event) -> None:
        """As of any device."""
        stream.give(lambda: None, lambda: event.is_done)

    def synchronize(self) -> None:
        """As of any device."""
        self._may_fail("synchronize")
        self.run()

    def copy(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """As of any device."""
        self._may_fail("copy")
        stream = self.current_stream()
        source = tensor.contiguous()
        target = self._new(source) if into is None else into
        address, nbytes = source.data_ptr(), source.nbytes
        if not self._is_registered(address, nbytes):
            taken = source.clone()
            stream.give(lambda: ctypes.memmove(target.data_ptr(), taken.data_ptr(), nbytes))
            return target

        def work() -> None:
            if "work" in self._failing:
                try:
                    self._may_fail("work")
                except RuntimeError as error:
                    stream.error = str(error)
                    return
            if not self._is_registered(address, nbytes):
                self.violations.append(f"a copy of {nbytes} bytes at {address} ran when they were registered no longer")
                return
            ctypes.memmove(target.data_ptr(), address, nbytes)

        stream.give(work)
        return target

    def stream_for(self, tensor: torch.Tensor) -> Stream | None:
        """As of any device."""
        made = self._made.get(tensor.untyped_storage().data_ptr())
        is_gone = made is None or made.expired()  # type: ignore[no-untyped-call]  # torch's own
        return None if is_gone else self.current_stream()

    def is_capturing(self) -> bool:
        """As of any device."""
        return self.is_graph

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        stream = self.current_stream()
        with self._lock:
            left = self._left.setdefault((stream, like.nbytes), [])
            found = next((each for each in left if all(event.is_done for event in each.events)), None)
            if found is not None:
                left.remove(found)
        memory = np.full(like.nbytes, UNFILLED, np.uint8) if found is None else found.memory
        if found is not None:
            stream.give(lambda: memory.fill(UNFILLED))
        watched = memory.view(_Watched)
        weakref.finalize(watched, self._leave, stream, memory).atexit = False
        target = torch.from_numpy(watched).view(like.dtype).view(like.shape) if like.nbytes else torch.empty_like(like)
        weak = StorageWeakRef(target.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own
        self._made[target.data_ptr()] = weak
        return target

    def _leave(self, stream: Stream, memory: Any) -> None:
        """A tensor has died."""
        with self._lock:
            events = []
            for other in self._kept_for.pop(memory.ctypes.data, ()):
                events.append(Event())
                other.give(functools.partial(setattr, events[-1], "is_done", True))
            self._left[stream, memory.nbytes].insert(0, _Left(memory, events))

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        """As of any device."""
        with self._lock:
            self._kept_for.setdefault(tensor.untyped_storage().data_ptr(), []).append(stream)

    def _is_registered(self, address: int, nbytes: int) -> bool:
        return any(begin <= address and address + nbytes <= begin + length for begin, length in list(self.registered.items()))

    def _may_fail(self, call: str) -> None:
        left = self._failing.get(call)
        if left is None:
            return
        if left:
            self._failing[call] = left - 1
            return
        del self._failing[call]
        raise RuntimeError(f"the stand-in was told to fail at {call}")

    def _raise_timeout(self, event: Event) -> None:
        if event.is_done and event.error is not None:
            text, event.error = event.error, None
            raise RuntimeError(text)
