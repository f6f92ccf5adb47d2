"""A TFRecord file's bytes and where its records begin.

Plain files are mapped, read-only: all processes share the page cache, and a forked child its parent's mapping. Files compressed
as a whole cannot be sought in, so they are inflated once per process into private memory: that costs the inflated size in each
process that was not forked after it, and CPU time.

A file that is replaced or removed stays whole in its mapping. One that is written over or cut off is noticed, before and after each
batch; what remains is a file cut off between the two, whose reader the system kills (SIGBUS), as with any mapping.

Offsets are taken from our own file beside the shard (`<name>.shmload-index`), else from a tfindex file that agrees with the shard's
size, else from a walk, whose result is then written beside the shard if the folder allows.

    our index: "SHMLOAD TFRECORD INDEX 1\\n" | json of name, size, mtime_ns, crc32c of the offsets "\\n" | int64 offsets
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.crc32c import crc32c, masked
from shmload._core.mapped_file import MappedFile
from shmload._core.records import record_starts
from shmload.errors import ShardCorrupt

MAGIC = b"SHMLOAD TFRECORD INDEX 1\n"
SUFFIX = ".shmload-index"
FOREIGN_SUFFIXES = (".tfindex", ".index", ".idx")
COMPRESSIONS = ("auto", "none", "gzip", "zlib")
CHANGED = "the file was changed while it was in use; it had {was} bytes when it was opened: make the dataset anew"
OVERHEAD = 16  # bytes of a record beside its data
_STEP = 1 << 20  # bytes inflated at a time

Offsets = NDArray[np.int64]
log = logging.getLogger("shmload")


class RecordFile:
    """One file: its bytes, and int64 offsets of its records with the end of the last one behind them.

    Attributes:
        nbytes: of the file on disk.
        state: the file as `RecordReader` knows it again; None: its bytes are in private memory.

    Raises:
        ShardCorrupt: the walk met a record that is none, or the compressed stream is broken.
    """

    def __init__(self, path: str, compression: str, max_inflated_bytes: int) -> None:
        self.path = path
        name = os.fsencode(path)
        self._file = MappedFile(name)
        _, _, self.nbytes, mtime_ns = self._file.state
        self.data: Any = memoryview(self._file)
        self.state: tuple[Any, ...] | None = (name, *self._file.state)
        self._identity = {"name": Path(path).name, "size": self.nbytes, "mtime_ns": mtime_ns}
        kind = compression if compression != "auto" else _compression_of(bytes(self.data[:12]))
        if kind != "none":
            self.data, self.state = _inflated(path, self.data, kind, max_inflated_bytes), None
            self._check()

    def offsets(self) -> Offsets:
        """Where records begin: from a file beside this one, or by a walk."""
        if self.state is None:
            return self._walked()
        found = self._own()
        if found is None:
            found = self._foreign()
        if found is None:
            found = self._walked()
            self._check()
            write_index(self.path, self._identity, found)
        return found

    def _check(self) -> None:
        if self._file.has_changed():
            raise ShardCorrupt(f"{self.path}: {CHANGED.format(was=self.nbytes)}")

    def _walked(self) -> Offsets:
        text, problem, at = record_starts(self.data)
        if problem:
            cause = {
                "header": "truncated: fewer than 12 bytes are left for a record's header",
                "length_sum": "corrupted: the checksum of the record's length differs, or this is no TFRecord file",
                "truncated": "truncated: the record goes beyond the end of the file",
            }[problem]
            count = len(text) // 8 - 1
            raise ShardCorrupt(f"{self.path}: record {count}, which starts at byte {at}: {cause}")
        return np.frombuffer(text, np.int64)

    def _own(self) -> Offsets | None:
        try:
            text = Path(self.path + SUFFIX).read_bytes()
        except OSError:
            return None
        head, _, body = text.removeprefix(MAGIC).partition(b"\n")
        try:
            said = json.loads(head)
        except (ValueError, RecursionError):
            return None
        if not text.startswith(MAGIC) or len(body) % 8 or said != {**self._identity, "crc32c": crc32c(body)}:
            return None
        found = np.frombuffer(body, np.int64)
        return found if self._lie_end_to_end(found) else None

    def _lie_end_to_end(self, offsets: Offsets) -> bool:
        """Whether offsets begin with the file, end with it, and leave each record room for its frame."""
        size = self.nbytes
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != size or offsets.min() < 0 or offsets.max() > size:
            return False  # what lies within the file can be subtracted: it does not wrap
        return bool(np.all(np.diff(offsets) >= OVERHEAD))

    def _foreign(self) -> Offsets | None:
        for suffix in FOREIGN_SUFFIXES:
            for path in (Path(self.path + suffix), Path(self.path).with_suffix(suffix)):
                if (found := self._of_tfindex(path)) is not None:
                    return found
        return None

    def _of_tfindex(self, path: Path) -> Offsets | None:
        """Offsets of a text of lines "start length", if they lie end to end from 0 to the end of the file."""
        try:
            numbers = np.array(path.read_bytes().split(), np.int64)
        except (OSError, ValueError, OverflowError):
            return None
        if len(numbers) % 2 or len(numbers) == 0:
            return None
        offsets = np.concatenate([numbers[::2], [self.nbytes]])
        if not self._lie_end_to_end(offsets) or not np.array_equal(np.diff(offsets), numbers[1::2]):
            log.warning("%s does not fit %s: its records are looked for anew", path, self.path)
            return None
        return offsets


def write_index(path: str, identity: dict[str, Any], offsets: Offsets) -> bool:
    """Writes the index beside a file, whole or not at all; answers whether the folder allowed it."""
    body = offsets.tobytes()
    head = json.dumps({**identity, "crc32c": crc32c(body)}).encode()
    try:
        descriptor, name = tempfile.mkstemp(prefix=".shmload-", dir=os.path.dirname(path) or ".")
    except OSError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + head + b"\n" + body)
        os.replace(name, path + SUFFIX)
    except OSError:
        os.unlink(name)
        return False
    return True


def _compression_of(head: bytes) -> str:
    """What a file's first 12 bytes look like."""
    if len(head) == 12 and masked(crc32c(head[:8])) == int.from_bytes(head[8:], "little"):
        return "none"
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    if len(head) >= 2 and head[0] == 0x78 and (head[0] << 8 | head[1]) % 31 == 0:
        return "zlib"
    return "none"


def _inflated(path: str, data: Any, kind: str, max_inflated_bytes: int) -> bytes:
    """The whole stream; members of gzip may follow each other."""
    parts: list[bytes] = []
    total = at = 0
    pending: Any = b""
    try:
        while len(pending) or at < len(data) or not parts:
            stream = zlib.decompressobj(31 if kind == "gzip" else 15)
            while not stream.eof:
                if not len(pending):
                    pending = data[at : at + _STEP]
                    at += len(pending)
                is_over = not len(pending)
                part = stream.decompress(pending, _STEP)
                pending = stream.unconsumed_tail
                if is_over and not part and not stream.eof:
                    raise ShardCorrupt(
                        f"{path}: the {kind} stream is truncated: it does not end with its {len(data)} bytes"
                    )
                total += len(part)
                if total > max_inflated_bytes:
                    raise ShardCorrupt(
                        f"{path}: inflates to more than {max_inflated_bytes} bytes; raise max_inflated_bytes if that is right"
                    )
                parts.append(part)
            pending = stream.unused_data
    except zlib.error as error:
        raise ShardCorrupt(f"{path}: the {kind} stream is corrupted after {total} inflated bytes: {error}") from error
    return b"".join(parts)
