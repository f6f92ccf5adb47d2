"""Writing samples into a growing cache: TFRecord files of a bounded size, each with its room reserved before a byte is written.

A file is seen by nobody until it is published, which is one rename. A writer that is killed leaves a reservation that nobody holds:
the next one that needs room removes it. Where the budget is full of files that epochs are reading, writing waits.

A writer reports what it does, for `stats()` in other processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from shmload.errors import CacheFull
from shmload.formats.tfrecord.files import TFRecordWriter
from shmload.growing.files import CONTROL, Report, next_generation, own_name
from shmload.storage.folder import BudgetedFolder, Reservation


@dataclass
class WriterStatistics:
    """One living writer.

    Attributes:
        waited_s: for room, in all, a wait that still lasts not counted.
        is_waiting: for room, now.
    """

    pid: int
    role: str
    num_files: int = 0
    num_records: int = 0
    nbytes: int = 0
    waited_s: float = 0.0
    is_waiting: bool = False


class CacheWriter:
    """Writes samples into a cache; made by `SampleCache.writer`. A context manager.

    A file is published when it has `file_nbytes`, or when a sample comes `publish_s` after its first, and the last one by `close`.
    If the block raises, what is not published yet is dropped.

    Args:
        folder: the cache's.
        file_nbytes: how large a file becomes, about.
        publish_s: the longest that a sample waits for others before it can be seen.
        raw, compression: as of TFRecordWriter.
        timeout_s: seconds to wait for room; None: as long as it takes.
        role: what `stats()` calls this writer.
    Raises:
        ValueError: `compression` is none of these.
    Cost: one copy of each value, and its checksum; per file one reservation and one rename.
    Thread/process safety: one thread at a time; any number of writers.
    """

    def __init__(
        self,
        folder: BudgetedFolder,
        *,
        file_nbytes: int,
        publish_s: float,
        raw: Iterable[str] = (),
        compression: str | None = None,
        timeout_s: float | None = None,
        role: str = "writer",
    ) -> None:
        if compression not in (None, "gzip", "zlib"):
            raise ValueError(f'compression is None, "gzip" or "zlib"; got {compression!r}')
        self._folder = folder
        self._control = Path(folder.path) / CONTROL
        self._file_nbytes, self._publish_s, self._timeout_s = file_nbytes, publish_s, timeout_s
        self._raw, self._compression = frozenset(raw), compression
        self._file: TFRecordWriter | None = None
        self._began = 0.0  # when the file's first sample came
        self._slack = 0  # the most that a record has gone beyond the end of its file
        self._is_closed = False
        self._statistics = WriterStatistics(os.getpid(), role)
        self._report = Report(self._control, "writers")
        self._report.write(asdict(self._statistics))
        self.num_records = 0
        self.num_files = 0

    def write(self, record: Any) -> None:
        """Writes one sample: a dict of arrays and texts, as a tf.train.Example, or bytes, as they are.

        Waits while the budget is full of samples that epochs are reading.

        Args:
            record: as of TFRecordWriter.write; the memory of a numpy array makes a raw record without a copy of its own.
        Raises:
            CacheFull: there was no room within `timeout_s`, or the sample alone is larger than the cache.
            TypeError, ValueError: as of TFRecordWriter.write.
        """
        file = self._opened()
        file.write(record)
        self.num_records += 1
        if file.nbytes >= self._file_nbytes or monotonic() - self._began >= self._publish_s:
            self.publish()

    def _opened(self) -> TFRecordWriter:
        if self._is_closed:
            raise ValueError(f"this writer into {self._folder.path} is closed")
        if self._file is None:
            nbytes = min(self._file_nbytes + self._slack, self._folder.capacity_bytes)
            file = _ReservedFile(self, self._reserved(nbytes))
            self._file = TFRecordWriter(file, compression=self._compression, raw=self._raw)
            self._began = monotonic()
        return self._file

    def _reserved(self, nbytes: int) -> Reservation:
        try:
            return self._folder.reserve(nbytes)
        except CacheFull:
            with self._waiting():
                return self._folder.reserve(nbytes, timeout_s=self._timeout_s)

    def grow(self, reservation: Reservation, nbytes: int) -> None:
        """Makes room for a record that goes beyond the end of its file.

        Args:
            reservation: of the file.
            nbytes: how many bytes more it needs.
        """
        self._slack = max(self._slack, reservation.nbytes + nbytes - self._file_nbytes)
        try:
            reservation.grow(nbytes)
        except CacheFull:
            with self._waiting():
                reservation.grow(nbytes, timeout_s=self._timeout_s)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Reports that the writer waits for room."""
        statistics, since = self._statistics, monotonic()
        statistics.is_waiting = True
        self._report.write(asdict(statistics))
        try:
            yield
        finally:
            statistics.is_waiting = False
            statistics.waited_s += monotonic() - since
            self._report.write(asdict(statistics))

    def publish(self) -> None:
        """Makes what has been written so far part of the next epoch."""
        file, self._file = self._file, None
        if file is None:
            return
        if not file.num_records:  # its one sample could not be encoded
            file.abandon()
            return
        file.close()

    def publish_file(self, reservation: Reservation, num_records: int, nbytes: int) -> None:
        """Gives a file that is whole its name.

        Args:
            reservation: of the file.
            num_records, nbytes: what was written.
        """
        name = own_name(next_generation(self._control), num_records, nbytes, self._compression)
        reservation.publish(name, nbytes=nbytes)
        self.num_files += 1
        statistics = self._statistics
        statistics.num_files += 1
        statistics.num_records += num_records
        statistics.nbytes += nbytes
        self._report.write(asdict(statistics))

    def close(self) -> None:
        """Publishes what is left. Twice is no error."""
        if not self._is_closed:
            self._is_closed = True
            try:
                self.publish()
            finally:
                self._report.close()

    def abandon(self) -> None:
        """Drops what is not published, and closes."""
        self._is_closed = True
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
        self._report.close()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __repr__(self) -> str:
        return f"<CacheWriter into {self._folder.path}: {self.num_records} samples in {self.num_files} files>"


class _ReservedFile(os.PathLike[str]):
    """A reservation as the file of a TFRecordWriter: reserves more before a record would go beyond its end."""

    def __init__(self, owner: CacheWriter, reservation: Reservation) -> None:
        self._owner, self._reservation = owner, reservation
        self.nbytes = 0
        self.abandon = reservation.abandon

    def __fspath__(self) -> str:
        return self._reservation.path

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        beyond = self.nbytes + view.nbytes - self._reservation.nbytes
        if beyond > 0:
            self._owner.grow(self._reservation, beyond)
        while view:
            done = os.pwrite(self._reservation.fd, view, self.nbytes)
            self.nbytes += done
            view = view[done:]

    def flush(self) -> None: ...

    def publish(self, num_records: int) -> None:
        self._owner.publish_file(self._reservation, num_records, self.nbytes)
