"""The bytes of a TFRecord file and the offsets of its records.

Plain files are mapped read-only: all processes share the page cache, and a forked child shares its parent's mapping. Files that are
compressed as a whole do not allow random access, so they are expanded once per process into private memory. That costs their
expanded size in each process that was not forked afterward, and CPU time.

A file that is replaced or removed stays whole in its mapping. A file that is overwritten or truncated is noticed, before and after
each batch. If a file is truncated between the two checks, the system kills its reader (SIGBUS), as with any mapping.

Offsets are taken from shmload's own file next to the shard (`<name>.shmload-index`), else from a tfindex file that matches it, else
from a pass over the file, whose result is then saved next to it if the folder is writable.

    the index: "SHMLOAD TFRECORD INDEX 1\n" | json of name, size, mtime_ns, crc32c of the offsets "\n" | int64 offsets
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmload._core.crc32c import crc32c, masked
from shmload._core.mapped_file import MappedFile
from shmload._core.records import record_starts
from shmload.errors import ShardCorrupt
from shmload.formats.atomic_write import write_if_possible
from shmload.formats.inflate import inflated

MAGIC = b"SHMLOAD TFRECORD INDEX 1\n"
SUFFIX = ".shmload-index"
FOREIGN_SUFFIXES = (".tfindex", ".index", ".idx")  # suffixes of indexes that other programs keep next to files
CHANGED = "the file was changed while it was in use; it had {was} bytes when it was opened: create the dataset again"
OVERHEAD = 16  # bytes of a record in addition to its data
Offsets = NDArray[np.int64]
log = logging.getLogger("shmload")


class RecordFile:
    """One TFRecord file: its bytes, and the offsets of its records.

    Args:
        path: path of the file.
        compression: "auto", "none", "gzip" or "zlib".
        max_inflated_bytes: limit on the decompressed size.
    Attributes:
        data: the bytes of the records: a map of the file, or the decompressed file in private memory.
        nbytes: size of the file on disk.
        state: the values by which `RecordReader` notices changes of the file; None if its bytes are in private memory.

    Raises:
        ShardCorrupt: a record is invalid, or the compressed stream is damaged.
    """

    def __init__(self, path: str, compression: str, max_inflated_bytes: int) -> None:
        self.path = path
        name = os.fsencode(path)
        self._file = MappedFile(name)
        _, _, self.nbytes, mtime_ns = self._file.state
        self.data: Any = memoryview(self._file)
        self.state: tuple[Any, ...] | None = (name, *self._file.state)
        self._identity = {"name": Path(path).name, "size": self.nbytes, "mtime_ns": mtime_ns}
        kind = compression if compression != "auto" else compression_of_records(bytes(self.data[:12])) or "none"
        if kind != "none":
            try:
                self.data = inflated(self.data, kind, max_inflated_bytes, "; raise max_inflated_bytes if that is right")
            except ValueError as error:
                raise ShardCorrupt(f"{path}: {error}") from error
            self.state = None
            self._check()

    def offsets(self) -> Offsets:
        """Return the offset of each record in `data` and the end of the last one; int64, shape `(records + 1,)`.

        They come from an index next to the file, or from a pass over the file, whose result is saved if possible.

        Raises:
            ShardCorrupt: a record is invalid, or the file has changed.
        """
        found = None
        if self.state is not None:
            found = self._own()
            found = self._foreign() if found is None else found
        if found is None:
            found = self._walked()
            if self.state is not None:
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
                "length_sum": "corrupted: the checksum of the record's length differs, or this is not a TFRecord file",
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
        return found if self._are_contiguous(found) else None

    def _foreign(self) -> Offsets | None:
        """Return the offsets from another program's index next to this file, lines of "start length"; None if they do not match."""
        for path in (path for suffix in FOREIGN_SUFFIXES for path in (self.path + suffix, Path(self.path).with_suffix(suffix))):
            try:
                numbers = np.array(Path(path).read_bytes().split(), np.int64).reshape(-1, 2)
            except (OSError, ValueError, OverflowError):
                continue
            offsets = np.append(numbers[:, 0], self.nbytes)
            if self._are_contiguous(offsets) and np.array_equal(np.diff(offsets), numbers[:, 1]):
                return offsets
            log.warning("%s does not fit %s and is ignored", path, self.path)
        return None

    def _are_contiguous(self, offsets: Offsets) -> bool:
        """Return whether offsets are valid: they begin and end with the file, and each record has room for its frame."""
        size = self.nbytes
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != size or offsets.min() < 0 or offsets.max() > size:
            return False  # offsets within the file cannot overflow when they are subtracted
        return bool(np.all(np.diff(offsets) >= OVERHEAD))


def write_index(path: str, identity: dict[str, Any], offsets: Offsets) -> None:
    """Write the index next to a file if possible.

    Args:
        path: path of the file.
        identity: its name, size and modification time, by which the index is recognized as its own.
        offsets: a result of `RecordFile.offsets`.
    """
    body = offsets.tobytes()
    head = json.dumps({**identity, "crc32c": crc32c(body)}).encode()
    write_if_possible(path + SUFFIX, MAGIC + head + b"\n" + body)


def compression_of_records(begin: bytes) -> str | None:
    """Return the compression that a TFRecord file's first 12 bytes indicate: "none", "gzip" or "zlib"; None for another format."""
    if len(begin) >= 12 and masked(crc32c(begin[:8])) == int.from_bytes(begin[8:12], "little"):
        return "none"
    if begin[:2] == b"\x1f\x8b":
        return "gzip"
    if len(begin) >= 2 and begin[0] == 0x78 and (begin[0] << 8 | begin[1]) % 31 == 0:
        return "zlib"
    return None
