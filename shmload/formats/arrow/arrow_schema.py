"""Derive the schema of a dataset from the arrow schemas of its files or blocks and from the user's own entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shmload.batch.element_types import of_any
from shmload.batch.layout import dtype_and_shape
from shmload.formats.arrow.arrow_reader import checked_columns
from shmload.formats.arrow.arrow_types import dtype_of, is_list, plain_type
from shmload.formats.field_names import NoField


def fields_of(schema: Any, path: str, names: Sequence[str] | None) -> list[Any]:
    """Return the arrow fields of the columns to read.

    Args:
        schema: an arrow schema.
        path: the file or block, for errors.
        names: names of the columns, or None for all.
    Raises:
        NoField: a column is missing, or its name is not unique.
    """
    return [schema.field(name) for name in checked_columns(schema.names, names, path)]


def spec_of(field: Any, path: str, asked: Any) -> Any:
    """Return the schema's entry for a column.

    Args:
        field: the column's arrow field.
        path: the file or block, for errors.
        asked: the user's own entry, or None.
    Raises:
        NoField: its rows cannot be a field of a batch, or not the requested one.
    """
    kind = plain_type(field.type)
    shape = getattr(field.type, "shape", None)  # tensor types have a shape
    if asked is None and shape is not None and is_list(kind):
        asked = dtype_of(kind.value_type), tuple(shape)
    extents: list[int | None] = []
    while is_list(kind):
        extents.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = kind.value_type
    stored = dtype_of(kind)
    is_text = stored in (str, bytes)
    if is_text and extents and not isinstance(field.type, pa.BaseExtensionType):
        spec = stored, (None,) * len(extents)
        return spec if asked in (None, spec) else _refuse(field, path, asked)
    order = getattr(field.type, "permutation", None)  # of a tensor's dimensions; pyarrow also gives the usual one
    is_permuted = order is not None and list(order) != list(range(len(order)))
    if stored is None or None in extents[1:] or is_permuted or (extents and (is_text or stored == np.bool_)):
        is_picture = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        decode = f"RemoteDataset.from_urls(folder).indexed(decode={{{field.name!r}: ImageDecoder()}})"
        remedy = f", or read its pictures with {decode}" if is_picture else ""
        raise NoField(
            f"{path}: column {field.name!r} of {field.type} cannot be a field of a batch: fields are numbers, text, and lists of "
            f"these; name the others in columns={remedy}"
        )
    if is_text:
        return stored if asked in (None, stored, (stored, ())) else _refuse(field, path, asked)
    if asked is None:
        return stored.name, tuple(extents)
    dtype, shape = dtype_and_shape(field.name, asked) if isinstance(asked, tuple) else (asked, tuple(extents))
    found = None if dtype in (str, bytes) else of_any(dtype).numpy
    if found is None or bool(shape) != bool(extents) or (None in shape and shape != tuple(extents)):
        return _refuse(field, path, asked)
    return found.name, shape


def _refuse(field: Any, path: str, asked: Any) -> Any:
    raise NoField(f"{path}: column {field.name!r} is stored as {field.type} and cannot be read as schema says: {asked!r}")


def schema_of(
    schemas: Mapping[str, Any], names: Sequence[str] | None, asked: Mapping[str, Any], fill_null: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Return the schema that several tables have in common.

    Args:
        schemas: the arrow schema of each table, by its name in errors.
        names: names of the columns, or None for all columns of the first table.
        asked: the user's own entries, by column.
        fill_null: values in place of nulls, by column; only the names are checked.
        what: what messages call the tables, in the plural: "files".
    Raises:
        NoField: the tables differ, or rows of a column cannot be a field of a batch.
    """
    first = next(iter(schemas))
    fields = fields_of(schemas[first], first, names)
    known = [field.name for field in fields]
    for argument, given in (("schema", asked), ("fill_null", fill_null)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise NoField(f"{argument} names {unknown}, which is not a column; columns are {known}")
    for one, schema in schemas.items():
        for wanted in fields:
            has = schema.field(wanted.name).type if wanted.name in schema.names else None
            if has != wanted.type:
                raise NoField(
                    f"{one}: column {wanted.name!r} is {has or 'not there'}, and {wanted.type} in {first}; the {what} of a "
                    "dataset have the same columns"
                )
    return {field.name: spec_of(field, first, asked.get(field.name)) for field in fields}
