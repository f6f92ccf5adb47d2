"""The audit file: what one process start of one rank was delivered, in order.

    shmaudit 1 <crc32 of the JSON, 8 hex digits> {JSON: which loader, which rank}
    <crc32 of the JSON> {"kind": ..., ...}
    ...

Each line is a record, and its JSON has a kind. A "batch" has time_ns, epoch, step, valid (rows that are not padding), digest,
is_partial, the keys (a base64 text of int64, or a list if a key is not such a number) and the changes. "pass" marks the beginning
of a pass, "end" its end, "resume" a loaded state (`beyond`: later steps that were delivered before their turn), and "lost"
records that could not be written.

Every line is written by one write(), so a killed process leaves complete lines, or one truncated (*torn*) last line, which is not
damage. Everything else that does not fit is reported with its offset; nothing is executed or unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np

FORMAT_VERSION = 1
SUFFIX = ".shmaudit"
EVENTS = ("pass", "end", "resume", "lost")

DISTRIBUTED, ITERABLE = "DistributedSampler", "iterable dataset"  # values of Header.order

_MAGIC = b"shmaudit "


class Mode(StrEnum):
    """The kinds of order that an audit distinguishes, with their names in the header."""

    SEED = "seed"
    SAMPLED = "seed, with a sampler"
    GROWING = "seed, a dataset that grows"
    PIPELINE = "pipeline"
    TORCH = "torch"


class Change(NamedTuple):
    """A row that differs from what was ordered."""

    row: int  # as ordered
    key: Any
    substitute: Any  # the key delivered instead; None if the sample was skipped
    num_tries: int  # keys tried until then


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line of a file: identifies a loader as one rank sees it. If any field changes, the rank begins another file."""

    mode: str
    n: int | None  # samples of an epoch; None if unknown
    batch_size: int | None
    rank: int
    world_size: int
    seed: int | None
    shuffle: bool
    uneven: str  # treatment of the samples left over: "pad", "drop" or "exact"
    schedule: int  # version of the order's algorithm
    order: str | None  # name of the order; None for the plain one
    in_order: bool
    on_error: str
    seed_samples: bool
    dataset: str  # name of the dataset's type
    shmload: str
    host: str
    pid: int
    started_ns: int = 0
    stream: dict[str, Any] | None = None  # of a pipeline: how its keys are built, and whether it ends

    @property
    def each_rank_reads_all(self) -> bool:
        """Return whether one of torch's samplers gives each rank all samples."""
        return self.mode in (Mode.TORCH, Mode.SAMPLED) and self.order is None

    @property
    def identity(self) -> dict[str, Any]:
        """Return the fields in which two files of one run of one loader agree, on all ranks."""
        size: dict[str, Any] = {"batch_size": self.batch_size}
        if self.mode == Mode.PIPELINE:
            size = {}  # a run may resume from any position with another batch size
        elif self.mode in (Mode.SEED, Mode.GROWING) and self.batch_size is not None:
            size = {"global_batch": self.batch_size * self.world_size}
        kept = ("mode", "dataset", "n", "seed", "shuffle", "uneven", "schedule", "order")
        return {**{name: getattr(self, name) for name in kept}, **size}


@dataclass(frozen=True, eq=False)
class Batch:
    """One delivered batch. `keys` are those of the delivered rows, with `changes` applied; None for an iterable dataset."""

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
        """Return the number of delivered rows."""
        return 0 if self.keys is None else len(self.keys)


@dataclass(frozen=True)
class Event:
    """Any record but a batch: "pass", "end", "resume" or "lost"."""

    kind: str
    details: dict[str, Any]
    offset: int = 0


Record = Batch | Event


@dataclass
class AuditLog:
    """The content of a file.

    Attributes:
        name: name of the file.
        header: the JSON object of its first line; empty if that cannot be used.
        records: the readable records, in order.
        is_torn: whether the last line is incomplete, because the process was killed; this is not damage.
        damage: a description, with its offset, of each line that differs from what was written.
    """

    name: str
    header: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    is_torn: bool = False
    damage: list[str] = field(default_factory=list)


# ------------------------------------------------------------ writing


def header_line(header: dict[str, Any]) -> bytes:
    """Return the first line of a file."""
    return b"%b%d %b" % (_MAGIC, FORMAT_VERSION, _line(_json_of(header)))


def event_record(kind: str, details: dict[str, Any]) -> bytes:
    """Return the record of an event."""
    return _line(_json_of({"kind": kind, **details}))


_NUMBERS = ("time_ns", "epoch", "step", "valid", "digest")
_BATCH = (  # a format string instead of json.dumps, because it runs within next()
    b'{"kind": "batch", "time_ns": %d, "epoch": %d, "step": %d, "valid": %d, "digest": %d, "is_partial": %b, '
    b'"keys": %b, "changes": %b}'
)


def batch_record(batch: Batch) -> bytes:
    """Return the record of a batch. Keys that JSON cannot represent are written as their repr."""
    keys, changes = batch.keys, b"[]"
    written = b'"%b"' % b64encode(keys.astype("<i8", copy=False).tobytes()) if isinstance(keys, np.ndarray) else _json_of(keys)
    if batch.changes:
        changes = b"[%b]" % b", ".join(_json_of(change) for change in batch.changes)
    numbers = (batch.time_ns, batch.epoch, batch.step, batch.valid, batch.digest)
    return _line(_BATCH % (*numbers, b"true" if batch.is_partial else b"false", written, changes))


def _json_of(value: Any) -> bytes:
    """Serialize as JSON; values that JSON cannot represent become their repr."""
    try:
        return json.dumps(value, default=lambda key: int(key) if isinstance(key, np.integer) else repr(key)).encode()
    except (TypeError, ValueError):  # non-text keys of dicts, circular references
        return json.dumps([each if each is None or type(each) is int else repr(each) for each in value]).encode()


def _line(text: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(text), text)


# ------------------------------------------------------------ reading


def read_log(path: Path) -> AuditLog:
    """Read everything in a file that is readable. Damage is reported in the result, not raised.

    Args:
        path: path of the file.
    Raises:
        OSError: the file cannot be opened or read.
    """
    log, at = AuditLog(path.name, {}), 0
    with path.open("rb") as file:
        for line in file:
            is_cut = not line.endswith(b"\n")
            if at == 0:
                if is_cut and (line.startswith(_MAGIC) or _MAGIC.startswith(line)):
                    break  # killed while it was created
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
    """Read the first line into the log. Return why it cannot be used, or ""."""
    magic, version, rest = (*line.split(b" ", 2), b"", b"")[:3]
    if magic + b" " != _MAGIC or not (version.isdigit() and len(version) < 10 and int(version)):
        return "this is not an audit file: it does not begin with a 'shmaudit' line"
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
        changes = tuple(Change(*change) for change in fields["changes"])
        whole = (*numbers.values(), *(number for one in changes for number in (one.row, one.num_tries)))
        if all(type(number) is int for number in whole) and (keys is None or isinstance(keys, (list, np.ndarray))):
            return Batch(**numbers, keys=keys, is_partial=bool(fields["is_partial"]), changes=changes, offset=offset)
    except (KeyError, TypeError, ValueError):
        pass
    return "a batch's record lacks a part, or has one of another type"


def _content(line: bytes) -> dict[str, Any] | str:
    """Return the JSON object of a line after its checksum, or the description of an error."""
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
    """Return the header in a file. Fields of newer versions are ignored.

    Args:
        found: the JSON object of the first line.
    Raises:
        ValueError: a field is missing or has another type.
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
