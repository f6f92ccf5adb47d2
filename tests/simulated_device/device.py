"""A simulated device in host memory. Its work is done when the test says: late, in any order that the streams allow, or with an
error.

The class implements `shmload.device.cuda.CudaDevice`. Work given to a stream waits until `step` (or a wait on the host) executes
it, so a copy reads its source at the last possible moment by address, like a real device. A copy from memory that was
unregistered in the meantime is recorded in `violations`. A copy from memory that was never registered reads it at once, as CUDA
does with pageable memory.

Memory of a dead tensor goes immediately to the next tensor of its size on the stream where it was created, as in torch's caching
allocator. Other streams that still read it find the bytes of the next tensor, unless `keep_for` has named them.
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

UNFILLED = 0xC3  # the content of a copy's target before the copy


class Event:
    """An event, which is done when its stream has reached it."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: str | None = None


class _LiveMemory(np.ndarray[Any, Any]):
    """Memory of a living tensor; a subclass, because weak references to it are needed."""


@dataclass(eq=False)
class _FreeMemory:
    memory: Any
    events: list[Event]  # the memory may be reused after these


class Stream:
    """Pending work of a stream, oldest first: pairs of (function that returns whether the work may start, work)."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        self.error: str | None = None  # of work that has failed
        self.is_eager = False  # executes work as soon as possible, like an idle stream

    def give(self, work: Callable[[], object], is_ready: Callable[[], bool] = lambda: True) -> None:
        """Appends work."""
        self.waiting.append((is_ready, work))
        while self.is_eager and self.can_step:
            self.waiting.popleft()[1]()

    def wait_stream(self, other: Stream) -> None:
        """Starts no later work before the present work of `other` is done, as torch's streams do."""
        event = Event()
        other.give(lambda: setattr(event, "is_done", True))
        self.give(lambda: None, lambda: event.is_done)

    @property
    def can_step(self) -> bool:
        """Returns whether the stream has work that may start."""
        return bool(self.waiting) and self.waiting[0][0]()


