"""What the ring needs of a device, and nothing else. Streams and events are the device's own objects; nobody here looks inside.

A stream does what it is given in turn. An event is recorded behind what its stream has been given so far, and is done when that is.
Every call may raise RuntimeError; an error of work that was given earlier comes out of any later call, as CUDA has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Calls(Protocol):
    """A device, as the ring sees it.

    Attributes:
        name: what messages call it.
    """

    name: str

    def register(self, address: int, nbytes: int) -> None:
        """Pins memory that is mapped already. A copy may not reach across two such pieces."""

    def unregister(self, address: int) -> None:
        """Ends that, for the piece that begins there. Nothing may be copying from it."""

    def current_streams(self) -> Sequence[Any]:
        """This thread's current stream of every device in use: what it copies now is on one of these."""

    def current_stream(self) -> Any:
        """This thread's current stream of the device that batches go to."""

    def side_stream(self) -> Any:
        """A new stream of that device, which runs beside all others."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes a stream this thread's current one in a `with` block."""

    def record(self, stream: Any) -> Any:
        """A new event behind all that the stream has been given."""

    def is_done(self, event: Any) -> bool:
        """Whether it is; never waits."""

    def wait_on_host(self, event: Any) -> None:
        """Returns when the event is done; other threads run meanwhile."""

    def wait_on_stream(self, stream: Any, event: Any) -> None:
        """Has the stream begin nothing given from now on before the event is done."""

    def synchronize(self) -> None:
        """Returns when all that any stream of any device has been given is done."""

    def copy(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor of the device, filled from this one by the current stream, later. Host memory that is not pinned is read now.

        Args:
            into: one that the device made before, to be filled again. None: a new one.
        """

    def apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What a function makes of a tensor of the device, by the current stream, later; `into` as above."""

    def stream_for(self, tensor: torch.Tensor) -> Any | None:
        """This thread's current stream of the device that a tensor lies on; None: it lies on none of this kind."""

    def is_capturing(self) -> bool:
        """Whether what the current stream is given now is kept for replays, and not done."""

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """Once the tensor dies, its memory is used again only when what the stream has been given by then is done."""
