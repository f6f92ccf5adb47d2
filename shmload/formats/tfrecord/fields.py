"""What a schema asks of a record, and the words for what a record does not give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmload._core.records import KINDS
from shmload.batch.dtypes import ElementType, of_any
from shmload.errors import SampleError, ShardCorrupt, ShmloadError
from shmload.formats.tfrecord.files import CHANGED

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
    return [
        _decoded(name, spec, defaults.get(name), decode[name])
        if name in decode
        else _field(str(name), spec, defaults.get(name))
        for name, spec in schema.items()
    ]


def _decoded(name: str, spec: Any, default: Any, decode: Callable[[bytes], Any]) -> RecordField:
    dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
    if dtype in (str, bytes) or (element := of_any(dtype)).numpy is None:
        raise ValueError(f"schema field {name!r} is {dtype}: decoders make arrays of numpy's types")
    if not isinstance(default, bytes | None):
        raise ValueError(f"defaults[{name!r}] needs the bytes that its decoder takes; got a {type(default).__name__}")
    return RecordField(name, element, tuple(shape), fill=default, decode=decode)


def _field(name: str, spec: Any, default: Any) -> RecordField:
    dtype, shape = spec if isinstance(spec, tuple) else (spec, ())
    if dtype in (str, bytes):
        fill = default.encode() if isinstance(default, str) else default
        return RecordField(name, None, (), dtype is str, fill)
    element = of_any(dtype)
    extents = tuple(None if extent is None else int(extent) for extent in shape)
    if extents.count(None) > 1:
        raise ValueError(
            f"schema field {name!r} has shape {extents}: a record holds no shapes, so at most one extent may be None"
        )
    if default is None:
        return RecordField(name, element, extents)
    if element.numpy is None or None in extents:
        raise ValueError(f"defaults[{name!r}]: only text and fields of a fixed shape and numpy's types have defaults")
    row = np.broadcast_to(np.asarray(default, element.numpy), tuple(e for e in extents if e is not None))
    return RecordField(name, element, extents, fill=row.tobytes())


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
