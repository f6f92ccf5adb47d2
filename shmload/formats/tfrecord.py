r"""A TFRecord file's bytes and where its records begin.

Plain files are mapped, read-only: all processes share the page cache, and a forked child its parent's mapping. Files compressed
as a whole cannot be sought in, so they are inflated once per process into private memory: that costs the inflated size in each
process that was not forked after it, and CPU time.

A file that is replaced or removed stays whole in its mapping. One that is written over or cut off is noticed, before and after each
batch; what remains is a file cut off between the two, whose reader the system kills (SIGBUS), as with any mapping.

Offsets are taken from our own file beside the shard (`<name>.shmload-index`), else from a tfindex file that fits it, else from a
walk, whose result is then written beside it if the folder allows.

    our index: "SHMLOAD TFRECORD INDEX 1\n" | json of name, size, mtime_ns, crc32c of the offsets "\n" | int64 offsets

Writing TFRecord files: whole or not at all, and the same bytes for the same records.

TFRecord files as one dataset: any record at any time, decoded into the batch's rows without the GIL.

What a schema asks of a record, and the words for what a record does not give.

Fields whose one value of bytes is decoded in Python: images, and what else a function makes of bytes.

An `ImageDecoder` writes the image where it is delivered; what any other function gives is checked and copied there.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shmload._core.crc32c import crc32c, masked
from shmload._core.mapped_file import MappedFile
from shmload._core.record_writer import BYTES, FLOATS, INTS, RecordBuffer
from shmload._core.records import KINDS, RecordReader, Survey, record_starts
from shmload.batch.element_types import ElementType, of_any
from shmload.batch.layout import fits
from shmload.batch.row_placer import OneSample, SingleRow
from shmload.errors import SampleError, ShardCorrupt, ShmloadError
from shmload.formats.columns import PerProcess
from shmload.formats.images.decoder import ImageDecoder
from shmload.formats.paths import AtomicWriter, Paths, check_replaceable, expanded, inflated, make_half, write_if_possible

MAGIC = b"SHMLOAD TFRECORD INDEX 1\n"
SUFFIX = ".shmload-index"
FOREIGN_SUFFIXES = (".tfindex", ".index", ".idx")  # of indexes that other programs keep beside files
_ENDINGS = tuple(f".tfrecord{s}{packing}" for s in ("", "s") for packing in ("", ".gz", ".zz"))
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
        kind = compression if compression != "auto" else compression_of_records(bytes(self.data[:12])) or "none"
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
    write_if_possible(path + SUFFIX, MAGIC + head + b"\n" + body)


def compression_of_records(begin: bytes) -> str | None:
    """Return what a TFRecord file's first 12 bytes look like: "none", "gzip" or "zlib"; None: none of these."""
    if len(begin) >= 12 and masked(crc32c(begin[:8])) == int.from_bytes(begin[8:12], "little"):
        return "none"
    if begin[:2] == b"\x1f\x8b":
        return "gzip"
    if len(begin) >= 2 and begin[0] == 0x78 and (begin[0] << 8 | begin[1]) % 31 == 0:
        return "zlib"
    return None


_FULL = 1 << 20  # bytes of records written to the file at a time


class TFRecordWriter(AtomicWriter):
    """Writes records under a temporary name beside `path`, which takes its place when the writer is closed.

    As a context manager it leaves no file, and an older one untouched, if the block raises.

    Args:
        path: of the file; its folder must be there.
        compression: None, "gzip" or "zlib", of the whole file.
        raw: fields of dicts whose arrays are written as one value of bytes each, in this machine's byte order: for images and
            anything else whose type a float_list or int64_list would change. Their schema gives dtype and shape back.
        index: also write where the records begin, beside the file, as `TFRecordDataset` would on its first pass.
    Raises:
        ValueError: an unknown compression, an index of a compressed file, or no file lies at `path`, but a device, say.
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
        if compression:
            self._sink = _Deflated(self._sink, 31 if compression == "gzip" else zlib.MAX_WBITS)

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
            self._appended(self._open().append(_native(record) if isinstance(record, np.ndarray) else record))

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
        array = self._array(name, value)
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

    def _array(self, name: str, value: Any) -> NDArray[Any]:
        """A field's value in this machine's byte order, in which raw ones are read.

        Raises:
            TypeError, ValueError: there is none.
        """
        try:
            if not isinstance(value, np.ndarray) and hasattr(value, "untyped_storage"):
                value = _of_tensor(value, is_raw=name in self._raw)
            array = np.ascontiguousarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"field {name!r}: {error}") from error
        if array.dtype.hasobject and isinstance(value, int):
            raise ValueError(f"field {name!r} holds {value}: an int64_list ends at 2**63 - 1")
        if array.dtype.hasobject:
            raise TypeError(f"field {name!r} is a {type(value).__name__}: an Example holds floats, integers, bools, str and bytes")
        native: NDArray[Any] = _native(array)
        return native

    def finish(self) -> None:
        """Hands what is left to the file, behind which nothing can be written any more."""
        self._buffer.write_to(self._sink)
        if self._sink is not self._file:
            self._sink.close()
            self._sink = self._file

    def close(self) -> None:
        """Writes what is left and gives the file its name."""
        if self._file is None:
            return
        try:
            self.finish()
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


def _native(array: Any) -> Any:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _of_tensor(tensor: Any, *, is_raw: bool) -> Any:
    """A tensor's values, or its memory, as numpy holds them: it has no bfloat16, for one."""
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:
        if not is_raw and not tensor.is_floating_point():
            raise
        return tensor.reshape(-1).view(sys.modules["torch"].uint8).numpy() if is_raw else tensor.float().numpy()


