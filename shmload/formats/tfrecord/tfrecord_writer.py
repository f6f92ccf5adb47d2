"""`TFRecordWriter`: write TFRecord files atomically; the same records give the same bytes."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shmload._core.record_writer import BYTES, FLOATS, INTS, RecordBuffer
from shmload.formats.atomic_write import AtomicWriter, check_replaceable, make_half
from shmload.formats.tfrecord.record_file import write_index

_FULL = 1 << 20  # bytes of records written to the file at a time


class TFRecordWriter(AtomicWriter):
    """Writes records to a temporary file next to `path`, which is renamed to `path` when the writer is closed.

    If the block of a `with` statement raises, no file is left, and an older file stays unchanged.

    Args:
        path: path of the file; its folder must exist.
        compression: compression of the whole file: None, "gzip" or "zlib".
        raw: fields of dicts whose arrays are written as one bytes value each, in this machine's byte order: for images and anything
            else whose type a float_list or int64_list would change. The schema with which they are read has dtype and shape.
        index: also write the offsets of the records next to the file, as `TFRecordDataset` would on its first pass.
    Raises:
        ValueError: the compression is unknown, an index of a compressed file is requested, or `path` exists and is not a file but,
            for example, a device.
        OSError: nothing can be written next to `path`.
    Cost: one copy of each value, and its checksum. Records are written to the file a MiB at a time.
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
            raise ValueError("index=True needs compression=None: a compressed file has no random access")
        self.path = os.fspath(path)
        self.num_records = 0
        self.nbytes = 0  # size of the records so far, before compression
        self._raw = frozenset(raw)
        self._starts = [0] if index else None
        self._compression = compression
        self._buffer = RecordBuffer()
        self._file: Any = cast(Any, path) if hasattr(path, "publish") else _HalfFile(self.path)  # the growing cache passes a file
        self._sink: Any = self._file
        if compression:
            self._sink = _Deflated(self._sink, 31 if compression == "gzip" else zlib.MAX_WBITS)

    def write(self, record: Any) -> None:
        """Write one record: bytes unchanged, or a dict as a tf.train.Example with its keys sorted.

        Floats become a float_list (float64 is rounded to float32, the only float of the format), integers and bools an int64_list,
        and str, bytes and lists of these a bytes_list. Arrays and tensors may have any shape; shapes are not stored.

        Args:
            record: bytes, or a dict by field.
        Raises:
            TypeError: a field has a value that no list of the format can contain.
            ValueError: a number is beyond int64 or float32, or the writer is closed.
        """
        if isinstance(record, Mapping):
            fields = [(name.encode(), *self._values(name, record[name])) for name in sorted(record)]
            self._appended(self._open().append_example(fields))
        else:
            self._appended(self._open().append(_native(record) if isinstance(record, np.ndarray) else record))

    def write_sequence(self, context: Mapping[str, Any], feature_lists: Mapping[str, Iterable[Any]]) -> None:
        """Write one tf.train.SequenceExample.

        Args:
            context: fields of the whole record, as for `write`.
            feature_lists: lists by field; each value of a list is one step.
        Raises:
            TypeError, ValueError: as for `write`.
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
        """Return the kind of a field's list, and the buffers of its values."""
        if isinstance(value, bytes | bytearray | memoryview):
            return BYTES, [value]
        if isinstance(value, str):
            return BYTES, [value.encode()]
        if type(value) is int and -(2**63) <= value < 2**63 and name not in self._raw:
            return INTS, [value.to_bytes(8, "little", signed=True)]
        if type(value) is float and name not in self._raw:
            return FLOATS, [_float32_bytes(name, value)]
        if isinstance(value, list | tuple) and value and isinstance(value[0], str | bytes | bytearray | memoryview):
            return BYTES, [v.encode() if isinstance(v, str) else v for v in value]
        array = self._array(name, value)
        if name in self._raw:
            return BYTES, [array.reshape(-1).view(np.uint8)]
        if array.dtype.kind == "f":
            return FLOATS, [_as_float32(name, array)]
        if array.dtype.kind in "iub":
            if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
                raise ValueError(f"field {name!r} holds {int(array.max())}: an int64_list has numbers from -2**63 to 2**63 - 1")
            return INTS, [array.astype(np.int64, copy=False)]
        raise TypeError(
            f"field {name!r} is of type {type(value).__name__} and dtype {array.dtype}: an Example can store floats, integers, "
            "bools, str and bytes; name it in raw= to write its memory"
        )

    def _array(self, name: str, value: Any) -> NDArray[Any]:
        """Return a field's value as a contiguous array in this machine's byte order, in which raw fields are read again.

        Raises:
            TypeError, ValueError: the value cannot be an array.
        """
        try:
            if not isinstance(value, np.ndarray) and hasattr(value, "untyped_storage"):
                value = _of_tensor(value, is_raw=name in self._raw)
            array = np.ascontiguousarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"field {name!r}: {error}") from error
        if array.dtype.kind in "fO" and isinstance(value, int | list | tuple):
            numbers = np.asarray(value, object).ravel().tolist()  # numpy makes [2**63, -1] floats
            if numbers and all(isinstance(number, int) for number in numbers):
                large = max(numbers, key=abs)
                raise ValueError(f"field {name!r} holds {large}: an int64_list has numbers from -2**63 to 2**63 - 1")
        if array.dtype.hasobject:
            raise TypeError(
                f"field {name!r} is of type {type(value).__name__}: an Example can store floats, integers, bools, str and bytes"
            )
        native: NDArray[Any] = _native(array)
        return native

    def finish(self) -> None:
        """Write the remaining records and the end of the compressed stream to the file, which keeps its temporary name."""
        self._buffer.write_to(self._sink)
        if self._sink is not self._file:
            self._sink.close()
            self._sink = self._file

    def close(self) -> None:
        """Write the remaining records and give the file its name."""
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
        """Discard the file. An older file at its path stays unchanged."""
        if self._file is not None:
            file, self._file = self._file, None
            file.abandon()


