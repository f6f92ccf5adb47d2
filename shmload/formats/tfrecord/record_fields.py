"""The fields that a schema requires of a record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmload._core.records import KINDS
from shmload.batch.element_types import ElementType, of_any
from shmload.batch.layout import dtype_and_shape
from shmload.formats.images.crops import check_decoder
from shmload.formats.images.decoder import decodes_in_place


@dataclass(frozen=True)
class RecordField:
    """One field that a schema requires of records.

    Attributes:
        name: name of the field.
        element: type of its elements; None for text.
        shape: shape of a row, with at most one None, or several if the field has a decoder.
        is_str: whether text is str instead of bytes.
        fill: the row of records without the field, as bytes, before decoding; None if records must have it.
        decode: converts the bytes of the field to an array.
    """

    name: str
    element: ElementType | None
    shape: tuple[int | None, ...]
    is_str: bool = False
    fill: bytes | None = None
    decode: Callable[[bytes], Any] | None = None

    @property
    def is_text(self) -> bool:
        """Return whether native code returns the field as bytes, because it is text or is decoded in Python."""
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

    Args:
        schema, defaults, decode: as for `TFRecordDataset`.
    Raises:
        TypeError, ValueError: the schema is invalid, or a record cannot have such a field.
    """
    if not isinstance(schema, Mapping) or not schema:
        raise TypeError(f"a schema is a mapping name -> (dtype, shape) with at least one field; got {schema!r}")
    if unknown := set(defaults) - set(schema):
        raise ValueError(f"defaults are for fields of the schema; {sorted(unknown)} are not among {list(schema)}")
    decode = decode or {}
    if unknown := set(decode) - set(schema):
        raise ValueError(f"decode names {sorted(unknown)}, but the schema has only {list(schema)}: add what the decoders return")
    return [_field(str(name), spec, defaults.get(name), decode.get(name)) for name, spec in schema.items()]


def _field(name: str, spec: Any, default: Any, decode: Callable[[bytes], Any] | None) -> RecordField:
    dtype, extents = dtype_and_shape(name, spec)
    element = None if dtype in (str, bytes) else of_any(dtype)
    if decode is not None:
        check_decoder(f"decode[{name!r}]", decode)
        if decodes_in_place(decode) and spec != decode.spec:
            raise ValueError(f"schema[{name!r}] is {spec!r}, and its decoder makes {decode.spec}: give {{{name!r}: decoder.spec}}")
        if element is None or element.numpy is None:
            raise ValueError(f"schema field {name!r} is {dtype}: decoders make arrays of numpy's types")
        if not isinstance(default, bytes | None):
            raise ValueError(f"defaults[{name!r}] needs the bytes that its decoder takes; got {type(default).__name__}")
        return RecordField(name, element, extents, fill=default, decode=decode)
    if element is None:
        if extents:
            raise ValueError(f"schema field {name!r} is text of shape {extents}: a record has one value of it, whose shape is ()")
        if not isinstance(default, str | bytes | None):
            raise ValueError(f"defaults[{name!r}] needs str or bytes; got {type(default).__name__}")
        return RecordField(name, None, (), dtype is str, default.encode() if isinstance(default, str) else default)
    if extents.count(None) > 1:
        raise ValueError(
            f"schema field {name!r} has shape {extents}: a record contains no shapes, so at most one extent may be None"
        )
    if default is not None:
        if element.numpy is None or None in extents:
            raise ValueError(f"defaults[{name!r}]: only text and fields of a fixed shape and numpy's types have defaults")
        default = _fill(name, default, element, tuple(e for e in extents if e is not None))
    return RecordField(name, element, extents, fill=default)


def _fill(name: str, default: Any, element: ElementType, shape: tuple[int, ...]) -> bytes:
    """Return the bytes of a field's default. Floats may be rounded.

    Raises:
        ValueError: the field cannot hold the default.
    """
    why = ""
    try:
        given = np.asarray(default)
        with np.errstate(over="ignore"):
            made = np.asarray(default, element.numpy)
        is_kept = np.array_equal(made, given) if made.dtype.kind in "iub" else not (np.isinf(made) & np.isfinite(given)).any()
        if is_kept:
            return np.broadcast_to(made, shape).tobytes()
    except (TypeError, ValueError, OverflowError) as error:
        why = f" ({error})"
    raise ValueError(f"defaults[{name!r}] is {default!r}; the field is {element.name} of shape {shape}, which cannot hold it{why}")
