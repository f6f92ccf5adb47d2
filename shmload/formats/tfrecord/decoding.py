"""Fields whose one value of bytes is decoded in Python: images, and what else a function makes of bytes.

An `ImageDecoder` writes the image where it is delivered; what any other function gives is checked and copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shmload.formats.images.decoder import ImageDecoder
from shmload.formats.tfrecord.fields import RecordField

Decode = Callable[[bytes], Any]


def check_decoders(decode: Mapping[str, Decode], schema: Mapping[str, Any]) -> None:
    """Whether decoders and schema go together.

    Raises:
        ValueError: they do not.
    """
    if unknown := [name for name in decode if name not in schema]:
        raise ValueError(f"decode names {unknown}, and the schema only {list(schema)}: it says what decoders make")
    for name, decoder in decode.items():
        if isinstance(decoder, ImageDecoder) and schema[name] != decoder.spec:
            raise ValueError(
                f"schema[{name!r}] is {schema[name]!r}, and its decoder makes {decoder.spec}: give {{{name!r}: decoder.spec}}"
            )


def decoded(field: RecordField, data: bytes) -> Any:
    """The value of a field, in memory of its own.

    Raises:
        ValueError: it is not what the schema says.
    """
    assert field.decode is not None
    value = field.decode(data)
    return value if isinstance(field.decode, ImageDecoder) else _checked(field, value)


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
        return
    value = decoded(field, data)
    if field.is_ragged:
        place(value.shape)[...] = value
    else:
        out[field.name] = value


def _checked(field: RecordField, value: Any) -> Any:
    array = np.asarray(value)
    assert field.element is not None
    is_right = len(array.shape) == len(field.shape) and all(
        wanted in (None, n) for wanted, n in zip(field.shape, array.shape, strict=True)
    )
    if not is_right or array.dtype != field.element.numpy:
        raise ValueError(f"the schema says {field}, and its decoder made {array.dtype} of shape {array.shape}")
    return array