class _HalfFile:
    """A file beside its place, which it takes when it is whole."""

    def __init__(self, path: str) -> None:
        check_replaceable(path)
        self._path = path
        descriptor, self._name = make_half(path)
        self._file = os.fdopen(descriptor, "wb")  # buffered: it writes all it is given, where a single write() may stop short
        self.write, self.flush = self._file.write, self._file.flush

    def publish(self, num_records: int) -> os.stat_result:
        self._file.close()
        status = os.stat(self._name)
        os.replace(self._name, self._path)
        return status

    def abandon(self) -> None:
        os.unlink(self._name)  # first: closing may fail
        self._file.raw.close()  # without writing what is left


class _Deflated:
    """A file that is written through zlib, in the format that `wbits` names as zlib's manual says."""

    def __init__(self, sink: Any, wbits: int) -> None:
        self._deflate, self._sink = zlib.compressobj(wbits=wbits), sink

    def write(self, data: Any) -> None:
        self._sink.write(self._deflate.compress(data))

    def close(self) -> None:
        self._sink.write(self._deflate.flush())


_FOUND = ("nothing", "a bytes_list", "a float_list", "an int64_list")
_CAUSES = {
    "header": "truncated: fewer than 12 bytes are left for a record's header",
    "length_sum": "corrupted: the checksum of the record's length differs, so the length cannot be believed",
    "truncated": "truncated: the record's length of {nbytes} bytes goes beyond the end of the file",
    "sum": "corrupted: the checksum of the record's {nbytes} bytes differs",
    "wire": "not a valid message: the record's {nbytes} bytes do not parse",
    "changed": CHANGED,
    "twice": "field {name!r} is both in the context and in the feature lists",
}
_MISFITS = {
    "missing": "field {name!r} is missing; give TFRecordDataset(defaults={{{name!r}: ...}}) a value for records without it",
    "kind": "field {name!r} needs {wanted}; the record has {kind} of {count} values",
    "count": "field {name!r} needs {wanted}; the record has {kind} of {count} values",
    "size": "field {name!r} needs {wanted}; the record has one value of {value_nbytes} bytes",
    "range": "field {name!r} needs {wanted}; the record has a number outside of that type's range",
}


