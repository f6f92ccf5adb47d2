"""What lies in a cache's folder, and what the names there say.

    g<generation>-<records>-<bytes>.tfrecord[.gz|.zz]   published by a writer; whole, or the size differs from what the name says
    .growing/                                           what processes write for each other; nothing that a listing needs
    .<anything>                                         nobody's samples
    <anything else>                                     dropped in by somebody: looked at before it is believed (files.py)

A generation is a number of its own for every file published, greater for a later one.

Files that turned out to be damaged while an epoch read them.

.growing/bad/<sum of the name>.json   which, and how: every later snapshot of any run leaves it out, unless it changes

Which files an epoch reads, frozen.

An index of an epoch's sample is `epoch << EPOCH_SHIFT | record`, where records are counted through the snapshot's files. So an
order alone says which snapshot it is of, and the sample's randomness is new in each epoch.

Files that somebody dropped into the folder: are they whole, are they TFRecords, how many records are in them.

A file that is still being written is left for the next epoch. Linux says whether anyone has it open for writing: a read lease
(fcntl(2), F_SETLEASE) is refused then. Where leases are not known (a network's file system, another owner's file) it must have been
left alone for SETTLE_S instead. A file that then turns out to be torn or damaged is left out for good, unless it changes.

Every byte is summed here once, so that a bad one never comes into an epoch. What was found is kept, for other processes and later
runs, by name, size and time.

Writing samples into a growing cache: TFRecord files of a bounded size, each with its room reserved before a byte is written.

A file is seen by nobody until it is published, which is one rename. A writer that is killed leaves a reservation that nobody holds:
the next one that needs room removes it. Where the budget is full of files that epochs are reading, writing waits.

A writer reports what it does, for `stats()` in other processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmload._core.crc32c import crc32c, masked
from shmload._core.records import RecordReader
from shmload.errors import CacheFull, ShardCorrupt
from shmload.formats.paths import AtomicWriter, write_if_possible
from shmload.formats.tfrecord import Offsets, RecordFile, TFRecordWriter, error_of, fields_of
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.file_locks import KeptFile, is_locked, try_lock
from shmload.storage.reservation import Reservation
from shmload.storage.room_wait import repeated

CONTROL = ".growing"
ENDINGS = {None: "", "gzip": ".gz", "zlib": ".zz"}
_OWN = re.compile(r"g(\d{12})-(\d+)-(\d+)\.tfrecord(?:\.gz|\.zz)?")


class CacheFile(NamedTuple):
    """A file of samples, as a listing or a snapshot knows it."""

    name: str
    num_records: int
    nbytes: int
    mtime_ns: int

    @property
    def generation(self) -> int:
        """Of a file that a writer published; -1 of one that somebody dropped in."""
        return -1 if (found := _OWN.fullmatch(self.name)) is None else int(found[1])

    def is_replaced(self, status: os.stat_result) -> bool:
        """Whether another file lies under its name now. No writer gives a name twice, and its file may have been copied."""
        return self.generation < 0 and (self.nbytes, self.mtime_ns) != (status.st_size, status.st_mtime_ns)


def own_name(generation: int, num_records: int, nbytes: int, compression: str | None) -> str:
    """The name that a writer publishes a file under."""
    return f"g{generation:012d}-{num_records}-{nbytes}.tfrecord{ENDINGS[compression]}"


def read_own_name(name: str) -> tuple[int, int] | None:
    """(records, bytes) that a writer's file has; None: a writer gives no such names."""
    found = _OWN.fullmatch(name)
    return None if found is None else (int(found[2]), int(found[3]))


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """A descriptor of a file, made if it is not there, that one process at a time has."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def next_generation(control: Path) -> int:
    """A number that no other call gives, and that is greater than any given before.

    A writer that is killed here leaves a gap, or the number it was about to take.
    """
    with locked(control / "generation") as fd:
        generation = int(os.pread(fd, 20, 0) or b"0") + 1
        os.pwrite(fd, b"%020d" % generation, 0)
        return generation


def newest_generation(control: Path) -> int:
    """How many files have been published since the cache was made."""
    try:
        return int((control / "generation").read_bytes() or b"0")
    except FileNotFoundError:
        return 0


class WriterReport:
    """What a process says of itself to `stats()` elsewhere: .growing/<kind>/<pid>-<word>.json, written anew with each change.

    It counts as long as its process holds a lock on the file beside it, .../<pid>-<word>.lock: a pid means another process in
    another container, and another one later.
    """

    def __init__(self, control: Path, kind: str) -> None:
        self._pid = os.getpid()
        self.path = control / kind / f"{self._pid}-{secrets.token_hex(4)}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unlocked = self.path.with_name(f".{self.path.name}")  # under its own name it would be taken for a dead one's
        self._lock = KeptFile(os.fspath(unlocked))
        try_lock(self._lock.fd)
        unlocked.rename(self.path.with_suffix(".lock"))

    def write(self, what: Any) -> None:
        """Says this; nothing in a forked copy."""
        if self._pid == os.getpid():
            write_if_possible(self.path, json.dumps(what).encode())

    def close(self) -> None:
        """Says nothing any more. Twice is no error."""
        if self._pid == os.getpid():
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".lock").unlink(missing_ok=True)
            self._lock.close()


def reports(control: Path, kind: str) -> Iterator[tuple[int, Any]]:
    """What living processes say of themselves, each with its id. Removes what dead ones have left."""
    for lock in sorted((control / kind).glob("[!.]*.lock")):
        path = lock.with_suffix(".json")
        if is_locked(os.fspath(lock)):
            with suppress(FileNotFoundError):  # it has just ended, or said nothing yet
                yield int(path.name.split("-")[0]), json.loads(path.read_bytes())
        else:
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)


BAD = "bad"
log = logging.getLogger("shmload")


def report_bad(folder: Path, name: str, text: str, ctime_ns: int) -> None:
    """Says that a file is damaged: until it changes it stays out of every later snapshot, and is listed in `stats()`.

    Args:
        ctime_ns: when it last changed. Its time of writing would not do: who copies a good one there may keep that.
    """
    path = folder / CONTROL / BAD / f"{crc32c(name.encode()):08x}.json"
    if name not in reported_bad(folder):
        log.warning("%s; it is left out of later epochs", text)
        write_if_possible(path, json.dumps({"name": name, "text": text, "ctime_ns": ctime_ns}).encode())


def reported_bad(folder: Path) -> dict[str, str]:
    """Files that were found damaged while they were read, as they lie there still, and how."""
    found = {}
    for path in (folder / CONTROL / BAD).glob("*.json"):
        with suppress(OSError, ValueError, KeyError):
            one = json.loads(path.read_bytes())
            if os.stat(folder / one["name"]).st_ctime_ns == one["ctime_ns"]:
                found[one["name"]] = one["text"]
    return found


EPOCH_SHIFT = 40
MAX_EPOCH = (1 << (63 - EPOCH_SHIFT)) - 1
_VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """The files of an epoch, oldest first, as they were when it was frozen."""

    epoch: int
    files: tuple[CacheFile, ...]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """How many records there are up to and with each file."""
        return np.cumsum([file.num_records for file in self.files], dtype=np.int64)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """How many records there are before each file."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def n(self) -> int:
        """Samples."""
        return int(self.ends[-1]) if self.files else 0

    @cached_property
    def digest(self) -> str:
        """Tells snapshots apart."""
        return hashlib.blake2b(self.dumps(), digest_size=8).hexdigest()

    def place(self, record: int) -> tuple[str, int]:
        """The file that holds a record, and which of its records it is."""
        file = int(np.searchsorted(self.ends, record, "right"))
        return self.files[file].name, record - int(self.starts[file])

    def dumps(self) -> bytes:
        """As a file of its own, the same bytes for the same snapshot."""
        return json.dumps({"version": _VERSION, "epoch": self.epoch, "files": self.files}).encode()


