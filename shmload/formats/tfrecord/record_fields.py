"""The fields that a schema requires of a record, and the errors for records that do not have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmload._core.records import KINDS
from shmload.batch.element_types import ElementType, of_any
from shmload.batch.layout import fits
from shmload.errors import SampleError, ShardCorrupt, ShmloadError
from shmload.formats.images.decoder import ImageDecoder
from shmload.formats.tfrecord.record_file import CHANGED

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
    """One field of the schema: its element type (None for text), its shape with at most one None, its default row or None.

    A field with a decoder may have several None in its shape, and its default is the value before decoding.
    """

    name: str
    element: ElementType | None
    shape: tuple[int | None, ...]
    is_str: bool = False
    fill: bytes | None = None
    decode: Callable[[bytes], Any] | None = None

    @property
    def is_text(self) -> bool:
        """Return whether the field is read as one str or bytes."""
        return self.element is None or self.decode is not None

    @property
    def is_ragged(self) -> bool:
        """Return whether rows of the field differ in extent."""
        return None in self.shape

    @property
    def numel(self) -> int:
        """Return the number of values of a row, or of one step along the ragged dimension."""
        return math.prod(extent for extent in self.shape if extent is not None)

    def native(self) -> tuple[Any, ...]:
        """Return the field in the form that `RecordReader` takes."""
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
    """Return the fields of a schema.

    Raises:
        TypeError, ValueError: the schema is invalid, or a record cannot have such a field.
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
    """Return the error for a `Survey.problem`.

    Args:
        file_nbytes: size of each file when it was opened.
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
    """Return the value of a field, in memory of its own.

    Raises:
        ValueError: the value does not match the schema.
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
    """Write the value of a field to its row. See `shmload.ShmLoader` for `out`.

    Raises:
        ValueError: the value does not match the schema.
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
