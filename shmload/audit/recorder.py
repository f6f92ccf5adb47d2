"""What a loader remembers of its deliveries: the newest order always, all of them in a file if there is an audit.

Every record is one write() to a file of this process's own, so nothing is lost when the trainer is killed; nothing is synced to the
disk, so a machine that loses power may lose the last seconds. The file is made at the first delivery, or a pass's end, with the
modes that the user's umask says: like a log or a checkpoint, it is for the people who look after the run.

When a record cannot be written (a full disk), training goes on: one warning, and another try with every batch. What was not
recorded is not proven, so `shmload verify` reports it as missing, with the reason if a later record could be written.

The audit file: what one process start of one rank was delivered, in the order it was delivered.

    shmaudit 1 <crc32 of the JSON, 8 hex digits> {JSON: which loader, which rank}
    <crc32 of the JSON> {"kind": ..., ...}
    ...

A line is a record; its JSON has a kind. A "batch" has time_ns, epoch, step, valid (rows that are no padding), digest,
is_partial, the keys (a base64 text of int64, or a list where a key is no such number) and the changes. "pass" begins one, "end": it
came to its end, "resume": a state was loaded (`beyond`: later steps that had come before their turn), "lost": records that could
not be written.

Every line is written by one write(), so what kill -9 leaves is a whole number of lines or one that is cut (*torn*), which is no
damage. Anything else that does not fit is reported with its offset; nothing here is ever executed or unpickled.

64 bits that stand for the content of a delivered batch.

The batch is walked in its own order. Every array gives its type, shape and the XXH64 of its elements in C order, so strides and
where the memory lies make no difference; numbers, text and containers give themselves. All of that is hashed once more. What has no
bytes of its own (a lambda, a C object) gives only its type, and the digest says so: it is then *partial*. Nothing is pickled: a
pickle depends on which of its parts happen to be the same object.

Cost: one read of the arrays at memory speed, without the GIL, and about 2 us per array; arrays with gaps are copied first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import secrets
import struct
import sys
import warnings
import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from time import time_ns
from types import FunctionType, ModuleType
from typing import Any, cast, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

import shmload
from shmload._core.digest import hash_at, hash_bytes
from shmload._core.trainer import Order
from shmload.engine.config import LoaderConfig
from shmload.engine.outcome import NOTHING
from shmload.processes import private_fds
from shmload.schedule.any_schedule import SCHEDULE_VERSION
from shmload.schedule.keyed_batches import BatchSchedule
from shmload.schedule.schedule import Schedule
from shmload.world import package_ability, rank_and_world_size

_NAMES_ONLY = (type, FunctionType, ModuleType)  # their attributes are no data
_EXACT = {int: int.__int__, float: float.__float__, complex: complex.__complex__, str: str.__str__}  # of a subclass's value


class _Plain:
    """Whose objects hold nothing beside their attributes."""


def digest_of(batch: Any) -> tuple[int, bool]:
    """(digest, whether it is partial) of a batch of any structure."""
    walk = _Walk()
    walk.value(batch)
    return hash_bytes(b"".join(walk.parts)), walk.is_partial


class _Walk:
    """Collects what a batch consists of, each part with its length or of a length that its tag gives."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_partial = False
        self._open: set[int] = set()  # objects being walked: one that holds itself is not walked again

    def value(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.tensor(value)
        elif isinstance(value, np.ma.MaskedArray):
            self.sequence("masked", (np.asarray(value), np.ma.getmaskarray(value)))
        elif isinstance(value, (np.ndarray, np.generic)):
            self.array(np.asarray(value))
        elif value is None or kind is bool:
            self.parts.append(b"N" if value is None else b"1" if value else b"0")
        elif kind is int:
            self.text(b"i", b"%d" % value)
        elif kind is float:
            self.parts.append(b"f" + struct.pack("<d", value))
        elif kind is complex:
            self.parts.append(b"c" + struct.pack("<dd", value.real, value.imag))
        elif kind is str:
            self.text(b"s", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self.text(b"b", bytes(value))
        elif id(value) in self._open:
            self.named(b"^", value)
        else:
            self._open.add(id(value))
            try:
                self.holder(value)
            finally:
                self._open.discard(id(value))

    def holder(self, value: Any) -> None:
        """What holds other values, or is nothing that is known."""
        if isinstance(value, Mapping):
            self.mapping(value)
        elif isinstance(value, (list, tuple)):
            self.sequence(type(value).__name__, value)
        elif isinstance(value, Set):
            self.named(b"{", value)
            digests = [digest_of(each) for each in value]
            self.is_partial = self.is_partial or any(is_partial for _, is_partial in digests)
            self.parts += sorted(struct.pack("<Q", digest) for digest, _ in digests)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.named(b"O", value)
            self.mapping({f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)})
        elif base := next((base for base in _EXACT if isinstance(value, base)), None):
            self.named(b"O", value)
            self.value(_EXACT[base](value))
        elif hasattr(value, "__dict__") and not isinstance(value, _NAMES_ONLY):
            self.named(b"O", value)
            self.mapping(dict(sorted(vars(value).items())))
            kind = type(value)  # one that has slots, or a base of C's, holds more
            self.is_partial |= kind.__basicsize__ > _Plain.__basicsize__ or kind.__itemsize__ > 0
        else:
            self.is_partial = True
            self.named(b"?", value)

    # ------------------------------------------------------------ parts

    def text(self, tag: bytes, text: bytes) -> None:
        self.parts.append(tag + struct.pack("<Q", len(text)) + text)

    def named(self, tag: bytes, value: Any) -> None:
        self.text(tag, type(value).__qualname__.encode())

    def mapping(self, value: Mapping[Any, Any]) -> None:
        self.parts.append(b"D" + struct.pack("<Q", len(value)))
        for pair in value.items():
            for each in pair:
                self.value(each)

    def sequence(self, name: str, value: Collection[Any]) -> None:
        self.text(b"L", name.encode())
        self.parts.append(struct.pack("<Q", len(value)))
        for each in value:
            self.value(each)

    def array(self, value: np.ndarray[Any, Any]) -> None:
        dtype = value.dtype
        if dtype.hasobject:
            self.sequence("array", value.reshape(-1).tolist())
            self.value(list(value.shape))
        elif dtype.fields:  # between the fields may be bytes that nobody wrote
            self.mapping({name: value[name] for name in dtype.fields})
        else:
            dense = np.ascontiguousarray(value)
            content = hash_at(dense.ctypes.data, dense.nbytes)
            self.parts.append(b"A%b %b %d;" % (dtype.str.encode(), str(value.shape).encode(), content))

    def tensor(self, value: torch.Tensor) -> None:
        if value.requires_grad:
            value = value.detach()
        if value.is_nested:
            parts: Any = (value.values(), value.offsets()) if value.layout is torch.jagged else value.unbind()  # type: ignore[attr-defined]  # a jagged one has offsets
            self.sequence("nested", parts)
            return
        if value.layout is torch.sparse_coo:
            value = value.coalesce()
            self.sequence("sparse", (list(value.shape), value.indices(), value.values()))
            return
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            self.is_partial = True
            self.named(b"?", value)
            return
        value = value.cpu().resolve_conj().resolve_neg().contiguous()
        self.parts.append(_label(value.dtype, value.shape) + b"%d;" % hash_at(value.data_ptr(), value.nbytes))


@lru_cache(maxsize=256)
def _label(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return b"T%b %b " % (str(dtype).encode(), str(tuple(shape)).encode())


FORMAT_VERSION = 1
SUFFIX = ".shmaudit"
EVENTS = ("pass", "end", "resume", "lost")
DISTRIBUTED, ITERABLE = "DistributedSampler", "iterable dataset"  # Header.order
_MAGIC = b"shmaudit "


class Mode(StrEnum):
    """What ordered the batches."""

    SEED = "seed"
    SAMPLED = "seed, with a sampler"
    GROWING = "seed, a dataset that grows"
    PIPELINE = "pipeline"
    TORCH = "torch"


Change = tuple[int, Any, Any, int]
"""A row as it was ordered, its index, what came in its place (None: nothing, it was skipped), and how many were tried."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Which loader a file is of: one loader, seen from one rank, for as long as none of this changes."""

    mode: str
    n: int | None  # samples of an epoch; None: unknown
    batch_size: int | None
    rank: int
    world_size: int
    seed: int | None
    shuffle: bool
    uneven: str  # what happens to the rest: "pad", "drop" or "exact"
    schedule: int  # version of the order
    order: str | None  # which order it is, where it is not the plain one
    in_order: bool
    on_error: str
    seed_samples: bool
    dataset: str  # name of its type
    shmload: str
    host: str
    pid: int
    started_ns: int = 0
    stream: dict[str, Any] | None = None  # of a pipeline: what its keys are made of, and whether it has an end

    @property
    def identity(self) -> dict[str, Any]:
        """What must be alike for two files to be of one run of one loader, whatever the ranks."""
        size: dict[str, Any] = {"batch_size": self.batch_size}
        if self.mode == Mode.PIPELINE:
            size = {}  # any rank goes on from any position, whatever batches it makes
        elif self.mode in (Mode.SEED, Mode.GROWING) and self.batch_size is not None:
            size = {"global_batch": self.batch_size * self.world_size}
        kept = ("mode", "dataset", "n", "seed", "shuffle", "uneven", "schedule", "order")
        return {**{name: getattr(self, name) for name in kept}, **size}


@dataclass(frozen=True, eq=False)
class Batch:
    """One delivered batch. `keys` are those of the rows as they came, after what `changes` says."""

    time_ns: int
    epoch: int
    step: int
    valid: int
    keys: np.ndarray[Any, np.dtype[np.int64]] | list[Any] | None
    digest: int
    is_partial: bool = False
    changes: tuple[Change, ...] = ()
    offset: int = 0  # in its file

    @property
    def num_rows(self) -> int:
        """Rows that came."""
        return 0 if self.keys is None else len(self.keys)


@dataclass(frozen=True)
class Event:
    """Anything but a batch: "pass", "end", "resume" or "lost"."""

    kind: str
    details: dict[str, Any]
    offset: int = 0


Record = Batch | Event


@dataclass
class AuditLog:
    """What a file says. `damage` has a line for everything in it that is not as it was written."""

    name: str
    header: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    is_torn: bool = False
    damage: list[str] = field(default_factory=list)


# ------------------------------------------------------------ writing


def header_line(header: dict[str, Any]) -> bytes:
    """The first line of a file."""
    return b"%b%d %b" % (_MAGIC, FORMAT_VERSION, _line(_json_of(header)))


def event_record(kind: str, details: dict[str, Any]) -> bytes:
    """The record of an event."""
    return _line(_json_of({"kind": kind, **details}))


_NUMBERS = ("time_ns", "epoch", "step", "valid", "digest")
_BATCH = (  # formatted and not dumped: it is made within next()
    b'{"kind": "batch", "time_ns": %d, "epoch": %d, "step": %d, "valid": %d, "digest": %d, "is_partial": %b, '
    b'"keys": %b, "changes": %b}'
)


def batch_record(batch: Batch) -> bytes:
    """The record of a batch. Keys that JSON has no word for are written as their repr."""
    keys, changes = batch.keys, b"[]"
    written = b'"%b"' % b64encode(keys.astype("<i8", copy=False).tobytes()) if isinstance(keys, np.ndarray) else _json_of(keys)
    if batch.changes:
        changes = b"[%b]" % b", ".join(_json_of(change) for change in batch.changes)
    numbers = (batch.time_ns, batch.epoch, batch.step, batch.valid, batch.digest)
    return _line(_BATCH % (*numbers, b"true" if batch.is_partial else b"false", written, changes))


def _json_of(value: Any) -> bytes:
    """JSON; what it has no word for as its repr."""
    try:
        return json.dumps(value, default=lambda key: int(key) if isinstance(key, np.integer) else repr(key)).encode()
    except (TypeError, ValueError):  # keys of dicts, what holds itself
        return json.dumps([each if each is None or type(each) is int else repr(each) for each in value]).encode()


def _line(text: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(text), text)


# ------------------------------------------------------------ reading


def read_log(path: Path) -> AuditLog:
    """Everything that can be read of a file; never raises for what is in it.

    Raises:
        OSError: the file cannot be opened or read.
    """
    log, at = AuditLog(path.name, {}), 0
    with path.open("rb") as file:
        for line in file:
            is_cut = not line.endswith(b"\n")
            if at == 0:
                if is_cut and (line.startswith(_MAGIC) or _MAGIC.startswith(line)):
                    break  # killed while it began
                if why := _read_header(log, line):
                    log.damage.append(f"offset 0: {why}")
                    return log
            elif not is_cut:
                record = _record_of(line, at)
                if isinstance(record, str):
                    log.damage.append(f"offset {at}: {record}")
                else:
                    log.records.append(record)
            at += len(line)
            log.is_torn = is_cut
    log.is_torn = log.is_torn or at == 0
    return log


def _read_header(log: AuditLog, line: bytes) -> str:
    """Why the first line cannot be used."""
    magic, version, rest = (*line.split(b" ", 2), b"", b"")[:3]
    if magic + b" " != _MAGIC or not (version.isdigit() and len(version) < 10 and int(version)):
        return "this is no audit file: it begins with no 'shmaudit' line"
    if int(version) > FORMAT_VERSION:
        return f"this file has format version {int(version)}, this shmload reads up to {FORMAT_VERSION}: install a newer one"
    header = _content(rest)
    if isinstance(header, str):
        return f"the header line {header}"
    log.header = header
    return ""


def _record_of(line: bytes, offset: int) -> Record | str:
    fields = _content(line)
    if isinstance(fields, str):
        return f"a record {fields}"
    kind = fields.pop("kind", None)
    if kind in EVENTS:
        return Event(kind, fields, offset)
    if kind != "batch":
        return f"a record has the unknown kind {kind}: a newer shmload has written it"
    try:
        numbers = {name: fields[name] for name in _NUMBERS}
        keys = fields["keys"]
        if isinstance(keys, str):
            keys = np.frombuffer(b64decode(keys, validate=True), "<i8")
        changes = tuple((row, key, new, tries) for row, key, new, tries in fields["changes"])
        whole = (*numbers.values(), *(number for row, _, _, tries in changes for number in (row, tries)))
        if all(type(number) is int for number in whole) and (keys is None or isinstance(keys, (list, np.ndarray))):
            return Batch(**numbers, keys=keys, is_partial=bool(fields["is_partial"]), changes=changes, offset=offset)
    except (KeyError, TypeError, ValueError):
        pass
    return "a batch's record lacks a part, or has one of another type"


def _content(line: bytes) -> dict[str, Any] | str:
    """The JSON object of a line behind its checksum, or what is wrong with it."""
    crc, _, text = line.rstrip(b"\n").partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return "is damaged: its checksum differs"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if type(found) is dict else "holds no JSON object"


_KINDS = {**get_type_hints(Header), "stream": dict | None}


def read_header(found: dict[str, Any]) -> Header:
    """The header that a file holds; what a newer version added is left out.

    Raises:
        ValueError: a field is missing or of another type.
    """
    values: dict[str, Any] = {name: found.get(name) for name in _KINDS}
    faults = [f"{name} is {values[name]!r}" for name, kind in _KINDS.items() if not isinstance(values[name], kind)]
    if values["mode"] == Mode.PIPELINE and not _is_stream(values["stream"], values["n"]):
        faults.append(f"stream is {values['stream']!r:.200}")
    if not faults and not 0 <= found["rank"] < found["world_size"]:
        faults.append(f"rank is {found['rank']} of {found['world_size']}")
    if faults:
        raise ValueError(f"the header cannot be used: {', '.join(faults)}")
    return Header(**{field.name: values[field.name] for field in dataclasses.fields(Header)})


def _is_stream(stream: Any, n: Any) -> bool:
    def are_members(members: Any) -> bool:
        is_join = isinstance(members, list) and members
        return all(map(are_members, members)) if is_join else type(members) is int and members > 0

    is_dict = isinstance(stream, dict) and type(stream.get("is_endless")) is bool and type(n) is int and n > 0
    return is_dict and are_members(stream.get("members"))


log = logging.getLogger("shmload")


class Recorder:
    """One loader's deliveries.

    Args:
        folder: where the audit's files go; made if it is not there. None: there is no audit.
        has_indices: False for an iterable dataset, whose samples have none.
    Raises:
        OSError: the folder cannot be made.
        PermissionError: it cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, *, has_indices: bool = True) -> None:
        self._folder = None if folder is None else Path(folder).absolute()
        self.is_on = folder is not None
        self._has_indices = has_indices
        self.last: Order | None = None  # of the batch just yielded
        self.num_passes = 0  # begun in this run, in torch mode: its passes have no other number
        self._header: Header | None = None
        self._path = Path()
        self._file = -1
        self._pid = 0
        self._pending: list[bytes] = []  # events before the first delivery
        self._num_lost = 0
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(
                    f"audit={os.fspath(self._folder)!r} needs a folder that this process can write to; "
                    "give another, or leave audit out"
                )

    @property
    def last_indices(self) -> NDArray[np.int64] | list[Any] | None:
        """See ShmLoader.last_indices."""
        if self.last is None or not self._has_indices:
            return None
        return cast("NDArray[np.int64] | list[Any]", self.last.indices)

    # ------------------------------------------------------------ what happens

    def resumed(self, epoch: int, step: int, *, by: str = "state", beyond: Collection[int] = ()) -> None:
        """A state was loaded, or set_epoch called: the next pass begins there.

        Args:
            beyond: later steps whose batches had come before their turn, and do not come again.
        """
        self._event("resume", {"epoch": epoch, "step": step, "by": by, **({"beyond": sorted(beyond)} if beyond else {})})

    def begins(
        self, config: LoaderConfig, epoch: int, step: int, *, schedule: Schedule | BatchSchedule | None = None, rank: int = 0
    ) -> None:
        """A pass begins at that step.

        Args:
            schedule, rank: seed mode's; None where a sampler orders, or an order the batches.
        """
        header = header_of(config, schedule, rank)
        if self._header is not None and header != self._header:
            self.close()  # other ranks, or another length: what comes now has a file of its own
        self._header = header
        self._event("pass", {"epoch": epoch, "step": step})

    def delivered(
        self, order: Order, batch: Any, *, valid: int | None = None, epoch: int | None = None, step: int | None = None
    ) -> None:
        """Records a batch that is about to be yielded, or that NOTHING came of its order because every sample was skipped.

        Args:
            epoch, step: as they are to be recorded, where the order counts in another way.
        """
        if batch is NOTHING and order.ordered is None:
            return
        valid = order.nrows if valid is None else valid
        epoch = order.epoch if epoch is None else epoch
        step = order.step if step is None else step
        digest, is_partial = 0, False
        if batch is not NOTHING:
            try:
                digest, is_partial = digest_of(batch)
            except Exception as error:  # an object whose attributes raise must not end a run
                is_partial = True
                log.debug("audit: a batch has no digest: %r", error)
        keys = _keys_of(order.indices) if self._has_indices else None
        now = time_ns()
        record = batch_record(Batch(now, epoch, step, valid, keys, digest, is_partial, _changes_of(order)))
        if self._num_lost:
            record = event_record("lost", {"batches": self._num_lost, "time_ns": now}) + record
        self._write(record, f"epoch {epoch}, step {step}")

    def ended(self, epoch: int, step: int) -> None:
        """The pass has come to its end; of a rank that had no batch in it, too."""
        self._event("end", {"epoch": epoch, "step": step}, opens=True)

    # ------------------------------------------------------------ the file

    def _event(self, kind: str, details: dict[str, Any], *, opens: bool = False) -> None:
        if self._folder is None:
            return
        record = event_record(kind, {**details, "time_ns": time_ns()})
        if opens or self._is_open():
            self._write(record)
        else:
            self._pending.append(record)

    def _is_open(self) -> bool:
        return private_fds.is_kept(self._file) and self._pid == os.getpid()  # a forked child makes its own

    def _open(self) -> None:
        assert self._folder is not None
        assert self._header is not None, "a pass has begun"
        self._file, self._pid = -1, os.getpid()
        self._path = self._folder / f"rank-{self._header.rank:04d}-{secrets.token_hex(8)}{SUFFIX}"
        started = dataclasses.replace(self._header, started_ns=time_ns(), pid=self._pid)
        self._file = private_fds.keep(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666))
        self._pending.insert(0, header_line(dataclasses.asdict(started)))

    def _write(self, record: bytes, batch: str = "") -> None:
        """Appends what is pending and a record: that of a batch is lost where it cannot be written, that of an event put off."""
        try:
            if not self._is_open():
                self._open()
            content = b"".join((*self._pending, record)) if self._pending else record
            num_written = os.write(self._file, content)
            if num_written < len(content):  # the disk has just filled up: the next try must not follow half a record
                os.ftruncate(self._file, os.fstat(self._file).st_size - num_written)
                raise OSError(28, "No space left on device")
        except OSError as error:
            if not batch:
                self._pending.append(record)
                return
            self._num_lost += 1
            if self._num_lost == 1:
                text = (
                    f"audit: {self._path} cannot be written: {error}. Training goes on; batches from {batch} on are not recorded "
                    "until it can be, and `shmload verify` will report them as missing. Make room"
                )
                log.error("%s", text)
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        self._pending.clear()
        if batch:
            self._num_lost = 0

    def close(self) -> None:
        """Ends the file; the next delivery begins another."""
        if self._is_open():
            private_fds.close(self._file)
        self._file = -1

    def __getstate__(self) -> dict[str, Any]:
        """A copy, in whatever process, records in a file of its own."""
        return {**self.__dict__, "_file": -1, "_header": None, "_pending": [], "_num_lost": 0, "last": None}

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0 and sys is not None and not sys.is_finalizing():
            self.close()


def _keys_of(indices: Any) -> Any:
    if isinstance(indices, np.ndarray):
        return indices
    if set(map(type, indices)) <= {int}:
        try:
            return np.array(indices, np.int64)
        except OverflowError:
            pass
    return list(indices)


def _changes_of(order: Order) -> tuple[Change, ...]:
    """What was done about the order's bad samples."""
    if order.ordered is None:
        return ()
    came = {row: (order.indices[i], tries) for i, (row, tries) in enumerate(order.origins or ())}
    rows = [(row, key, *came.get(row, (None, 0))) for row, key in enumerate(order.ordered)]
    return tuple(change for change in rows if change[0] not in came or change[3])


def header_of(config: LoaderConfig, schedule: Schedule | BatchSchedule | None, rank: int | None = None) -> Header:
    """The header for a loader as it is now.

    Args:
        schedule, rank: seed mode's; None where a sampler orders, or an order the batches.
    Raises:
        ValueError: the environment names a world size, and neither it nor the loader's arguments say which rank this is.
    """
    common: dict[str, Any] = {name: getattr(config, name) for name in ("seed", "on_error", "seed_samples")}
    common |= {"shmload": shmload.__version__, "host": platform.node(), "pid": os.getpid()}
    if schedule is not None:
        common |= {name: getattr(schedule, name) for name in ("n", "world_size", "shuffle")}
        common |= {"uneven": schedule.rest_rule, "schedule": schedule.version, "rank": rank or 0, "in_order": True}
        common["order"] = None if schedule.order is None else schedule.order.identity
        if isinstance(schedule, Schedule):
            dataset = type(config.dataset).__qualname__
            return Header(**common, mode=Mode.SEED, batch_size=schedule.batch_size, dataset=dataset)
        of_stream: dict[str, Any] = {"batch_size": schedule.rows_per_rank, "stream": schedule.stream}
        return Header(**common, **of_stream, mode=Mode.PIPELINE, dataset="pipeline")
    batches = config.index_sampler
    sampler = getattr(batches, "sampler", batches)
    is_distributed = isinstance(sampler, DistributedSampler)
    ranks = (sampler.rank, sampler.num_replicas) if is_distributed else rank_and_world_size(config.rank, config.world_size)
    grows = config.seed is not None and bool(package_ability(config.dataset, "epoch_schedule"))
    return Header(
        mode=Mode.TORCH if config.seed is None else Mode.GROWING if grows else Mode.SAMPLED,
        n=None if grows else config.num_samples,  # which is another in each epoch
        batch_size=getattr(batches, "batch_size", config.batch_size),
        rank=ranks[0],
        world_size=ranks[1],
        shuffle=not isinstance(sampler, SequentialSampler),
        uneven="drop" if any(getattr(one, "drop_last", False) for one in (config, batches, sampler)) else "exact",
        schedule=SCHEDULE_VERSION,
        order=_order_name(config, batches, sampler),
        in_order=bool(config.in_order) or config.seed is not None,
        dataset=type(config.dataset).__qualname__,
        **common,
    )


def _order_name(config: LoaderConfig, batches: Any, sampler: Any) -> str | None:
    """None for torch's own orders that deliver each sample once."""
    if config.is_iterable:
        return ITERABLE
    if package_ability(config.dataset, "epoch_schedule"):  # whose epochs differ
        return type(config.dataset).__qualname__
    if batches is not sampler and type(batches) is not BatchSampler:
        return type(batches).__qualname__
    if isinstance(sampler, DistributedSampler):
        return DISTRIBUTED
    is_random = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == config.num_samples
    is_plain = is_random or type(sampler) is SequentialSampler
    return None if is_plain and len(sampler.data_source) == config.num_samples else type(sampler).__qualname__