class SimulatedDevice(CudaDevice):
    """A device whose streams execute nothing before `step`, `run` or a wait."""

    name = "simulated device"

    def __init__(self, choose: Callable[[int], int] = lambda count: 0) -> None:
        self._choose = choose
        self._local = threading.local()
        self._failing: dict[str, int] = {}  # call -> number of successful calls before it fails
        self._lock = threading.RLock()
        self.main = Stream()
        self.streams = [self.main]
        self.registered: dict[int, int] = {}  # address -> bytes
        self.violations: list[str] = []
        self.is_graph = False  # the current stream is being captured
        self._made: dict[int, StorageWeakRef] = {}  # address -> the device's newest tensor there
        self._kept_for: dict[int, list[Stream]] = {}  # address -> streams that may still read the memory there
        self._free: dict[tuple[Stream, int], list[_FreeMemory]] = {}  # stream, bytes -> memory of dead tensors

    # ------------------------------------------------------------ for tests

    def fail(self, call: str, after: int = 0) -> None:
        """Makes a call fail once: register, record, is_done, copy (immediately), work (a copy, while it runs), wait or
        synchronize.
        """
        self._failing[call] = after

    def step(self, number: int = 0) -> bool:
        """Executes one piece of work of a stream that can continue. Returns False if none can."""
        with self._lock:
            ready = [stream for stream in self.streams if stream.can_step]
            if ready:
                ready[number % len(ready)].waiting.popleft()[1]()
            return bool(ready)

    def run(self) -> None:
        """Executes all work."""
        while self.step(self._choose(max(sum(stream.can_step for stream in self.streams), 1))):
            pass

    def read(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns a list to which the current stream appends the tensor's content when it gets there.

        It keeps an address, as a kernel does: the tensor may die before, and its memory may go to another one.
        """
        found: list[torch.Tensor] = []
        address, like = tensor.data_ptr(), torch.empty_like(tensor)

        def look() -> None:
            ctypes.memmove(like.data_ptr(), address, like.nbytes)
            found.append(like)

        self.current_stream().give(look)
        return found

    # ------------------------------------------------------------ the device's interface

    def register(self, address: int, nbytes: int) -> None:
        """Registers memory; see CudaDevice."""
        self._may_fail("register")
        if any(address < begin + length and begin < address + nbytes for begin, length in self.registered.items()):
            raise RuntimeError(f"{nbytes} bytes at {address} are already registered")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        """Unregisters memory; see CudaDevice."""
        if self.registered.pop(address, None) is None:
            raise RuntimeError(f"nothing is registered at {address}")

    def current_streams(self) -> Sequence[Stream]:
        """Returns the current stream in a list; see CudaDevice."""
        if self.is_graph:
            raise RuntimeError("the current stream is capturing a graph")
        return [self.current_stream()]

    def current_stream(self) -> Stream:
        """Returns the current stream; see CudaDevice."""
        return getattr(self._local, "stream", self.main)

    def side_stream(self) -> Stream:
        """Returns a new stream; see CudaDevice."""
        self.streams.append(Stream())
        return self.streams[-1]

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Makes a stream the current one; see CudaDevice."""
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def record(self, stream: Stream) -> Event:
        """Records an event; see CudaDevice."""
        self._may_fail("record")
        event = Event()

        def reach() -> None:
            event.is_done, event.error, stream.error = True, stream.error, None

        stream.give(reach)
        return event

    def is_done(self, event: Event) -> bool:
        """Returns whether an event is done; see CudaDevice."""
        self._may_fail("is_done")
        self._raise_timeout(event)
        return event.is_done

    def wait_on_host(self, event: Event) -> None:
        """Waits for an event; see CudaDevice."""
        self._may_fail("wait")
        while not event.is_done:
            num_ready = sum(stream.can_step for stream in self.streams)
            if not num_ready:
                raise AssertionError("no stream can continue and the event is not done: the wait would never end")
            self.step(self._choose(num_ready))
        self._raise_timeout(event)

    def wait_on_stream(self, stream: Stream, event: Event) -> None:
        """Lets a stream wait for an event; see CudaDevice."""
        stream.give(lambda: None, lambda: event.is_done)

    def synchronize(self) -> None:
        """Waits for all work; see CudaDevice."""
        self._may_fail("synchronize")
        self.run()

    def copy(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Copies a tensor; see CudaDevice."""
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
                self.violations.append(f"a copy of {nbytes} bytes at {address} ran after they were unregistered")
                return
            ctypes.memmove(target.data_ptr(), address, nbytes)

        stream.give(work)
        return target

    def stream_for(self, tensor: torch.Tensor) -> Stream | None:
        """Returns the current stream if the device made the tensor; see CudaDevice."""
        made = self._made.get(tensor.untyped_storage().data_ptr())
        is_gone = made is None or made.expired()  # type: ignore[no-untyped-call]  # torch's own
        return None if is_gone else self.current_stream()

    def is_capturing(self) -> bool:
        """Returns whether a graph is being captured; see CudaDevice."""
        return self.is_graph

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        stream = self.current_stream()
        with self._lock:
            free = self._free.setdefault((stream, like.nbytes), [])
            found = next((each for each in free if all(event.is_done for event in each.events)), None)
            if found is not None:
                free.remove(found)
        memory = np.full(like.nbytes, UNFILLED, np.uint8) if found is None else found.memory
        if found is not None:
            stream.give(lambda: memory.fill(UNFILLED))
        live = memory.view(_LiveMemory)
        weakref.finalize(live, self._release, stream, memory).atexit = False
        target = torch.from_numpy(live).view(like.dtype).view(like.shape) if like.nbytes else torch.empty_like(like)
        weak = StorageWeakRef(target.untyped_storage())  # type: ignore[no-untyped-call]  # torch's own
        self._made[target.data_ptr()] = weak
        return target

    def _release(self, stream: Stream, memory: Any) -> None:
        """Returns the memory of a dead tensor to the pool of its stream."""
        with self._lock:
            events = []
            for other in self._kept_for.pop(memory.ctypes.data, ()):
                events.append(Event())
                other.give(functools.partial(setattr, events[-1], "is_done", True))
            self._free[stream, memory.nbytes].insert(0, _FreeMemory(memory, events))

    def keep_for(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keeps a tensor's memory for a stream; see CudaDevice."""
        with self._lock:
            self._kept_for.setdefault(tensor.untyped_storage().data_ptr(), []).append(stream)

    def _is_registered(self, address: int, nbytes: int) -> bool:
        return any(begin <= address and address + nbytes <= begin + length for begin, length in list(self.registered.items()))

    def _may_fail(self, call: str) -> None:
        num_left = self._failing.get(call)
        if num_left is None:
            return
        if num_left:
            self._failing[call] = num_left - 1
            return
        del self._failing[call]
        raise RuntimeError(f"the simulated device was told to fail at {call}")

    def _raise_timeout(self, event: Event) -> None:
        if event.is_done and event.error is not None:
            text, event.error = event.error, None
            raise RuntimeError(text)
