"""A log of the requests to a device that can be saved, compared between devices and replayed (device_replay.py).

The file is JSON lines: a line about the log's origin, then a line for each request. A request is the name of a call and its
arguments. Streams, events, pieces of pinned memory and tensors are numbered in the order in which they appear. A request precedes
those of later calls in any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from shmload.device.cuda import CudaDevice

VERSION = 1
Entry = tuple[Any, ...]


class Logged(CudaDevice):
    """A device that logs its requests: `log` has a tuple for each call.

    Attributes:
        log: ("register", nbytes, piece), ("unregister", nbytes, piece), ("side_stream", stream), ("record", stream, event),
            ("is_done", event, answer), ("wait_on_host", event), ("wait_on_stream", stream, event), ("synchronize",),
            ("copy", shape, dtype, stream, tensor, piece or -1, offset in it, into) and ("keep_for", shape, stream, tensor). A
            tensor that is filled again gets a new number; `into` is its previous one, or -1, as it is in a loader's requests.
    """

    def __init__(self, calls: CudaDevice) -> None:
        self._calls = calls
        self._numbers: dict[Any, int] = {}
        self._kept: list[Any] = []  # keeps numbered objects alive
        self._pieces: dict[int, tuple[int, int]] = {}  # address -> (number, bytes)
        self._num_pieces = self._num_tensors = 0
        self._tensors: dict[int, int] = {}  # address -> number of the newest tensor there
        self.name = calls.name
        self.log: list[Entry] = []

    def save(self, path: Path, **origin: Any) -> None:
        """Writes the log to a file.

        Args:
            origin: the origin of the log, for the first line.
        """
        lines = [{"version": VERSION, "device": self.name, **origin}, *self.log]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def _number(self, thing: Any) -> int:
        identity = getattr(thing, "cuda_stream", None)
        key = ("object", id(thing)) if identity is None else ("stream", identity)
        if key not in self._numbers:
            self._kept.append(thing)
        return self._numbers.setdefault(key, len(self._numbers))

    def _made(self, tensor: torch.Tensor) -> int:
        self._num_tensors += 1
        self._tensors[tensor.data_ptr()] = self._num_tensors - 1
        return self._num_tensors - 1

    def _place(self, address: int) -> tuple[int, int]:
        for begin, (piece, nbytes) in self._pieces.items():
            if begin <= address < begin + nbytes:
                return piece, address - begin
        return -1, 0

    def register(self, address: int, nbytes: int) -> None:
        """Forwards the call; a refused registration is not logged."""
        self._calls.register(address, nbytes)
        self._pieces[address] = (self._num_pieces, nbytes)
        self.log.append(("register", nbytes, self._num_pieces))
        self._num_pieces += 1

    def unregister(self, address: int) -> None:
        """Forwards the call."""
        piece, nbytes = self._pieces.pop(address)
        self.log.append(("unregister", nbytes, piece))
        self._calls.unregister(address)

    def current_streams(self) -> Sequence[Any]:
        """Forwards the call."""
        return self._calls.current_streams()

    def current_stream(self) -> Any:
        """Forwards the call."""
        return self._calls.current_stream()

    def side_stream(self) -> Any:
        """Forwards the call."""
        stream = self._calls.side_stream()
        self.log.append(("side_stream", self._number(stream)))
        return stream

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Forwards the call."""
        return self._calls.using(stream)

    def record(self, stream: Any) -> Any:
        """Forwards the call."""
        event = self._calls.record(stream)
        self.log.append(("record", self._number(stream), self._number(event)))
        return event

    def is_done(self, event: Any) -> bool:
        """Forwards the call."""
        answer = self._calls.is_done(event)
        self.log.append(("is_done", self._number(event), answer))
        return answer

    def wait_on_host(self, event: Any) -> None:
        """Forwards the call."""
        self._calls.wait_on_host(event)
        self.log.append(("wait_on_host", self._number(event)))

    def wait_on_stream(self, stream: Any, event: Any) -> None:
        """Forwards the call."""
        self.log.append(("wait_on_stream", self._number(stream), self._number(event)))
        self._calls.wait_on_stream(stream, event)

    def synchronize(self) -> None:
        """Forwards the call."""
        self._calls.synchronize()
        self.log.append(("synchronize",))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Forwards the call."""
        made = self._calls.copy(tensor)
        stream = self._number(self._calls.current_stream())
        place = self._place(tensor.data_ptr())
        self.log.append(("copy", tuple(tensor.shape), str(tensor.dtype), stream, self._made(made), *place, -1))
        return made

    def is_capturing(self) -> bool:
        """Forwards the call."""
        return self._calls.is_capturing()

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Forwards the call."""
        self.log.append(("keep_for", tuple(tensor.shape), self._number(stream), self._tensors.get(tensor.data_ptr(), -1)))
        self._calls.keep_for(tensor, stream)


def load_log(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """Reads a file that `save` wrote. Returns the content of its first line, and the requests.

    Raises:
        ValueError: the file has another version.
    """
    origin, *entries = (json.loads(line) for line in path.read_text().splitlines())
    if origin.get("version") != VERSION:
        raise ValueError(f"{path} is a device log of version {origin.get('version')}; this reads version {VERSION}")
    return origin, [tuple(entry) for entry in entries]