@dataclass(frozen=True)
class RecordField:
    """One field of the schema: its element type (None: text), its shape with at most one None, its default row or None.

    A field with a decoder may have several None, and its default is what would be decoded.
    """

    name: str
    element: ElementType | None
    shape: tuple[int | None, ...]
    is_str: bool = False
    fill: bytes | None = None
    decode: Callable[[bytes], Any] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is read as one str or bytes."""
        return self.element is None or self.decode is not None

    @property
    def is_ragged(self) -> bool:
        """Whether its rows differ in extent."""
        return None in self.shape

    @property
    def numel(self) -> int:
        """Values of a row, or of one step along the ragged dimension."""
        return math.prod(extent for extent in self.shape if extent is not None)

    def native(self) -> tuple[Any, ...]:
        """The field as `RecordReader` takes it."""
        if self.element is None or self.decode is not None:
            return self.name.encode(), 0, 1, 1, False, True, self.fill
        kind = KINDS.get(self.element.name, 0)
        return self.name.encode(), kind, self.element.itemsize, self.numel, self.is_ragged, False, self.fill

    def __str__(self) -> str:
        if self.element is None:
            return f"one value of {'str' if self.is_str else 'bytes'}"
        return f"{self.element.name} of shape {self.shape}"


def fields_of(
    schema: Mapping[str, Any], defaults: Mapping[str, Any], decode: Mapping[str, Callable[[bytes], Any]] | None = None
) -> list[RecordField]:
    """The fields of a schema.

    Raises:
        TypeError, ValueError: the schema is none, or a record cannot have such a field.
    """
    if not isinstance(schema, Mapping) or not schema:
        raise TypeError(f"a schema is a mapping name -> (dtype, shape) with at least one field; got {schema!r}")
    if unknown := set(defaults) - set(schema):
        raise ValueError(f"defaults are for fields of the schema; {sorted(unknown)} are not among {list(schema)}")
    decode = decode or {}
    if unknown := set(decode) - set(schema):
        raise ValueError(f"decode names {sorted(unknown)}, and the schema only {list(schema)}: it says what decoders make")
    return [_field(str(name), spec, defaults.get(name), decode.get(name)) for name, spec in schema.items()]


def _field(name: str, spec: Any, default: Any, decode: Callable[[bytes], Any] | None) -> RecordField:
    dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
    is_text = dtype in (str, bytes)
    element = None if is_text else of_any(dtype)
    extents = tuple(None if extent is None else int(extent) for extent in shape)
    if decode is not None:
        if isinstance(decode, ImageDecoder) and spec != decode.spec:
            raise ValueError(f"schema[{name!r}] is {spec!r}, and its decoder makes {decode.spec}: give {{{name!r}: decoder.spec}}")
        if element is None or element.numpy is None:
            raise ValueError(f"schema field {name!r} is {dtype}: decoders make arrays of numpy's types")
        if not isinstance(default, bytes | None):
            raise ValueError(f"defaults[{name!r}] needs the bytes that its decoder takes; got a {type(default).__name__}")
        return RecordField(name, element, extents, fill=default, decode=decode)
    if element is None:
        return RecordField(name, None, (), dtype is str, default.encode() if isinstance(default, str) else default)
    if extents.count(None) > 1:
        raise ValueError(f"schema field {name!r} has shape {extents}: a record holds no shapes, so at most one extent may be None")
    if default is not None:
        if element.numpy is None or None in extents:
            raise ValueError(f"defaults[{name!r}]: only text and fields of a fixed shape and numpy's types have defaults")
        default = np.broadcast_to(np.asarray(default, element.numpy), tuple(e for e in extents if e is not None)).tobytes()
    return RecordField(name, element, extents, fill=default)


def error_of(
    problem: tuple[Any, ...], fields: list[RecordField], paths: list[str], file_nbytes: list[int], num_records: int
) -> Exception:
    """The error for what `Survey.problem` says.

    Args:
        file_nbytes: of each file when it was opened.
    """
    cause, _, index, file, start, nbytes, which, kind, count, value_nbytes = problem
    if cause == "index":
        return IndexError(f"index {index} is out of range for a TFRecordDataset of {num_records} records")
    field = fields[max(which, 0)]
    words: type[ShmloadError] = ShardCorrupt if cause in _CAUSES else SampleError
    text = (_CAUSES | _MISFITS)[cause].format(
        name=field.name,
        nbytes=nbytes,
        wanted=field,
        kind=_FOUND[kind],
        count=count,
        value_nbytes=value_nbytes,
        was=file_nbytes[file],
    )
    return words(f"{paths[file]}: record {index}, which starts at byte {start}: {text}")


Decode = Callable[[bytes], Any]


def decoded(field: RecordField, data: bytes) -> Any:
    """The value of a field, in memory of its own.

    Raises:
        ValueError: it is not what the schema says.
    """
    assert field.decode is not None
    value = field.decode(data)
    if isinstance(field.decode, ImageDecoder):
        return value
    array = np.asarray(value)
    assert field.element is not None
    if not fits(array.shape, field.shape) or array.dtype != field.element.numpy:
        raise ValueError(f"the schema says {field}, and its decoder made {array.dtype} of shape {array.shape}")
    return array


def decode_into(field: RecordField, data: bytes, out: Any) -> None:
    """Writes the value of a field to its row; see `shmload.ShmLoader` for `out`.

    Raises:
        ValueError: it is not what the schema says.
    """

    def place(shape: tuple[int, ...]) -> Any:
        if not field.is_ragged:
            return out[field.name]
        return out.reserve(field.name, tuple(shape[axis] for axis, n in enumerate(field.shape) if n is None))

    if isinstance(field.decode, ImageDecoder):
        field.decode.decode(data, place)
    else:
        value = decoded(field, data)
        place(value.shape)[...] = value


FORMS = ("raw", "example", "sequence")
LEVELS = ("none", "length", "all")


class TFRecordDataset:
    """Records of TFRecord files, by number, in the order of the files.

    Files are mapped when a process first reads; until then a dataset is its arguments, and so it is pickled, with the sizes of
    files it has seen: another process must find the same. Where records begin is found on the first `len()` and kept beside
    each file. A file that was written to since is an error; one that was replaced or removed is still read as it was.

    Args:
        paths: files, folders or patterns with * ? [ ]. The files of a folder or a pattern are sorted by name; those whose name, or
            a folder's on the way, begins with . or _ are left out. Of a folder those named *.tfrecord count, or if there are none,
            those whose name has no ending.
        schema: mapping name -> (dtype, shape); None in a shape is a ragged dimension, at most one a field; `str` and `bytes` are
            text. A bytes_list of one value fills a numeric field as it stands. None: {"bytes": bytes}, whole records.
        records: what a record is: "example", "sequence" (SequenceExample; a feature list is a field whose first extent is None), or
            "raw" (the schema has one field, which is the record). None: "raw" without a schema, else "example".
        verify: which checksums are compared: "all", "length" (of records' headers), "none". Bounds are always checked.
        defaults: values for records that lack a field. A ragged field that is lacking is empty.
        decode: {field: function} of fields whose one value of bytes becomes an array in Python, of the type and shape that the
            schema says: {"image": ImageDecoder(...)}, with {"image": decoder.spec} in the schema.
        compression: "gzip" or "zlib" of whole files, "none", or "auto", by a file's first bytes.
        max_inflated_bytes: a compressed file that is larger is an error.
    Raises:
        FileNotFoundError: a pattern matches nothing.
        ShardCorrupt: on reading: a file is not what the format says; names file, record, offset and cause.
        SampleError: on reading: a record is valid and does not fit the schema.
        ValueError: an option or a type that there is not, or options that do not go together.
    Thread/process safety: any number of readers.
    Example:
        >>> import tempfile
        >>> from shmload.formats import TFRecordDataset, TFRecordWriter
        >>> path = f"{tempfile.mkdtemp()}/train.tfrecord"
        >>> with TFRecordWriter(path) as writer:
        ...     for label in range(3):
        ...         writer.write({"label": label, "tokens": list(range(label))})
        >>> dataset = TFRecordDataset(path, {"label": "int64", "tokens": ("int64", (None,))})
        >>> len(dataset), dataset[2]["tokens"].tolist()
        (3, [0, 1])
    """

    def __init__(
        self,
        paths: Paths,
        schema: Mapping[str, Any] | None = None,
        *,
        records: str | None = None,
        verify: str = "all",
        defaults: Mapping[str, Any] | None = None,
        decode: Mapping[str, Callable[[bytes], Any]] | None = None,
        compression: str = "auto",
        max_inflated_bytes: int = 1 << 34,
    ) -> None:
        records = records or ("raw" if schema is None else "example")
        for name, value, allowed in (
            ("records", records, FORMS),
            ("verify", verify, LEVELS),
            ("compression", compression, COMPRESSIONS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}; got {value!r}")
        self.paths = expanded(paths, "TFRecord", endings=_ENDINGS, beside=(SUFFIX, *FOREIGN_SUFFIXES))
        self.schema: Mapping[str, Any] = {"bytes": bytes} if schema is None else schema
        self.records, self.verify, self.compression = records, verify, compression
        self.max_inflated_bytes = max_inflated_bytes
        self.defaults = dict(defaults or {})
        self._fields = fields_of(self.schema, self.defaults, decode)
        if records == "raw" and len(self._fields) != 1:
            raise ValueError(f'records="raw" needs a schema of one field, the whole record; got {list(self.schema)}')
        if records == "raw" and self.defaults:
            raise ValueError('records="raw" takes no defaults: no record lacks itself')
        self._file_nbytes: list[int] = []  # of each path when it was first opened, here or where this was pickled
        self._held: PerProcess[tuple[RecordReader, int]] = PerProcess(is_inherited=True)

    def _opened(self) -> tuple[RecordReader, int]:
        """What reads, and the number of records."""
        return self._held.get(self._open)

    def _open(self) -> tuple[RecordReader, int]:
        files = self._files()
        for file, was in zip(files, self._file_nbytes, strict=False):
            if was != file.nbytes:
                raise ShardCorrupt(
                    f"{file.path}: has {file.nbytes} bytes, and had {was} when this dataset first read it: make it anew"
                )
        self._file_nbytes[:] = [file.nbytes for file in files]
        offsets = [file.offsets() for file in files]
        ends = np.cumsum([len(o) - 1 for o in offsets], dtype=np.int64)
        reader = RecordReader(
            [file.data for file in files],
            [file.state for file in files],
            ends,
            np.concatenate([np.empty(0, np.int64), *(o[:-1] for o in offsets)]),
            [f.native() for f in self._fields],
            FORMS.index(self.records),
            LEVELS.index(self.verify),
        )
        return reader, int(ends[-1])

    def _files(self) -> list[RecordFile]:
        return [RecordFile(path, self.compression, self.max_inflated_bytes) for path in self.paths]

    def __len__(self) -> int:
        return self._opened()[1]

    def __repr__(self) -> str:
        return f"TFRecordDataset({len(self.paths)} files, {self.records}, {', '.join(self.schema)}, verify={self.verify!r})"

    def __getitem__(self, index: int) -> dict[str, Any]:
        out = OneSample(self.schema)
        survey, texts = self._read([index], out)
        for field in self._fields:
            if field.decode is not None:
                out[field.name] = [self._decoded(survey, field, partial(decoded, field, texts[field.name][0]))]
        return out.sample()

    @property
    def read_batch_into(self) -> Callable[[Any, Any], object] | None:
        """Reads records into rows, `read(indices, out)` as docs/own_format.md says. None where a decoder does part of that.

        A decoder may draw random numbers, which are each sample's own only if samples are read one by one.
        """
        return None if any(field.decode is not None for field in self._fields) else self._read

    def read_into(self, index: int, out: Any) -> None:
        """Reads one record into its row.

        Args:
            index: of the record.
            out: the row, with a place for each field of the schema.
        Raises:
            ShardCorrupt, SampleError: as the class says.
        """
        survey, texts = self._read([index], SingleRow(out))
        for field in self._fields:
            if field.decode is not None:
                self._decoded(survey, field, partial(decode_into, field, texts[field.name][0], out))

    def _read(self, indices: Any, out: Any) -> tuple[Survey, dict[str, list[Any]]]:
        """Writes rows of all but the fields with decoders; gives texts, and what is to be decoded."""
        if not any(field.is_text or field.is_ragged for field in self._fields):
            survey = self._survey(indices, [_memory_of(out[field.name]) for field in self._fields])
            if not survey.is_still_so():
                raise self._error(survey)
            return survey, {}
        survey = self._survey(indices)
        targets: list[Any] = []
        for number, field in enumerate(self._fields):
            if field.is_text:
                targets.append(None)
            elif field.is_ragged:
                targets.append(_memory_of(out.reserve(field.name, survey.steps(number))))
            else:
                targets.append(_memory_of(out[field.name]))
        # all of files that are as they were when it began
        if not survey.write(targets):
            raise self._error(survey)
        texts: dict[str, list[Any]] = {f.name: survey.texts(number) for number, f in enumerate(self._fields) if f.is_text}
        if not survey.is_still_so():
            raise self._error(survey)
        for field in self._fields:
            if field.is_str:
                texts[field.name] = [self._str(text, survey, row, field.name) for row, text in enumerate(texts[field.name])]
            if field.is_text and field.decode is None:
                out[field.name] = texts[field.name]
        return survey, texts

    def _survey(self, indices: Any, targets: list[Any] | None = None) -> Survey:
        reader, num_records = self._opened()
        wanted = np.ascontiguousarray(indices, np.int64)
        if wanted.size and wanted.min() < 0:
            wanted = np.where((wanted < 0) & (wanted >= -num_records), wanted + num_records, wanted)
        survey = reader.survey(wanted, targets)
        if survey.problem is not None:
            raise self._error(survey)
        return survey

    def _error(self, survey: Survey) -> Exception:
        return error_of(survey.problem or (), self._fields, self.paths, self._file_nbytes, len(self))

    def _decoded(self, survey: Survey, field: RecordField, decode: Callable[[], Any]) -> Any:
        try:
            return decode()
        except (ImportError, MemoryError):  # the record is not at fault
            raise
        except Exception as error:  # of a library or of the user's own decoder
            raise ShardCorrupt(f"{self._where(survey, 0)}: field {field.name!r}: {error}") from error

    def _str(self, text: bytes, survey: Survey, row: int, name: str) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            where = f"{self._where(survey, row)}: field {name!r}"
            raise SampleError(f"{where} needs UTF-8, as its type is str: {error}; give the schema bytes instead") from error

    def _where(self, survey: Survey, row: int) -> str:
        index, file, start = survey.place(row)
        return f"{self.paths[file]}: record {index}, which starts at byte {start}"


def _memory_of(rows: Any) -> Any:
    """An array's memory as a buffer: torch's types that numpy lacks go as bytes."""
    if isinstance(rows, np.ndarray):
        return rows
    import torch

    return rows.reshape(-1).view(torch.uint8).numpy()
