"""A TFRecord file's bytes and where its records begin.

Plain files are mapped, read-only: all processes share the page cache, and a forked child its parent's mapping. Files compressed
as a whole cannot be sought in, so they are inflated once per process into private memory: that costs the inflated size in each
process that was not forked after it, and CPU time.

A file that is replaced or removed stays whole in its mapping. One that is written over or cut off is noticed, before and after each
batch; what remains is a file cut off between the two, whose reader the system kills (SIGBUS), as with any mapping.

Offsets are taken from our own file beside the shard (`<name>.shmload-index`), else from a tfindex file that fits it, else from a
walk, whose result is then written beside it if the folder allows.

    our index: "SHMLOAD TFRECORD INDEX 1\n" | json of name, size, mtime_ns, crc32c of the offsets "\n" | int64 offsets

Writing TFRecord files: whole or not at all, and the same bytes for the same records.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shmload._core.crc32c import crc32c, masked
from shmload._core.mapped_file import MappedFile
from shmload._core.record_writer import BYTES, FLOATS, INTS, RecordBuffer
from shmload._core.records import record_starts
from shmload.errors import ShardCorrupt
from shmload.formats.paths import inflated, make_half, write_whole

MAGIC = b"SHMLOAD TFRECORD INDEX 1\n"
SUFFIX = ".shmload-index"
FOREIGN_SUFFIXES = (".tfindex", ".index", ".idx")  # of indexes that other programs keep beside files
COMPRESSIONS = ("auto", "none", "gzip", "zlib")
CHANGED = "the file was changed while it was in use; it had {was} bytes when it was opened: make the dataset anew"
OVERHEAD = 16  # bytes of a record beside its data

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
            try:
                self.data = inflated(self.data, kind, max_inflated_bytes, "; raise max_inflated_bytes if that is right")
            except ValueError as error:
                raise ShardCorrupt(f"{path}: {error}") from error
            self.state = None
            self._check()

    def offsets(self) -> Offsets:
        """Where records begin: from the index beside this file, or by a walk."""
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

    def _foreign(self) -> Offsets | None:
        """Offsets of the lines "start length" that another program keeps beside the file, if records lie so end to end."""
        for path in (path for suffix in FOREIGN_SUFFIXES for path in (self.path + suffix, Path(self.path).with_suffix(suffix))):
            try:
                numbers = np.array(Path(path).read_bytes().split(), np.int64).reshape(-1, 2)
            except (OSError, ValueError, OverflowError):
                continue
            offsets = np.append(numbers[:, 0], self.nbytes)
            if self._lie_end_to_end(offsets) and np.array_equal(np.diff(offsets), numbers[:, 1]):
                return offsets
            log.warning("%s does not fit %s: its records are looked for anew", path, self.path)
        return None

    def _lie_end_to_end(self, offsets: Offsets) -> bool:
        """Whether offsets begin with the file, end with it, and leave each record room for its frame."""
        size = self.nbytes
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != size or offsets.min() < 0 or offsets.max() > size:
            return False  # what lies within the file can be subtracted: it does not wrap
        return bool(np.all(np.diff(offsets) >= OVERHEAD))


def write_index(path: str, identity: dict[str, Any], offsets: Offsets) -> None:
    """Writes the index beside a file, if its folder allows it."""
    body = offsets.tobytes()
    head = json.dumps({**identity, "crc32c": crc32c(body)}).encode()
    write_whole(path + SUFFIX, MAGIC + head + b"\n" + body)


def _compression_of(head: bytes) -> str:
    """What a file's first 12 bytes look like."""
    if len(head) == 12 and masked(crc32c(head[:8])) == int.from_bytes(head[8:], "little"):
        return "none"
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    if len(head) >= 2 and head[0] == 0x78 and (head[0] << 8 | head[1]) % 31 == 0:
        return "zlib"
    return "none"


_FULL = 1 << 20  # bytes of records written to the file at a time


