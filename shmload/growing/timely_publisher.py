"""`TimelyPublisher`: publish a sampler's file in time, in a thread."""

from __future__ import annotations

from threading import Event, Lock, Thread
from time import sleep

from shmload.growing.cache_writer import CacheWriter

_LONGEST_S = 3600.0  # longest single sleep, because `publish_s` may be infinite


class TimelyPublisher:
    """A thread that publishes a sampler's file when it is due, however long the next sample takes.

    Args:
        writer: the sampler's writer.
    Attributes:
        turn: the lock of the writer; hold it while you use the writer.
    """

    def __init__(self, writer: CacheWriter) -> None:
        self.turn = Lock()
        self._writer, self._has_written = writer, Event()
        self._failure: Exception | None = None
        Thread(target=self._run, daemon=True).start()

    def written(self) -> None:
        """Record that a sample was written.

        Raises:
            Exception: an earlier sample could not be published.
        """
        if self._failure is not None:
            raise self._failure
        if not self._has_written.is_set():
            self._has_written.set()

    def _run(self) -> None:
        while self._has_written.wait():
            try:
                with self.turn:
                    left_s = self._writer.published_in_time()
                    if left_s is None:
                        self._has_written.clear()
            except Exception as error:
                self._failure = error
                return
            sleep(min(left_s or 0, _LONGEST_S))
