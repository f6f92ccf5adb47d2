"""Replays the log of a device on the simulated device, to check that the answers were possible and the requests safe.

The log is replayed once for each copy. Every stream then works as early as possible, except that this copy is delayed until the
log proves it done: an event after it was seen to be done. In one more replay, only streams that copy work early, and all others
do only what is proven. Before each copy from pinned memory the memory is overwritten, as by a worker; memory named by `keep_for`
is read on that stream. So a slot that is reused too early, memory that is unregistered during a copy, and a stream that does not
wait all show as wrong bytes or as a copy from unregistered memory. The answers are possible if an event that was done stays done,
and the events recorded before it on its stream are done, too.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from tests.simulated_device.device import Event, SimulatedDevice, Stream
from tests.simulated_device.device_log import Entry


def replay(entries: Iterable[Entry]) -> list[str]:
    """Returns the errors of a log, each with the number of its entry; an empty list means that the device was used correctly."""
    entries = list(entries)
    found: dict[str, None] = {}
    works = [number for number, entry in enumerate(entries) if entry[0] == "copy"]
    for held_back in (None, *works):
        replaying = _Replay(held_back)
        for number, (name, *arguments) in enumerate(entries):
            replaying.at = number
            try:
                getattr(replaying, f"_{name}")(*arguments)
            except KeyError as error:
                replaying.add_finding(f"{name} uses {error.args[0]}, which no earlier entry has made")
            replaying.advance()
        replaying.finish()
        found.update(dict.fromkeys(replaying.found))
    return list(found)


class _Numbered(dict[Any, Any]):
    """A dict whose KeyError names the kind of the missing number."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __missing__(self, number: int) -> Any:
        raise KeyError(f"{self._kind} {number}")


class _Replay:
    def __init__(self, held_back: int | None) -> None:
        self.at = 0
        self._held_back = held_back  # the entry of a copy, or None for all streams that do not copy
        self._held: object = None  # the held copy's work in its stream
        self._side_streams: set[int] = set()
        self.found: list[str] = []
        self._device = SimulatedDevice()
        self._streams: dict[int, Stream] = {}
        self._waits: dict[int, list[int]] = defaultdict(list)  # stream -> events that it must wait for
        self._events: dict[int, tuple[int, int, Event]] = _Numbered("event")  # -> (stream, position on it, event)
        self._recorded: dict[int, int] = defaultdict(int)  # stream -> events on it
        self._done: dict[int, int] = defaultdict(lambda: -1)  # stream -> the last position that was seen to be done
        self._pieces: dict[int, torch.Tensor] = _Numbered("piece")
        self._tensors: dict[int, tuple[torch.Tensor, int]] = _Numbered("tensor")  # -> (tensor, expected byte)
        self._reads: list[tuple[int, int, list[torch.Tensor], int]] = []  # (entry, stream, content, expected byte)

    def add_finding(self, text: str) -> None:
        self.found.append(f"entry {self.at}: {text}")

    def advance(self) -> None:
        """Lets the streams that are not held back work as far as they can."""
        for number, stream in self._streams.items():
            while stream.can_step and self._may_advance(number):
                stream.waiting.popleft()[1]()

    def _may_advance(self, number: int) -> bool:
        if self._held_back is None:
            return number in self._side_streams
        return self._streams[number].waiting[0] is not self._held

    def _note_work(self, stream: int) -> None:
        if self.at == self._held_back:
            self._held = self._streams[stream].waiting[-1]

    def finish(self) -> None:
        """Executes the remaining work and checks what was read."""
        while self._device.step():
            self.advance()
        for at, stream, found, byte in self._reads:
            self.at = at
            if not found:
                self.add_finding(f"stream {stream} waits for an event that never happens")
            elif not bool((found[0] == byte).all()):
                self.add_finding(f"stream {stream} reads the bytes of another batch, or reads too early")
        self.found += [re.sub(r" at \d+", " from a piece", text) for text in self._device.violations]  # addresses differ

    def _stream(self, number: int) -> Stream:
        if number not in self._streams:
            self._streams[number] = self._device.side_stream()
        return self._streams[number]

    def _reach(self, number: int) -> None:
        """Executes what an event needs, and nothing else."""
        number_of_stream, place, event = self._events[number]
        stream = self._streams[number_of_stream]
        while not event.is_done:
            if stream.can_step:
                stream.waiting.popleft()[1]()
            else:
                self._reach(next(other for other in self._waits[number_of_stream] if not self._events[other][2].is_done))
        self._done[number_of_stream] = max(self._done[number_of_stream], place)

    # ------------------------------------------------------------ the calls

    def _register(self, nbytes: int, piece: int) -> None:
        memory = self._pieces[piece] = torch.zeros(nbytes, dtype=torch.uint8)
        self._device.register(memory.data_ptr(), nbytes)

    def _unregister(self, nbytes: int, piece: int) -> None:
        memory = self._pieces[piece]
        if memory.nbytes != nbytes:
            self.add_finding(f"piece {piece} has {memory.nbytes} bytes, but {nbytes} are unregistered")
        try:
            self._device.unregister(memory.data_ptr())
        except RuntimeError:
            self.add_finding(f"piece {piece} is unregistered twice")

    def _side_stream(self, stream: int) -> None:
        self._stream(stream)
        self._side_streams.add(stream)

    def _record(self, stream: int, event: int) -> None:
        self._events[event] = (stream, self._recorded[stream], self._device.record(self._stream(stream)))
        self._recorded[stream] += 1

    def _is_done(self, event: int, answer: bool) -> None:
        stream, place, _ = self._events[event]
        if answer:
            self._reach(event)
        elif place <= self._done[stream]:
            self.add_finding(f"event {event} is not done although it, or a later one on its stream, was done before")

    def _wait_on_host(self, event: int) -> None:
        self._reach(event)

    def _wait_on_stream(self, stream: int, event: int) -> None:
        self._device.wait_on_stream(self._stream(stream), self._events[event][2])
        self._waits[stream].append(event)

    def _synchronize(self) -> None:
        self._device.run()
        for stream, count in self._recorded.items():
            self._done[stream] = count - 1

    def _copy(self, shape: list[int], dtype: str, stream: int, tensor: int, piece: int, offset: int, into: int) -> None:
        nbytes, byte = _nbytes(shape, dtype), self.at % 251
        memory = torch.zeros(nbytes, dtype=torch.uint8) if piece < 0 else self._pieces[piece][offset : offset + nbytes]
        if memory.nbytes < nbytes:
            self.add_finding(f"a copy of {nbytes} bytes at {offset} of piece {piece} exceeds it")
        memory.fill_(byte)
        with self._device.using(self._stream(stream)):
            self._tensors[tensor] = (self._device.copy(memory, self._target(into)), byte)
        self._note_work(stream)

    def _target(self, into: int) -> torch.Tensor | None:
        return None if into < 0 else self._tensors[into][0]

    def _keep_for(self, shape: list[int], stream: int, tensor: int) -> None:
        values, byte = self._tensors[tensor]
        with self._device.using(self._stream(stream)):
            self._reads.append((self.at, stream, self._device.read(values), byte))


def _nbytes(shape: list[int], dtype: str) -> int:
    itemsize: int = getattr(torch, dtype.removeprefix("torch.")).itemsize
    return math.prod(shape) * itemsize
