"""Write the fields of a record to the rows of a batch, and decode those that have a decoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmload._core.records import Survey
from shmload.batch.layout import fits
from shmload.formats.images.decoder import decodes_in_place
from shmload.formats.tfrecord.record_fields import RecordField


def rows_written(survey: Survey, fields: list[RecordField], out: Any) -> dict[str, list[bytes]] | None:
    """Write the fields of surveyed records to the rows of `out`, except those that `is_text`.

    Args:
        survey: the records, without a problem.
        fields: the fields of the survey.
        out: the rows, as in `read_batch_into`.
    Returns:
        the bytes of the fields that `is_text`, by name, one for each row; None if `survey.problem` names a record that could not be
        written.
    """
    targets: list[Any] = []
    for number, field in enumerate(fields):
        if field.is_text:
            targets.append(None)
        elif field.is_ragged:
            targets.append(memory_of(out.reserve(field.name, survey.steps(number))))
        else:
            targets.append(memory_of(out[field.name]))
    # writes all rows if the files have not changed since the survey began
    if not survey.write(targets):
        return None
    return {field.name: survey.texts(number) for number, field in enumerate(fields) if field.is_text}


def memory_of(rows: Any) -> Any:
    """Return the memory of an array or tensor as a buffer: the array itself, or a tensor's bytes."""
    if isinstance(rows, np.ndarray):
        return rows
    import torch

    return rows.reshape(-1).view(torch.uint8).numpy()


def text_value(field: RecordField, data: bytes) -> str | bytes:
    """Return the value of a text field without a decoder.

    Raises:
        ValueError: its type is str, and the bytes are not UTF-8.
    """
    if not field.is_str:
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"field {field.name!r} needs UTF-8, as its type is str: {error}; give the schema bytes instead") from error


def decoded(field: RecordField, data: bytes) -> Any:
    """Return the decoded value of a field, given its bytes.

    Raises:
        ValueError: the value does not match the schema.
    """
    assert field.decode is not None
    value = field.decode(data)
    if decodes_in_place(field.decode):
        return value
    array = np.asarray(value)
    assert field.element is not None
    if not fits(array.shape, field.shape) or array.dtype != field.element.numpy:
        raise ValueError(f"the schema says {field}, and its decoder made {array.dtype} of shape {array.shape}")
    return array


def decode_into(field: RecordField, data: bytes, out: Any) -> None:
    """Decode a field, given its bytes, into its row in `out`, which is as for `read_into` (docs/own_format.md).

    Raises:
        ValueError: the value does not match the schema.
    """

    def place(shape: tuple[int, ...]) -> Any:
        if not field.is_ragged:
            return out[field.name]
        return out.reserve(field.name, tuple(shape[axis] for axis, n in enumerate(field.shape) if n is None))

    if decodes_in_place(field.decode):
        field.decode.decode(data, place)
    else:
        value = decoded(field, data)
        place(value.shape)[...] = value
