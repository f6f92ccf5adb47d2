"""Write samples into a growing cache: TFRecord files of a bounded size, whose room is reserved before they are written.

A file is invisible until a rename publishes it. If a writer is killed, its reservation is removed when the next process needs room.
Writing waits while the budget is full of files that epochs read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from shmload.errors import CacheFull
from shmload.formats.atomic_write import AtomicWriter
from shmload.formats.tfrecord.tfrecord_writer import TFRecordWriter
from shmload.growing.cache_file import CONTROL, next_generation, own_name
from shmload.growing.process_report import WriterReport
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.reservation import Reservation
from shmload.storage.room_wait import wait_for_room


@dataclass
class WriterStatistics:
    """The report of a running writer.

    Attributes:
        pid: its process id.
        role: its name in `stats()`.
        num_files, num_records, nbytes: totals of its published files.
        waited_s: seconds that it has waited for room, without a wait in progress.
        is_waiting: whether it is waiting for room.
    """

    pid: int
    role: str
    num_files: int = 0
    num_records: int = 0
    nbytes: int = 0
    waited_s: float = 0.0
    is_waiting: bool = False


class CacheWriter(AtomicWriter):
    """A writer of samples into a cache, created by `SampleCache.writer`. A context manager.

    A file is published when it has `file_nbytes`, or by the first sample written at least `publish_s` after the file's first one;
    `close` publishes the last file. If the block raises, unpublished samples are dropped.

    Args:
        folder: the cache's folder.
        file_nbytes: approximate size of a file.
        publish_s: seconds after a file's first sample from which the next sample publishes the file.
        raw, compression: see TFRecordWriter.
        timeout_s: seconds to wait for room; None for no limit.
        role: the name of this writer in `stats()`.
    Raises:
        ValueError: `compression` is unknown.
    Cost: one copy of each value, and its checksum; one reservation and one rename for each file.
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
        self._is_due = False  # the file must be published before the next sample, because it had no room for its end
        self._generation = 0  # of the file that is being published
        self._began = 0.0  # time of the file's first sample
        self._slack = 0  # the most bytes by which a record exceeded its file
        self._is_closed = False
        self._statistics = WriterStatistics(os.getpid(), role)
        self._report = WriterReport(self._control, "writers")
        self._report.write(asdict(self._statistics))
        self.num_records = 0
        self.num_files = 0

    def write(self, record: Any) -> None:
        """Write one sample: a dict of arrays and texts as a tf.train.Example, bytes unchanged.

        Wait while the budget is full of samples that epochs read.

        Args:
            record: see TFRecordWriter.write. The memory of a numpy array becomes a raw record without an extra copy.
        Raises:
            CacheFull: there was no room within `timeout_s` for this sample, or for earlier samples, which are kept until there is
                room; this sample was not written. Or it is larger than the cache, and was dropped with its file.
            TypeError, ValueError: see TFRecordWriter.write.
        """
        file = self._opened()
        file.write(record)
        self.num_records += 1
        if file.nbytes >= self._file_nbytes or monotonic() - self._began >= self._publish_s:
            try:
                self.publish()
            except CacheFull:
                if self._file is None:
                    raise  # otherwise this record is kept, and the next `write` or `close` raises

    def _opened(self) -> TFRecordWriter:
        if self._is_closed:
            raise ValueError(f"this writer into {self._folder.path} is closed")
        if self._is_due:
            self.publish()
        if self._file is None:
            nbytes = min(self._file_nbytes + self._slack, self._folder.capacity_bytes)
            self._reserved_file = _ReservedFile(self, self._reserved(nbytes))
            self._file = TFRecordWriter(self._reserved_file, compression=self._compression, raw=self._raw)
            self._began = monotonic()
        return self._file

    def _reserved(self, nbytes: int) -> Reservation:
        try:
            return self._folder.reserve(nbytes)
        except CacheFull:
            with self._waiting():
                return self._folder.reserve(nbytes, timeout_s=self._timeout_s)

    def grow(self, reservation: Reservation, nbytes: int) -> None:
        """Reserve more room for a record that exceeds its file.

        Args:
            reservation: the reservation of the file.
            nbytes: additional bytes.
        """
        self._slack = max(self._slack, reservation.nbytes + nbytes - self._file_nbytes)
        try:
            reservation.grow(nbytes)
        except CacheFull:
            with self._waiting():
                reservation.grow(nbytes, timeout_s=self._timeout_s)

    @property
    def is_waiting(self) -> bool:
        """Return whether this writer is waiting for room."""
        return self._statistics.is_waiting

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Report that the writer waits for room while the block runs."""
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
        """Publish the samples written so far, so that the next epoch reads them.

        Raises:
            CacheFull: there was no room within `timeout_s`. Call `publish` again, unless the file is larger than the cache.
        """
        file = self._file
        if file is None:
            return
        if file.num_records:
            self._is_due = True
            try:
                file.finish()
                self._reserved_file.write_overflow()
                take = partial(next_generation, self._control)
                self._generation = wait_for_room(lambda: self._folder.evicting(take, for_file=True), self._timeout_s)
            except BaseException as error:
                if not isinstance(error, CacheFull) or self._reserved_file.needed > self._folder.capacity_bytes:
                    self._file, self._is_due = None, False  # the file will never fit
                    file.abandon()
                raise
        self._file, self._is_due = None, False
        if file.num_records:
            file.close()
        else:  # its only sample could not be encoded
            file.abandon()

    def published_in_time(self) -> float | None:
        """Publish the current file if it is due.

        Returns:
            seconds until the current file is due; None without a file.
        Raises:
            CacheFull: see `publish`.
        """
        if self._file is not None and monotonic() - self._began >= self._publish_s:
            self.publish()
        return None if self._file is None else max(self._began + self._publish_s - monotonic(), 0.0)

    def publish_file(self, reservation: Reservation, num_records: int, nbytes: int) -> None:
        """Publish a complete file under its name.

        Args:
            reservation: the reservation of the file.
            num_records, nbytes: size of the file.
        """
        name = own_name(self._generation, num_records, nbytes, self._compression)
        reservation.publish(name, nbytes=nbytes)
        self.num_files += 1
        statistics = self._statistics
        statistics.num_files += 1
        statistics.num_records += num_records
        statistics.nbytes += nbytes
        self._report.write(asdict(statistics))

    def close(self) -> None:
        """Publish the rest. Idempotent.

        Raises:
            CacheFull: see `publish`. The writer stays open until `close` succeeds or `abandon` is called.
        """
        if not self._is_closed:
            try:
                self.publish()
            finally:
                self._is_closed = self._file is None
                if self._is_closed:
                    self._report.close()

    def abandon(self) -> None:
        """Drop the unpublished samples, and close."""
        self._is_closed = True
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
        self._report.close()

    def __repr__(self) -> str:
        return f"<CacheWriter into {self._folder.path}: {self.num_records} samples in {self.num_files} files>"


class _ReservedFile(os.PathLike[str]):
    """A reservation that a TFRecordWriter writes like a file. Bytes beyond its end stay in memory until `write_overflow`."""

    def __init__(self, owner: CacheWriter, reservation: Reservation) -> None:
        self._owner, self._reservation = owner, reservation
        self.nbytes = 0
        self._late = bytearray()
        self.abandon = reservation.abandon

    def __fspath__(self) -> str:
        return self._reservation.path

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        if self._late or self.nbytes + view.nbytes > self._reservation.nbytes:
            self._late += view
            return
        while view:
            done = os.pwrite(self._reservation.fd, view, self.nbytes)
            self.nbytes += done
            view = view[done:]

    @property
    def needed(self) -> int:
        """Return the size of the whole file in bytes."""
        return self.nbytes + len(self._late)

    def write_overflow(self) -> None:
        """Reserve room for the bytes in memory, and write them.

        Raises:
            CacheFull: the room could not be reserved.
        """
        if (beyond := self.needed - self._reservation.nbytes) > 0:
            self._owner.grow(self._reservation, beyond)
        late, self._late = self._late, bytearray()
        self.write(late)

    def flush(self) -> None: ...  # `write` keeps no buffer, except for bytes that have no room yet

    def publish(self, num_records: int) -> None:
        self._owner.publish_file(self._reservation, num_records, self.nbytes)