def _as_float32(name: str, array: NDArray[Any]) -> NDArray[np.float32]:
    """Return floats in the only type that an Example has for them.

    Raises:
        ValueError: a finite number would become infinite.
    """
    if array.dtype.itemsize <= 4:
        return array.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        floats = array.astype(np.float32)
    if (too_large := np.isinf(floats) & np.isfinite(array)).any():
        raise _too_large(name, array[too_large][0])
    return floats


def _float32_bytes(name: str, value: float) -> bytes:
    """Return the bytes of one number in that type.

    Raises:
        ValueError: it would become infinite.
    """
    try:
        return struct.pack("<f", value)
    except OverflowError:
        raise _too_large(name, value) from None


def _too_large(name: str, value: float) -> ValueError:
    return ValueError(f"field {name!r} holds {value}: a float_list ends at 3.4e38 (float32). Scale it, or name the field in raw=")


def _native(array: Any) -> Any:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _of_tensor(tensor: Any, *, is_raw: bool) -> Any:
    """Return a tensor's values, or its memory if numpy lacks its type, such as bfloat16."""
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:
        if not is_raw and not tensor.is_floating_point():
            raise
        return tensor.reshape(-1).view(sys.modules["torch"].uint8).numpy() if is_raw else tensor.float().numpy()


class _HalfFile:
    """A file under a temporary name, which is renamed when it is complete."""

    def __init__(self, path: str) -> None:
        check_replaceable(path)
        self._path = path
        descriptor, self._name = make_half(path)
        self._file = os.fdopen(descriptor, "wb")  # buffered, because a single write() may write less than it is given
        self.write, self.flush = self._file.write, self._file.flush

    def publish(self, num_records: int) -> os.stat_result:
        self._file.close()
        status = os.stat(self._name)
        os.replace(self._name, self._path)
        return status

    def abandon(self) -> None:
        os.unlink(self._name)  # first, because closing may fail
        self._file.raw.close()  # without writing the buffer


class _Deflated:
    """Compresses what is written to it and writes it to `sink`. `wbits` selects gzip or zlib, as in zlib's manual."""

    def __init__(self, sink: Any, wbits: int) -> None:
        self._deflate, self._sink = zlib.compressobj(wbits=wbits), sink

    def write(self, data: Any) -> None:
        self._sink.write(self._deflate.compress(data))

    def close(self) -> None:
        self._sink.write(self._deflate.flush())
