"""The audit file: what one process start of one rank was delivered, in the order it was delivered.

    shmaudit 1 <crc32 of the JSON, 8 hex digits> {JSON: which loader, which rank}

    record, record, ...      each: length u32 | kind u8, 3 zero bytes | crc32 of these 8 bytes u32 | payload | crc32 of it u32

    BATCH    time_ns, epoch, step, digest u64; rows, valid rows, bytes of keys, bytes of changes u32; flags u8; then
             the keys (int64, or JSON where a key is no such number) and the changes (JSON)
    others   JSON: PASS begins one, END: it came to its end, RESUME: a state was loaded, LOST: records that could not be written

Little-endian throughout. Every record is written by one write(), so what kill -9 leaves is a whole number of records or a tail
that is cut (*torn*), which is no damage. The head has a checksum of its own: a damaged length cannot pass for a torn tail.
Anything else that does not fit is reported with its offset; nothing here is ever executed or unpickled.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 1
SUFFIX = ".shmaudit"
BATCH, PASS, END, RESUME, LOST = range(1, 6)
EVENTS = {"pass": PASS, "end": END, "resume": RESUME, "lost": LOST}
_NAMES = {code: name for name, code in EVENTS.items()}
_HEAD = struct.Struct("<IB3x")
_CRC = struct.Struct("<I")
_BATCH = struct.Struct("<QQQQIIIIB")
_JSON_KEYS, _PARTIAL = 1, 2
_MAGIC = b"shmaudit "
_HEADER_MAX = 65536

Change = tuple[int, Any, Any, int]
"""A row as it was ordered, its index, what came in its place (None: nothing, it was skipped), and how many were tried."""


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
    text = json.dumps(header).encode()
    return b"%b%d %08x %b\n" % (_MAGIC, FORMAT_VERSION, zlib.crc32(text), text)


def event_record(kind: str, details: dict[str, Any]) -> bytes:
    """The record of an event."""
    return _framed(EVENTS[kind], json.dumps(details).encode())


def batch_record(batch: Batch) -> bytes:
    """The record of a batch."""
    flags = _PARTIAL if batch.is_partial else 0
    keys = b"null"
    if isinstance(batch.keys, np.ndarray):
        keys = batch.keys.astype("<i8", copy=False).tobytes()
    else:
        flags |= _JSON_KEYS
        if batch.keys is not None:
            keys = _json_of(batch.keys)
    changes = _json_of(batch.changes) if batch.changes else b""
    head = _BATCH.pack(
        batch.time_ns,
        batch.epoch,
        batch.step,
        batch.digest,
        batch.num_rows,
        batch.valid,
        len(keys),
        len(changes),
        flags,
    )
    return _framed(BATCH, head + keys + changes)


def _framed(kind: int, payload: bytes) -> bytes:
    head = _HEAD.pack(len(payload), kind)
    return b"".join((head, _CRC.pack(zlib.crc32(head)), payload, _CRC.pack(zlib.crc32(payload))))


def _json_of(keys: Sequence[Any]) -> bytes:
    """Keys or changes as JSON; what JSON has no word for as its repr."""
    try:
        return json.dumps(keys, default=_json_word).encode()
    except (TypeError, ValueError):  # keys of dicts, what holds itself
        return json.dumps([repr(key) for key in keys]).encode()


def _json_word(key: Any) -> Any:
    return int(key) if isinstance(key, np.integer) else repr(key)


# ------------------------------------------------------------ reading


def read_log(path: Path) -> AuditLog:
    """Everything that can be read of a file; never raises for what is in it.

    Keys are views of the mapped file, so a long record takes no memory.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    with path.open("rb") as file:
        content = memoryview(b"" if file.seek(0, 2) == 0 else mmap(file.fileno(), 0, access=ACCESS_READ))
    log = AuditLog(path.name, {})
    start = _read_header(log, content)
    if start:
        _read_records(log, content, start)
    return log