class TFRecordWriter:
    """Writes records under a temporary name beside `path`, which takes its place when the writer is closed.

    As a context manager it leaves no file, and an older one untouched, if the block raises.

    Args:
        path: of the file; its folder must be there.
        compression: None, "gzip" or "zlib", of the whole file.
        raw: fields of dicts whose arrays are written as one value of bytes each, as they lie in memory: for images and anything
            else whose type a float_list or int64_list would change. Their schema gives dtype and shape back.
        index: also write where the records begin, beside the file, as `TFRecordDataset` would on its first pass.
    Raises:
        ValueError: an unknown compression, or an index of a compressed file.
        OSError: nothing can be written beside `path`.
    Cost: one copy of each value, and its checksum. Records go to the file a MiB at a time.
    Example:
        >>> import tempfile
        >>> from shmload.formats import TFRecordDataset, TFRecordWriter
        >>> path = f"{tempfile.mkdtemp()}/train.tfrecord"
        >>> with TFRecordWriter(path) as writer:
        ...     for label in range(3):
        ...         writer.write({"label": label, "name": f"sample {label}"})
        >>> TFRecordDataset(path, {"label": "int64", "name": str})[2]["name"]
        'sample 2'
    """

    def __init__(
        self, path: str | os.PathLike[str], *, compression: str | None = None, raw: Iterable[str] = (), index: bool = False
    ) -> None:
        if compression not in (None, "gzip", "zlib"):
            raise ValueError(f'compression is None, "gzip" or "zlib"; got {compression!r}')
        if index and compression:
            raise ValueError("index=True needs compression=None: a compressed file cannot be sought in")
        self.path = os.fspath(path)
        self.num_records = 0
        self.nbytes = 0  # of the records so far, before they are compressed
        self._raw = frozenset(raw)
        self._starts = [0] if index else None
        self._compression = compression
        self._buffer = RecordBuffer()
        self._file: Any = cast(Any, path) if hasattr(path, "publish") else _HalfFile(self.path)  # the growing cache has its own
        self._sink: Any = self._file
        if compression == "gzip":
            self._sink = gzip.GzipFile("", "wb", fileobj=self._sink, mtime=0)
        elif compression:
            self._sink = _Deflated(self._sink)

    def write(self, record: Any) -> None:
        """Writes one record: bytes as they are, or a dict as a tf.train.Example with its keys sorted.

        Floats become a float_list (float64 is rounded to float32, the only float of the format), integers and bools an int64_list,
        str, bytes and lists of them a bytes_list; shapes are not kept. Arrays and tensors of any shape are taken.

        Args:
            record: bytes, or a dict by field.
        Raises:
            TypeError: a field holds what no list of the format can.
            ValueError: a number is beyond int64, or the writer is closed.
        """
        if isinstance(record, Mapping):
            fields = [(name.encode(), *self._values(name, record[name])) for name in sorted(record)]
            self._appended(self._open().append_example(fields))
        else:
            self._appended(self._open().append(record))

    def write_sequence(self, context: Mapping[str, Any], feature_lists: Mapping[str, Iterable[Any]]) -> None:
        """Writes one tf.train.SequenceExample.

        Args:
            context: fields of the whole record, as of `write`.
            feature_lists: lists by field; each value of a list is one step.
        Raises:
            TypeError, ValueError: as of `write`.
        """
        fields = [(name.encode(), *self._values(name, context[name])) for name in sorted(context)]
        lists = [(name.encode(), [self._values(name, step) for step in feature_lists[name]]) for name in sorted(feature_lists)]
        self._appended(self._open().append_sequence(fields, lists))

    def _open(self) -> RecordBuffer:
        if self._file is None:
            raise ValueError(f"the writer of {self.path} is closed")
        return self._buffer

    def _appended(self, nbytes: int) -> None:
        self.num_records += 1
        self.nbytes += nbytes
        if self._starts is not None:
            self._starts.append(self.nbytes)
        if self._buffer.nbytes >= _FULL:
            self._buffer.write_to(self._sink)

    def _values(self, name: str, value: Any) -> tuple[int, list[Any]]:
        """The kind of a field's list and the buffers of its values."""
        if isinstance(value, bytes | bytearray | memoryview):
            return BYTES, [value]
        if isinstance(value, str):
            return BYTES, [value.encode()]
        if type(value) is int and -(2**63) <= value < 2**63 and name not in self._raw:
            return INTS, [value.to_bytes(8, "little", signed=True)]
        if isinstance(value, list | tuple) and value and isinstance(value[0], str | bytes):
            return BYTES, [v.encode() if isinstance(v, str) else v for v in value]
        array = np.ascontiguousarray(value)
        if name in self._raw:
            return BYTES, [array.reshape(-1).view(np.uint8)]
        if array.dtype.kind == "f":
            return FLOATS, [array.astype(np.float32, copy=False)]
        if array.dtype.kind in "iub":
            if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
                raise ValueError(f"field {name!r} holds {int(array.max())}: an int64_list ends at 2**63 - 1")
            return INTS, [array.astype(np.int64, copy=False)]
        raise TypeError(
            f"field {name!r} is a {type(value).__name__} of dtype {array.dtype}: an Example holds floats, integers, bools, str and "
            "bytes; name it in raw= to write its memory"
        )

    def close(self) -> None:
        """Writes what is left and gives the file its name."""
        if self._file is None:
            return
        try:
            self._buffer.write_to(self._sink)
            if self._compression:
                self._sink.close()
            status = self._file.publish(self.num_records)
        except BaseException:
            self.abandon()
            raise
        self._file = None
        if self._starts is not None:
            identity = {"name": Path(self.path).name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
            write_index(self.path, identity, np.array(self._starts, np.int64))

    def abandon(self) -> None:
        """Gives up: leaves no file, and an older one untouched."""
        if self._file is not None:
            file, self._file = self._file, None
            file.abandon()

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class _HalfFile:
    """A file beside its place, which it takes when it is whole. It writes all it is given: a single write() may stop short."""

    def __init__(self, path: str) -> None:
        self._path = path
        descriptor, self._name = make_half(path)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def write(self, data: Any) -> int:
        view = memoryview(data)
        at = 0
        while at < view.nbytes:
            at += self._file.write(view[at:])
        return at

    def flush(self) -> None: ...

    def publish(self, num_records: int) -> os.stat_result:
        status = os.fstat(self._file.fileno())
        os.replace(self._name, self._path)
        self._file.close()
        return status

    def abandon(self) -> None:
        self._file.close()
        os.unlink(self._name)


class _Deflated:
    """A file that is written through zlib."""

    def __init__(self, sink: Any) -> None:
        self._deflate, self._sink = zlib.compressobj(), sink

    def write(self, data: Any) -> None:
        self._sink.write(self._deflate.compress(data))

    def close(self) -> None:
        self._sink.write(self._deflate.flush())