def snapshot_path(run: Path, epoch: int) -> Path:
    """Where a run's snapshot of an epoch lies."""
    return run / f"epoch-{epoch}.json"


def read_snapshot(path: Path) -> Snapshot | None:
    """The snapshot in a file; None: there is none.

    Raises:
        ShardCorrupt: it is damaged.
    """
    try:
        found = json.loads(path.read_bytes())
        if found["version"] != _VERSION:
            raise ValueError(f"it has version {found['version']}, this shmload reads {_VERSION}")
        return Snapshot(found["epoch"], tuple(CacheFile(*file) for file in found["files"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ShardCorrupt(f"{path}: is no snapshot of a growing cache: {error}") from error


@dataclass(frozen=True)
class Gone:
    """A snapshot of which some files are there no more, and which samples stand in for theirs."""

    snapshot: Snapshot
    is_gone: tuple[bool, ...]  # [file]

    @cached_property
    def num_samples(self) -> int:
        """That are gone."""
        return sum(file.num_records for file, gone in zip(self.snapshot.files, self.is_gone, strict=True) if gone)

    @cached_property
    def _counts(self) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Whether each file is gone; how many records before it are; how many up to and with it are not."""
        gone, counts = np.array(self.is_gone), self.snapshot.ends - self.snapshot.starts
        lost = np.where(gone, counts, 0)
        return gone, np.cumsum(lost) - lost, np.cumsum(counts - lost)

    def mask(self, records: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which records are gone."""
        gone: NDArray[np.bool_] = self._counts[0][np.searchsorted(self.snapshot.ends, records, "right")]
        return gone

    def substituted(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """The records, with others of the snapshot in place of those that are gone: the k-th of these by the k-th that is there."""
        gone, lost_before, there = self._counts
        files = np.searchsorted(self.snapshot.ends, records, "right")
        rank = (lost_before[files] + records - self.snapshot.starts[files]) % there[-1]
        stand_in = np.searchsorted(there, rank, "right")
        before = there[stand_in] - (self.snapshot.ends - self.snapshot.starts)[stand_in]
        return np.where(gone[files], self.snapshot.starts[stand_in] + rank - before, records)


MAX_INFLATED_BYTES = 1 << 34
SETTLE_S = 5.0
_LONG = 16384  # bytes from which a survey leaves the sum of a record to whoever copies it
_AT_ONCE = 8192  # records surveyed together
_FIELDS = fields_of({"bytes": bytes}, {}, None)

Found = int | str  # how many records a file holds, or why it cannot be used


class WalkedFile(RecordFile):
    """A file whose records are looked for once in each process: that costs less than an index beside each file of a budget."""

    _offsets: Offsets | None = None

    def offsets(self) -> Offsets:
        """Where records begin."""
        if self._offsets is None:
            self._offsets = self._walked()
        return self._offsets


class Intake:
    """What is known of the files that no writer of ours has published.

    Args:
        path: of the file that keeps it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[int, int, Found]] = {}  # name -> size, time, what was found
        self._kept = b""

    def load(self) -> None:
        """Takes over what another process, or an earlier run, has found."""
        with suppress(OSError, ValueError, TypeError):  # nothing is kept yet, or not by us: it is found again
            kept = self._path.read_bytes()
            if kept != self._kept:
                self._known.update({name: (size, at, found) for name, (size, at, found) in json.loads(kept).items()})
                self._kept = kept

    def keep(self, names: set[str]) -> None:
        """Tells others what is known of these files, and forgets all others."""
        self._known = {name: known for name, known in self._known.items() if name in names}
        kept = json.dumps(self._known, sort_keys=True).encode()
        if kept != self._kept and (self._known or self._kept):
            write_if_possible(self._path, kept)
            self._kept = kept

    @property
    def bad(self) -> dict[str, str]:
        """Files that cannot be used, and why."""
        return {name: found for name, (_, _, found) in self._known.items() if isinstance(found, str)}

    def known(self, name: str, status: os.stat_result) -> Found | None:
        """What was found in a file, if it is as it was then."""
        size, at, found = self._known.get(name, (-1, -1, 0))
        return found if (size, at) == (status.st_size, status.st_mtime_ns) else None

    def look(self, path: Path, status: os.stat_result) -> Found | None:
        """Looks into a file; None if it is still being written."""
        if self.is_being_written(path, status):
            return None
        found: Found
        try:
            found = count_records(os.fspath(path))
        except (ShardCorrupt, OSError) as error:
            found = str(error)
        if _identity(path) != (status.st_ino, status.st_size, status.st_mtime_ns):
            return None
        self._known[path.name] = (status.st_size, status.st_mtime_ns, found)
        return found

    def is_being_written(self, path: Path, status: os.stat_result) -> bool:
        """Whether a file may still change."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return True
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return False
        except BlockingIOError:
            return True
        except OSError:  # no leases here
            return time.time() - status.st_mtime < SETTLE_S
        finally:
            os.close(fd)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def count_records(path: str) -> int:
    """How many records a TFRecord file holds, all of whose sums are right.

    Raises:
        ShardCorrupt: it is torn or damaged, or no such file, or holds nothing; says where.
    """
    file = WalkedFile(path, "auto", MAX_INFLATED_BYTES)
    offsets = file.offsets()
    num_records = len(offsets) - 1
    if not num_records:
        raise ShardCorrupt(f"{path}: holds no record")
    fields = [field.native() for field in _FIELDS]
    reader = RecordReader(
        [file.data], [file.state], np.array([num_records], np.int64), np.ascontiguousarray(offsets[:-1]), fields, 0, 2
    )
    for first in range(0, num_records, _AT_ONCE):
        survey = reader.survey(np.arange(first, min(first + _AT_ONCE, num_records), dtype=np.int64))
        if survey.problem is not None:
            raise error_of(survey.problem, _FIELDS, [path], [file.nbytes], num_records)
    for record in np.flatnonzero(np.diff(offsets) >= _LONG).tolist():
        start, end = int(offsets[record]), int(offsets[record + 1])
        stored = int.from_bytes(file.data[end - 4 : end], "little")
        if masked(crc32c(file.data[start + 12 : end - 4])) != stored:
            raise ShardCorrupt(
                f"{path}: record {record}, which starts at byte {start}: corrupted: the checksum of its data differs"
            )
    return num_records


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


class CacheWriter(AtomicWriter):
    """Writes samples into a cache; made by `SampleCache.writer`. A context manager.

    A file is published when it has `file_nbytes`, or when a sample comes `publish_s` after its first, and the last one by `close`.
    If the block raises, what is not published yet is dropped.

    Args:
        folder: the cache's.
        file_nbytes: how large a file becomes, about.
        publish_s: seconds after a file's first sample from which the next one has it published.
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
        self._is_due = False  # to be published before anything else: there was no room for its end
        self._began = 0.0  # when the file's first sample came
        self._slack = 0  # the most that a record has gone beyond the end of its file
        self._is_closed = False
        self._statistics = WriterStatistics(os.getpid(), role)
        self._report = WriterReport(self._control, "writers")
        self._report.write(asdict(self._statistics))
        self.num_records = 0
        self.num_files = 0

    def write(self, record: Any) -> None:
        """Writes one sample: a dict of arrays and texts, as a tf.train.Example, or bytes, as they are.

        Waits while the budget is full of samples that epochs are reading.

        Args:
            record: as of TFRecordWriter.write; the memory of a numpy array makes a raw record without a copy of its own.
        Raises:
            CacheFull: there was no room within `timeout_s`, or for what was written before, which is kept until there is: this one
                was not taken. Or it is larger than the cache, and dropped with the file that it would have been in.
            TypeError, ValueError: as of TFRecordWriter.write.
        """
        file = self._opened()
        file.write(record)
        self.num_records += 1
        if file.nbytes >= self._file_nbytes or monotonic() - self._began >= self._publish_s:
            try:
                self.publish()
            except CacheFull:
                if self._file is None:
                    raise  # else this record is taken, and the next one, or `close`, says so

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

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for room, now."""
        return self._statistics.is_waiting

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
        """Makes what has been written so far part of the next epoch.

        Raises:
            CacheFull: there was no room within `timeout_s`; it can be called again, unless the file is larger than the cache.
        """
        file = self._file
        if file is None:
            return
        if file.num_records:
            self._is_due = True
            try:
                file.finish()
                self._reserved_file.settle()
            except BaseException as error:
                if not isinstance(error, CacheFull) or self._reserved_file.needed > self._folder.capacity_bytes:
                    self._file, self._is_due = None, False  # it cannot be had later either
                    file.abandon()
                raise
        self._file, self._is_due = None, False
        if file.num_records:
            file.close()
        else:  # its one sample could not be encoded
            file.abandon()

    def published_in_time(self) -> float | None:
        """Publishes what is due.

        Returns:
            seconds until what is there will be due; None: nothing is there.
        Raises:
            CacheFull: as of `publish`.
        """
        if self._file is not None and monotonic() - self._began >= self._publish_s:
            self.publish()
        return None if self._file is None else self._began + self._publish_s - monotonic()

    def publish_file(self, reservation: Reservation, num_records: int, nbytes: int) -> None:
        """Gives a file that is whole its name.

        Args:
            reservation: of the file.
            num_records, nbytes: what was written.
        """
        folder = self._folder
        generation = repeated(lambda: folder.evicting(partial(next_generation, self._control)), self._timeout_s)
        name = own_name(generation, num_records, nbytes, self._compression)
        reservation.publish(name, nbytes=nbytes)
        self.num_files += 1
        statistics = self._statistics
        statistics.num_files += 1
        statistics.num_records += num_records
        statistics.nbytes += nbytes
        self._report.write(asdict(statistics))

    def close(self) -> None:
        """Publishes what is left. Twice is no error.

        Raises:
            CacheFull: as of `publish`; the writer stays open, and is closed once there is room, or by `abandon`.
        """
        if not self._is_closed:
            try:
                self.publish()
            finally:
                self._is_closed = self._file is None
                if self._is_closed:
                    self._report.close()

    def abandon(self) -> None:
        """Drops what is not published, and closes."""
        self._is_closed = True
        file, self._file = self._file, None
        if file is not None:
            file.abandon()
        self._report.close()

    def __repr__(self) -> str:
        return f"<CacheWriter into {self._folder.path}: {self.num_records} samples in {self.num_files} files>"


class _ReservedFile(os.PathLike[str]):
    """A reservation as the file of a TFRecordWriter. What goes beyond its end is kept in memory until there is room."""

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
        """Bytes of all of it."""
        return self.nbytes + len(self._late)

    def settle(self) -> None:
        """Reserves more for what is in memory, and writes it.

        Raises:
            CacheFull: there is no room for it.
        """
        if (beyond := self.needed - self._reservation.nbytes) > 0:
            self._owner.grow(self._reservation, beyond)
        late, self._late = self._late, bytearray()
        self.write(late)

    def flush(self) -> None: ...

    def publish(self, num_records: int) -> None:
        self._owner.publish_file(self._reservation, num_records, self.nbytes)