def _read_header(log: AuditLog, content: memoryview) -> int:
    """Where the records begin; 0 if there is no header."""
    line = bytes(content[:_HEADER_MAX])
    end = line.find(b"\n")
    if end < 0 and (line.startswith(_MAGIC) or _MAGIC.startswith(line)) and len(line) < _HEADER_MAX:
        log.is_torn = True  # killed while it began
        return 0
    magic, version, crc, text = (*line[: max(end, 0)].split(b" ", 3), b"", b"", b"", b"")[:4]
    if magic + b" " != _MAGIC or not (version.isdigit() and len(version) < 10 and int(version)):
        log.damage.append("offset 0: this is no audit file: it begins with no 'shmaudit' line")
    elif int(version) > FORMAT_VERSION:
        log.damage.append(
            f"offset 0: this file has format version {int(version)}, this shmload reads up to {FORMAT_VERSION}: install a newer one"
        )
    elif crc != b"%08x" % zlib.crc32(text):
        log.damage.append("offset 0: the header line is damaged: its checksum differs")
    else:
        header = _json_dict(text)
        if header is not None:
            log.header = header
            return end + 1
        log.damage.append("offset 0: the header line holds no JSON object")
    return 0


def _read_records(log: AuditLog, content: memoryview, at: int) -> None:
    size = len(content)
    while at < size:
        if size - at < 12:
            log.is_torn = True
            return
        head = content[at : at + 8]
        length, kind = _HEAD.unpack(head)
        if _CRC.unpack_from(content, at + 8)[0] != zlib.crc32(head):
            log.damage.append(
                f"offset {at}: the head of a record is damaged: its checksum differs; the {size - at} bytes from there on "
                "are not read"
            )
            return
        begin, end = at + 12, at + 12 + length
        if end + 4 > size:
            log.is_torn = True
            return
        payload = content[begin:end]
        record: Record | str
        if _CRC.unpack_from(content, end)[0] != zlib.crc32(payload):
            record = "a record is damaged: its checksum differs"
        elif kind == BATCH:
            record = _batch_of(payload, at)
        elif kind in _NAMES:
            details = _json_dict(bytes(payload))
            record = "an event holds no JSON object" if details is None else Event(_NAMES[kind], details, at)
        else:
            record = f"a record has the unknown kind {kind}: a newer shmload has written it"
        if isinstance(record, str):
            log.damage.append(f"offset {at}: {record}")
        else:
            log.records.append(record)
        at = end + 4


def _batch_of(payload: memoryview, offset: int) -> Batch | str:
    if len(payload) < _BATCH.size:
        return "a batch's record is too short"
    time_ns, epoch, step, digest, num_rows, valid, keys_nbytes, changes_nbytes, flags = _BATCH.unpack_from(payload)
    if _BATCH.size + keys_nbytes + changes_nbytes != len(payload):
        return "a batch's record has another length than its parts"
    keys_at, changes_at = _BATCH.size, _BATCH.size + keys_nbytes
    keys: np.ndarray[Any, Any] | list[Any] | None
    if flags & _JSON_KEYS:
        keys = _json_list(bytes(payload[keys_at:changes_at]))
    elif keys_nbytes % 8:
        return "a batch's indices are no whole number of int64"
    else:
        keys = np.frombuffer(payload, "<i8", keys_nbytes // 8, keys_at)
    if num_rows != (0 if keys is None else len(keys)):
        return "a batch's record has another number of keys than of rows"
    changes = _json_list(bytes(payload[changes_at:])) or []
    if not all(type(c) is list and len(c) == 4 and type(c[0]) is type(c[3]) is int for c in changes):
        return "a batch's changed rows cannot be read"
    return Batch(
        time_ns,
        epoch,
        step,
        valid,
        keys,
        digest,
        bool(flags & _PARTIAL),
        tuple((c[0], c[1], c[2], c[3]) for c in changes),
        offset,
    )


def _json_dict(text: bytes) -> dict[str, Any] | None:
    found = _json(text)
    return found if type(found) is dict else None


def _json_list(text: bytes) -> list[Any] | None:
    found = _json(text)
    return found if type(found) is list else None


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
