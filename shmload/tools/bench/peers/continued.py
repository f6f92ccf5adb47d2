"""A pipeline that runs on from epoch to epoch, for peers that would begin anew: what comes of it is cut into epochs."""

from collections.abc import Iterator
from typing import Any


class Continued:
    """Batches of one stream, `num_batches` an epoch; a subclass says how the stream is opened and ended."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.stream: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.stream is None:
            self.stream = self.open()
        for _ in range(self.num_batches):
            yield next(self.stream)

    def open(self) -> Iterator[Any]:
        """The endless stream of batches."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the stream."""
        if self.stream is not None:
            close = getattr(self.stream, "close", None)
            if close is not None:
                close()
            self.stream = None
